"""The one module that runs the CuTe-DSL compiler.

`compile_to` turns a kernel class and its config into a shared object, its PTX and its machine code. It needs
neither a GPU nor a driver. Everything else in `coflash.compiler` treats what it writes as a finished thing.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coflash.compiler import host_code, resources
from coflash.compiler.errors import CompileError
from coflash.compiler.host_code import HostCode
from coflash.compiler.key import locate

_lock = threading.Lock()  # the DSL is a process-wide singleton with one set of options


@dataclass(frozen=True)
class Compiled:
    """The files of one compiled kernel, all in `directory`."""

    directory: Path
    kernel: str
    arch: str
    function: str  # name of the tvm-ffi function that `so` exports
    symbol: str  # name of the kernel's entry in `ptx` (the first, where the host function launches several)
    arguments: tuple[str, ...]  # names, in call order; the stream is not among them
    resources: tuple[resources.Resources, ...]  # one for each kernel entry

    @property
    def so(self) -> Path:
        return self.directory / "kernel.so"

    @property
    def ptx(self) -> Path:
        return self.directory / "kernel.ptx"

    @property
    def cubin(self) -> Path:
        return self.directory / "kernel.cubin"

    @property
    def json(self) -> Path:
        return self.directory / "kernel.json"


def compile_to(
    directory: str | os.PathLike[str],
    kernel_name: str,
    config: Any,
    arch: str,
    *,
    report: bool = True,
    fork: bool = False,
) -> Compiled:
    """Compile a kernel for `arch` ("sm_90a", "sm_100a", "sm_103a") into `directory`, in this process.

    Writes kernel.so, kernel.ptx, kernel.cubin and kernel.json. With `report` the PTX says which source
    line each instruction is from, and the assembler's log is read for spills; both take a third more time
    to compile, and change no instruction. With `fork` the host code is made in a forked process, at the same
    time as the kernel: for a process of one thread.
    """
    started = time.perf_counter()
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    function = "coflash_" + kernel_name.replace(":", "_").replace(".", "_")
    job = kernel_name, config, arch, report, function
    with _lock:
        made = (fork and _run_dsl(*job, fork=True)) or _run_dsl(*job)
    assert made is not None
    (out / "kernel.ptx").write_text(made.ptx)
    (out / "kernel.cubin").write_bytes(made.cubin)
    host_code.link(made.host_code, out / "kernel.so")
    used = resources.read(made.cubin, made.log)
    result = Compiled(
        directory=out,
        kernel=kernel_name,
        arch=arch,
        function=function,
        symbol=used[0].symbol,
        arguments=made.arguments,
        resources=used,
    )
    description = {
        "kernel": kernel_name,
        "arch": arch,
        "config": repr(config),
        "function": function,
        "symbol": result.symbol,
        "arguments": list(made.arguments),
        "resources": [r.as_dict() for r in used],
        "host": host_code.HOST_TARGETS[platform.machine()][1],
        "dsl": sys.modules["cutlass"].__version__,
        "seconds": round(time.perf_counter() - started, 3),
    }
    result.json.write_text(json.dumps(description, indent=1) + "\n")
    return result


class _Made(NamedTuple):
    arguments: tuple[str, ...]
    ptx: str
    cubin: bytes
    host_code: HostCode
    log: str


def _run_dsl(
    kernel_name: str, config: Any, arch: str, report: bool, function: str, *, fork: bool = False
) -> _Made | None:
    """Trace a kernel and compile it; None if the host code could not be made in a forked process."""
    log = io.StringIO()
    with (
        _excepthook_kept(),
        tempfile.TemporaryDirectory(prefix="coflash-") as dump,
        contextlib.redirect_stderr(log),
        host_code.Beside(function, dump) if fork else contextlib.nullcontext() as beside,
    ):
        import cutlass.cute as cute

        if beside and not beside.possible():
            return None
        module_name, class_name = locate(kernel_name)
        module = importlib.import_module(module_name)
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {shlex.quote(dump)}"
        if report:
            options += " --generate-line-info remarks{ptx}"
        try:
            fake_arguments = dict(module.fake_arguments(config))
            compiled = cute.compile(
                getattr(module, class_name)(config),
                *fake_arguments.values(),
                options=options if beside else f"{options} --enable-tvm-ffi",
                no_jit_engine=True,  # the host code is exported, never run here
                **({"trace_finalize_hooks": beside.fork} if beside else {}),
            )
            code = beside.finish(compiled) if beside else host_code.compile_here(compiled, function, dump)
        except Exception as error:
            raise CompileError(f"{kernel_name} for {arch}, {config}:\n{error}\n{log.getvalue()}") from error
    if code is None:
        return None
    names = tuple(name for name in fake_arguments if name != "stream")
    return _Made(names, compiled.artifacts.PTX, compiled.artifacts.CUBIN, code, log.getvalue())


@contextlib.contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Importing the DSL replaces sys.excepthook; a library that compiles on the side must leave it alone."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
