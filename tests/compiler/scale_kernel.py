"""A kernel of a few lines, for the compiler's own tests: y = factor * x, in 256-thread blocks."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from tests.compiler.scale_config import ScaleConfig


class Scale:
    def __init__(self, config: ScaleConfig):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream):
        block = self.config.threads * self.config.unroll
        self.kernel(x, y, factor).launch(
            grid=[(cute.size(x) + block - 1) // block, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        for step in cutlass.range_constexpr(self.config.unroll):
            i = (block * self.config.unroll + step) * self.config.threads + thread
            if i < cute.size(x):
                y[i] = factor * x[i]


def fake_arguments(config: ScaleConfig) -> dict[str, Any]:
    n = cute.sym_int()
    return {
        "x": make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16),
        "y": make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16),
        "factor": cutlass.Float32(0),
        "stream": make_fake_stream(use_tvm_ffi_env_stream=True),
    }
