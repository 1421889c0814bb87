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
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coflash.compiler import resources, runtime
from coflash.compiler.errors import CompileError
from coflash.compiler.key import dsl_version, locate

#: The processor that host code is compiled for: named, so that an object made on a machine with AVX-512
#: starts on one without it. The DSL's default is the processor of the build machine.
HOST_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}

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
    directory: str | os.PathLike[str], kernel_name: str, config: Any, arch: str, *, report: bool = True
) -> Compiled:
    """Compile a kernel for `arch` ("sm_90a", "sm_100a", "sm_103a") into `directory`, in this process.

    Writes kernel.so, kernel.ptx, kernel.cubin and kernel.json. With `report` the PTX says which source
    line each instruction is from, and the assembler's log is read for spills; both take a third more time
    to compile, and change no instruction.
    """
    started = time.perf_counter()
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    function = "coflash_" + kernel_name.replace(":", "_").replace(".", "_")
    with _lock:
        arguments, compiled, log = _run_dsl(kernel_name, config, arch, report)
        host_object = _host_object(compiled, function)
    (out / "kernel.ptx").write_text(compiled.artifacts.PTX)
    (out / "kernel.cubin").write_bytes(compiled.artifacts.CUBIN)
    link(host_object, out / "kernel.so")
    used = resources.read(compiled.artifacts.CUBIN, log)
    result = Compiled(
        directory=out,
        kernel=kernel_name,
        arch=arch,
        function=function,
        symbol=used[0].symbol,
        arguments=arguments,
        resources=used,
    )
    description = {
        "kernel": kernel_name,
        "arch": arch,
        "config": repr(config),
        "function": function,
        "symbol": result.symbol,
        "arguments": list(arguments),
        "resources": [r.as_dict() for r in used],
        "host": HOST_TARGETS[platform.machine()][1],
        "dsl": dsl_version(),
        "seconds": round(time.perf_counter() - started, 3),
    }
    result.json.write_text(json.dumps(description, indent=1) + "\n")
    return result


def _run_dsl(kernel_name: str, config: Any, arch: str, report: bool) -> tuple[tuple[str, ...], Any, str]:
    log = io.StringIO()
    with (
        _excepthook_kept(),
        tempfile.TemporaryDirectory(prefix="coflash-") as dump,
        contextlib.redirect_stderr(log),
    ):
        import cutlass.cute as cute

        module_name, class_name = locate(kernel_name)
        module = importlib.import_module(module_name)
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {dump}"
        if report:
            options += " --generate-line-info remarks{ptx}"
        try:
            fake_arguments = dict(module.fake_arguments(config))
            host_function = getattr(module, class_name)(config)
            compiled = cute.compile(
                host_function,
                *fake_arguments.values(),
                options=options,
                no_jit_engine=True,  # the host code is exported, never run here
            )
        except Exception as error:
            raise CompileError(f"{kernel_name} for {arch}, {config}:\n{error}\n{log.getvalue()}") from error
    names = tuple(name for name in fake_arguments if name != "stream")
    return names, compiled, log.getvalue()


@contextlib.contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Importing the DSL replaces sys.excepthook; a library that compiles on the side must leave it alone."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def _host_object(compiled: Any, function: str) -> bytes:
    """The launch code and the embedded machine code, as an object file for the baseline processor."""
    from cutlass.cutlass_dsl.tvm_ffi_provider import rename_tvm_ffi_function

    machine = platform.machine()
    if machine not in HOST_TARGETS:
        raise CompileError(f"host code can be made for {', '.join(HOST_TARGETS)}, not for {machine}")
    triple, cpu = HOST_TARGETS[machine]
    module = compiled.ir_module  # nobody else has a use for it, so it can be changed
    with module.context, tempfile.TemporaryDirectory(prefix="coflash-") as folder:
        rename_tvm_ffi_function(module, compiled.function_name, function)
        path = os.path.join(folder, "kernel.o")
        compiled.export_provider.mlirExecutionEngine.dump_object_file_pic(
            module,
            path,
            compiled.function_name,
            opt_level=3,
            host_triple=triple,
            host_cpu=cpu,
            host_features="",
        )
        return Path(path).read_bytes()


def link(host_object: bytes, shared_object: Path) -> None:
    """Make a shared object that exports the tvm-ffi function alone and names the libraries it needs."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    linker = next((found for name in names if name and (found := shutil.which(name))), None)
    if linker is None:
        raise CompileError(
            "compiling a kernel needs a C compiler to link with: none of cc, gcc, clang is on PATH"
        )
    libraries = [runtime.dsl_runtime(), runtime.tvm_ffi_library()]
    with tempfile.TemporaryDirectory(dir=shared_object.parent, prefix=".link-") as folder:
        made, exports = Path(folder, "kernel.o"), Path(folder, "exports")
        made.write_bytes(host_object)
        exports.write_text("{ global: __tvm_ffi_*; local: *; };\n")
        command = [linker, "-shared", "-nostdlib", "-s", f"-Wl,--version-script={exports}", str(made)]
        command += ["-o", str(shared_object), *map(str, libraries)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}:\n{done.stderr}")
