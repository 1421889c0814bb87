"""Run another package's CuTe-DSL kernels on the virtual GPU, through that package's own Python functions.

`peer_session("sm_90a", on_launch)` makes CPU tensors look like CUDA tensors to the package, stands in for the device
queries it makes while compiling, and replaces the launch of every function it compiles by recording: the callback
gets the recorded launches, in order, and normally runs them, so that what the package does next sees the results.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


def find_peers() -> None:
    """Put the folder that `make test-peers` installed the peers in on the path."""
    folder = os.environ.get("COFLASH_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)


@contextlib.contextmanager
def peer_session(arch: str, on_launch: Callable, multiprocessors: int | None = None) -> Iterator[None]:
    import torch

    sms = multiprocessors or MULTIPROCESSORS[arch]
    environment = {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp(prefix="peer-ptx-"),
        "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
        "FLASH_ATTENTION_NUM_SMS": str(sms),
    }
    capability = (int(arch[3:-2]), int(arch[-2]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        import cutlass.cute as cute
        from cutlass.cute import runtime
        from cutlass.utils import HardwareInfo

        for owner, name, value in [
            (HardwareInfo, "__init__", lambda self, *_: None),
            (HardwareInfo, "get_device_multiprocessor_count", lambda self: sms),
            (HardwareInfo, "get_max_active_clusters", lambda self, cluster_size, **_: sms // cluster_size),
            (cute, "compile", _recording_compile(cute.compile, on_launch)),
            (runtime, "from_dlpack", _posing(runtime.from_dlpack)),
            (torch.Tensor, "is_cuda", property(lambda self: True)),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "current_device", lambda: 0),
        ]:
            create = owner is torch.Tensor
            stack.enter_context(mock.patch.object(owner, name, value, create=create))
        yield


def _posing(from_dlpack: Callable) -> Callable:
    from coflash.vgpu.recorder import pose_as_cuda

    return lambda tensor, *args, **kwargs: from_dlpack(pose_as_cuda(tensor), *args, **kwargs)


def _recording_compile(compile_on_cpu: Callable, on_launch: Callable) -> Callable:
    from coflash.vgpu.recorder import record

    class Compile:
        def __getitem__(self, options):  # cute.compile[options](...)
            return _recording_compile(compile_on_cpu[options], on_launch)

        def __call__(self, function, *args, **kwargs):
            compiled = compile_on_cpu(function, *args, **kwargs)
            name = type(getattr(function, "__self__", function)).__name__
            folder = Path(tempfile.mkdtemp(prefix="peer-object-"))
            compiled.export_to_c(str(folder / "kernel.o"), function_name="peer")
            record_call = record(folder / "kernel.o", compiled.__ptx__)

            def call(*arguments):
                for launch in record_call(*arguments):
                    launch.name = name
                    on_launch(launch)

            return call

    return Compile()
