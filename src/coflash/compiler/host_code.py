"""What runs on the host to launch a kernel: compiled to an object, linked with the kernel's machine code.

Making it takes a quarter of a second: the checks of arguments that tvm-ffi's calling convention wants are
two thousand operations, built in Python and compiled by LLVM. None of it depends on what the kernel computes,
so a process forked after tracing can do it while this one compiles the kernel (`Beside`).
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
    made: bytes  # an object file
    libraries: tuple[str, ...]  # that it needs
    embedded: tuple[str, bytes] | None = None  # what it refers to by name and holds not


def compile_here(compiled: Any, function: str) -> HostCode:
    """The host code of a compiled kernel, the machine code within it."""
    return HostCode(_object(compiled, function), _libraries())


def _object(compiled: Any, function: str) -> bytes:
    """An object file for the baseline processor that exports the tvm-ffi function under the name `function`."""
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


def _libraries() -> tuple[str, ...]:
    return str(runtime.dsl_runtime()), str(runtime.tvm_ffi_library())


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
        Path(folder, "kernel.o").write_bytes(code.made)
        if code.embedded is not None:
            name, data = code.embedded
            inputs.append("image.s")
            Path(folder, "image").write_bytes(data)
            Path(folder, "image.s").write_text(_IMAGE.format(name=name))
        Path(folder, "exports").write_text("{ global: __tvm_ffi_*; local: *; };\n")
        command = [linker, "-shared", "-nostdlib", "-s", "-Wl,--version-script=exports", *inputs]
        command += ["-o", os.path.abspath(shared_object), *code.libraries]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}:\n{done.stderr}")


_IMAGE = """\
.section .rodata
.balign 64
.globl {name}
{name}:
.incbin "image"
.section .note.GNU-stack,"",%progbits
"""


# ---- beside the kernel ----


class Beside:
    """Host code made in a forked process while this one compiles the kernel.

    `fork` is called by the DSL between tracing and compiling. In the process forked there, the kernel of the
    traced module loses its body, so that the rest is compiled in a moment; it keeps what decides how much
    shared memory the launch asks for. This process compiles the kernel, without tvm-ffi's function. Either
    calls `finish` with what it has compiled. The one forked ends in it. This one gets the other's host code if
    the two agree on every operation that both compiled, and None otherwise.
    """

    def __init__(self, function: str, folder: str) -> None:
        self._function = function
        self._answer = Path(folder, "host-code")
        self._child: int | None = None
        self.forked = False  # whether this is the forked process

    @staticmethod
    def worthwhile() -> bool:
        """Whether this process can fork, and has a processor to spare."""
        return _one_thread() and len(os.sched_getaffinity(0)) > 1

    @staticmethod
    def possible() -> bool:
        """Whether this process can fork, now that the DSL is imported, and the DSL calls back after tracing."""
        from cutlass.base_dsl.dsl import BaseDSL

        return _one_thread() and hasattr(BaseDSL, "trace_finalize_hooks")

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        if self.forked:
            os._exit(1)
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self._wait()

    def fork(self, dsl: Any, module: Any, _: str) -> None:
        with contextlib.suppress(OSError):  # no room for another process
            self._child = os.fork()
        if self._child != 0:
            return
        self.forked = True
        tvm_ffi_without_numpy()
        from cutlass.base_dsl.compiler import EnableTVMFFI, KeepCUBIN, KeepPTX

        options = dsl.compile_options.options
        options[EnableTVMFFI].value = True
        options[KeepPTX].value = options[KeepCUBIN].value = False  # the other process writes them
        _empty_kernels(module)

    def finish(self, compiled: Any) -> HostCode | None:
        embedded = _take_machine_code(compiled.ir_module)
        if embedded is None:
            return None
        text = compiled.ir_module.operation.get_asm().removesuffix("}\n")
        if self.forked:
            answer = (text, embedded[0], HostCode(_object(compiled, self._function), _libraries()))
            self._answer.write_bytes(pickle.dumps(answer))
            os._exit(0)
        if self._child is None or self._wait():
            return None
        theirs, name, code = pickle.loads(self._answer.read_bytes())
        if name != embedded[0] or not theirs.startswith(text):  # tvm-ffi's function comes after the rest
            return None
        return code._replace(embedded=embedded)

    def _wait(self) -> int:
        """Until the forked process has ended; 0 if it has done its work."""
        child, self._child = self._child, None
        assert child is not None
        return os.waitpid(child, 0)[1]


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


def _take_machine_code(module: Any) -> tuple[str, bytes] | None:
    """Name and contents of the constant that is the machine code; a declaration takes its place. None where
    it can't be told which one it is."""
    from cutlass._mlir import ir

    with module.context, module.operation.location:
        found = [
            operation
            for operation in _operations(module.operation.regions[0], "llvm.mlir.global")
            if isinstance(value := operation.attributes.get("value"), ir.StringAttr)
            and value.value_bytes.startswith(_MACHINE_CODE)
        ]
        if len(found) != 1:
            return None
        (constant,) = found
        name, data = constant.attributes["sym_name"].value, constant.attributes["value"].value_bytes
        text = f"llvm.mlir.global external constant @{name}() {{addr_space = 0 : i32}} : !llvm.array<1 x i8>"
        ir.InsertionPoint(constant).insert(ir.Operation.parse(text))
        constant.erase()
    return name, data


_MACHINE_CODE = (b"\x50\xed\x55\xba", b"\x7fELF")  # a container of CUDA's, or the code itself


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
