"""Run another package's CuTe-DSL kernels on the virtual GPU, through that package's own Python functions.

`peer_session("sm_90a", on_call)` makes CPU tensors look like CUDA tensors to the package, stands in for the
device queries it makes while compiling, and hands every call of a function it compiled to `on_call`. The
callback normally records the call's launches and runs them, so that what the package does next sees the
results.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from coflash.vgpu.recorder import pose_as_cuda, record

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


@dataclass
class Call:
    """One call of a compiled function: the exported object, its PTX and machine code, and the arguments (host
    tensors and scalars)."""

    name: str
    object: Path
    ptx: str
    cubin: bytes
    arguments: tuple[Any, ...]

    def launches(self) -> list:
        made = record(self.object, self.ptx, function="peer")(*self.arguments)
        for launch in made:
            launch.name = self.name
        return made


def _import_without_triton() -> None:
    """Import quack where triton isn't installed: it asks for it at import, for an autotuner nothing here uses.

    The stand-in goes away again, so that torch does not take it for the real one.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    import torch._inductor.runtime.hints  # noqa: F401  (looks for triton when first imported)

    sys.modules["triton"] = mock.MagicMock(__spec__=None)
    try:
        import quack.autotuner  # noqa: F401
    finally:
        del sys.modules["triton"]


_last_arch = [""]


def _forget_device() -> None:
    """Empty the packages' caches of device properties and compiled kernels."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("flash_attn", "quack"):
            continue
        for member in list(vars(module).values()):
            if hasattr(member, "cache_clear"):
                member.cache_clear()
            if hasattr(member, "compile_cache"):
                member.compile_cache.clear()


# Compiled functions outlive a session in the package's caches, so they look up the callback of the running
# one.
_on_call: list[Callable[[Call], None]] = []


@contextlib.contextmanager
def peer_session(arch: str, on_call: Callable[[Call], None]) -> Iterator[None]:
    """Makes the package believe in a device of this architecture, for the length of the block."""
    import torch

    sms = MULTIPROCESSORS[arch]
    environment = {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp(prefix="peer-ptx-"),
        "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
        "FLASH_ATTENTION_NUM_SMS": str(sms),
    }
    capability = (int(arch[3:-2]), int(arch[-2]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        folder = os.environ.get("COFLASH_PEERS")
        if folder and folder not in sys.path:
            sys.path.append(folder)
        _import_without_triton()
        import cutlass.cute as cute
        from cutlass.cute import runtime
        from cutlass.cutlass_dsl import CuTeDSL
        from cutlass.utils import HardwareInfo

        # The DSL reads its environment once a process, perhaps before this.
        for name, value in [
            ("arch", arch),
            ("keep_ptx", True),
            ("keep_cubin", True),
            ("dump_dir", environment["CUTE_DSL_DUMP_DIR"]),
        ]:
            stack.enter_context(mock.patch.object(CuTeDSL._get_dsl().envar, name, value))
        from_dlpack = runtime.from_dlpack
        for owner, name, value in [
            (HardwareInfo, "__init__", lambda self, *_: None),
            (HardwareInfo, "get_device_multiprocessor_count", lambda self: sms),
            (HardwareInfo, "get_max_active_clusters", lambda self, cluster_size, **_: sms // cluster_size),
            (cute, "compile", _ExportingCompile(cute.compile)),
            (runtime, "from_dlpack", lambda tensor, *a, **k: from_dlpack(pose_as_cuda(tensor), *a, **k)),
            (torch.Tensor, "is_cuda", property(lambda self: True)),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "current_device", lambda: 0),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value, create=owner is torch.Tensor))
        if arch != _last_arch[0]:
            _forget_device()
            _last_arch[0] = arch
        _on_call.append(on_call)
        try:
            yield
        finally:
            _on_call.pop()


class _ExportingCompile:
    """cute.compile, returning a callable that reports its calls instead of launching."""

    def __init__(self, compile_for_device: Any):
        self._compile = compile_for_device

    def __getitem__(self, options: Any) -> _ExportingCompile:  # cute.compile[options](...)
        return _ExportingCompile(self._compile[options])

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        compiled = self._compile(function, *args, **kwargs)
        name = type(getattr(function, "__self__", function)).__name__
        target = Path(tempfile.mkdtemp(prefix="peer-object-")) / "kernel.o"
        compiled.export_to_c(str(target), function_name="peer")
        ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
        return lambda *arguments: _on_call[-1](Call(name, target, ptx, cubin, arguments))
