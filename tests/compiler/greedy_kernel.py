"""A kernel that keeps more values alive than its registers hold, so that the assembler must spill."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from tests.compiler.scale_config import ScaleConfig

VALUES = 160


class Greedy:
    def __init__(self, config: ScaleConfig):
        if config.threads < 0:
            raise ValueError("a block can't have a negative number of threads")
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[1024, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        values = [x[thread * VALUES + i] for i in range(VALUES)]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(VALUES):
            y[thread * VALUES + i] = values[i] * values[(7 * i + 3) % VALUES] + values[VALUES - 1 - i]


def fake_arguments(config: ScaleConfig) -> dict[str, Any]:
    n = cute.sym_int()
    return {
        "x": make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16),
        "y": make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16),
        "stream": make_fake_stream(use_tvm_ffi_env_stream=True),
    }
