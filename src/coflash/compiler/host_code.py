"""What runs on the host to launch a kernel: compiled to an object, linked with the kernel's machine code.

Making it takes a quarter of a second: the checks of arguments that tvm-ffi's calling convention wants are
two thousand operations, built in Python and compiled by LLVM. None of it depends on what the kernel computes,
so a process forked after tracing can do it while its parent compiles the kernel (`Beside`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from coflash.compiler import runtime
from coflash.compiler.errors import CompileError

#: The processor that host code is compiled for: named, so that an object made on a machine with AVX-512
#: starts on one without it. The DSL's default is the processor of the build machine.
HOST_TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}


class HostCode(NamedTuple):
    object_file: bytes
    libraries: tuple[str, ...]  # that it needs
    image: tuple[str, bytes] | None = None  # machine code that the object refers to: its symbol and contents


def compile_here(compiled: Any, function: str, folder: str) -> HostCode:
    """Host code for the baseline processor that exports the tvm-ffi function under the name `function`."""
    from cutlass.cutlass_dsl.tvm_ffi_provider import rename_tvm_ffi_function

    machine = platform.machine()
    if machine not in HOST_TARGETS:
        raise CompileError(f"host code can be made for {', '.join(HOST_TARGETS)}, not for {machine}")
    triple, cpu = HOST_TARGETS[machine]
    module = compiled.ir_module  # nobody else has a use for it, so it can be changed
    path = Path(folder, "kernel.o")
    with module.context:
        rename_tvm_ffi_function(module, compiled.function_name, function)
        compiled.export_provider.mlirExecutionEngine.dump_object_file_pic(
            module,
            str(path),
            compiled.function_name,
            opt_level=3,
            host_triple=triple,
            host_cpu=cpu,
            host_features="",
        )
    return HostCode(path.read_bytes(), (str(runtime.dsl_runtime()), str(runtime.tvm_ffi_library())))


def link(code: HostCode, shared_object: Path) -> None:
    """Make a shared object that exports the tvm-ffi function alone and names the libraries it needs."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    linker = next((found for name in names if name and (found := shutil.which(name))), None)
    if linker is None:
        raise CompileError(
            "compiling a kernel needs a C compiler to link with: none of cc, gcc, clang is on PATH"
        )
    with tempfile.TemporaryDirectory(dir=shared_object.parent, prefix=".link-") as folder:
        inputs = ["kernel.o"]
        Path(folder, "kernel.o").write_bytes(code.object_file)
        if code.image is not None:
            symbol, data = code.image
            inputs.append("image.s")
            Path(folder, "image").write_bytes(data)
            Path(folder, "image.s").write_text(_IMAGE.format(symbol=symbol))
        Path(folder, "exports").write_text("{ global: __tvm_ffi_*; local: *; };\n")
        command = [os.path.abspath(linker), "-shared", "-nostdlib", "-s", "-Wl,--version-script=exports"]
        command += [*inputs, "-o", os.path.abspath(shared_object), *code.libraries]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}:\n{done.stderr}")


_IMAGE = """\
.section .rodata
.balign 64
.globl {symbol}
{symbol}:
.incbin "image"
.section .note.GNU-stack,"",%progbits
"""


# ---- beside the kernel ----


class Beside:
    """Host code made in a child process while its parent compiles the kernel.

    The DSL calls `fork` between tracing and compiling. In the child, the kernel of the traced module loses its
    body, so that the rest is compiled in a moment; it keeps what decides how much shared memory the launch asks
    for. The parent compiles the kernel, without tvm-ffi's function. Either calls `finish` with what it has
    compiled. The child ends in it. The parent gets the child's host code if the two agree on every operation
    that both compiled, and None otherwise.
    """

    def __init__(self, function: str, folder: str) -> None:
        self._function = function
        self._folder = folder  # removed by the parent: a child that is killed leaves nothing elsewhere
        self._answer = Path(folder, "host-code")
        self._parent = os.getpid()
        self._child: int | None = None

    @staticmethod
    def worthwhile() -> bool:
        """Whether this process can fork, and has a processor to spare."""
        return _one_thread() and len(os.sched_getaffinity(0)) > 1

    @staticmethod
    def possible() -> bool:
        """Whether this process can fork, now that the DSL is imported, and the DSL calls back after tracing."""
        from cutlass.base_dsl.dsl import BaseDSL

        return _one_thread() and hasattr(BaseDSL, "trace_finalize_hooks")

    @property
    def _in_child(self) -> bool:
        """Told by the number, which an interrupt right after the fork leaves as it is."""
        return os.getpid() != self._parent

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_child:
            os._exit(1)
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self._wait()

    def fork(self, dsl: Any, module: Any, _: str) -> None:
        if not _one_thread():
            return
        with contextlib.suppress(OSError):  # no room for another process
            self._child = os.fork()
        if not self._in_child:
            return
        tvm_ffi_without_numpy()
        from cutlass.base_dsl.compiler import EnableTVMFFI, KeepCUBIN, KeepPTX

        options = dsl.compile_options.options
        options[EnableTVMFFI].value = True
        options[KeepPTX].value = options[KeepCUBIN].value = False  # the parent writes them
        _empty_kernels(module)

    def finish(self, compiled: Any) -> HostCode | None:
        image = _take_image(compiled.ir_module)
        if image is None:
            return None
        text = compiled.ir_module.operation.get_asm().removesuffix("}\n")
        if self._in_child:
            answer = (text, compile_here(compiled, self._function, self._folder))
            self._answer.write_bytes(pickle.dumps(answer))
            os._exit(0)
        if self._child is None or self._wait():
            return None
        theirs, code = pickle.loads(self._answer.read_bytes())
        if not theirs.startswith(text):  # tvm-ffi's function comes after the rest
            return None
        return code._replace(image=image)

    def _wait(self) -> int:
        """Until the child has ended; 0 if it has done its work."""
        assert self._child is not None
        status = os.waitpid(self._child, 0)[1]
        self._child = None
        return status


def _one_thread() -> bool:
    """Whether the process is known to have no other thread, whose locks a forked process would never get."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _operations(region: Any, name: str) -> Iterator[Any]:
    for block in region.blocks:
        for operation in block.operations:
            if operation.operation.name == name:
                yield operation.operation


def _empty_kernels(module: Any) -> None:
    """Erase what kernels do, but for their shared memory and the return."""
    for device_code in _operations(module.operation.regions[0], "gpu.module"):
        for kernel in _operations(device_code.regions[0], "cuda.kernel"):
            (block,) = kernel.regions[0].blocks
            for operation in reversed([*block.operations][:-1]):
                if "smem.partition_id" not in operation.operation.attributes:
                    operation.operation.erase()


def _take_image(module: Any) -> tuple[str, bytes] | None:
    """Symbol and contents of the constant that is the machine code; a declaration takes its place. None where
    it can't be told which one it is."""
    from cutlass._mlir import ir

    with module.context, module.operation.location:
        found = [
            operation
            for operation in _operations(module.operation.regions[0], "llvm.mlir.global")
            if isinstance(value := operation.attributes.get("value"), ir.StringAttr)
            and value.value_bytes.startswith(_MAGIC)
        ]
        if len(found) != 1:
            return None
        (constant,) = found
        symbol, data = constant.attributes["sym_name"].value, constant.attributes["value"].value_bytes
        text = (
            f"llvm.mlir.global external constant @{symbol}() {{addr_space = 0 : i32}} : !llvm.array<1 x i8>"
        )
        ir.InsertionPoint(constant).insert(ir.Operation.parse(text))
        constant.erase()
    return symbol, data


_MAGIC = (b"\x50\xed\x55\xba", b"\x7fELF")  # a container of CUDA's, or the code itself


def tvm_ffi_without_numpy() -> None:
    """Import tvm-ffi for the compiler's use: it looks at NumPy and ml_dtypes, which take longer than itself to
    import, and does without them where they are missing."""
    names = ("numpy", "ml_dtypes")
    there = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("tvm_ffi")
    finally:
        for name, module in there.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
