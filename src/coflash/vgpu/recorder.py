"""Launches out of compiled host code, on a machine without a GPU or a driver.

CuTe-DSL exports a function as an object: host code that checks its arguments, builds tensor maps, works out
the grid, and calls the runtime library to launch a kernel. `record` loads that object over a stand-in
runtime (`recorder.c`), calls it with host tensors that claim to be CUDA tensors, and returns what it would
have launched:

    launches = record("forward.so", ptx="forward.ptx")(q, k, v, out, lse, scale)

The host code runs unmodified, so grid, cluster, parameters and tensor maps are the ones the hardware would
get, and addresses in them are addresses of the host tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .launch import Buffer, Launch

__all__ = ["RecorderError", "host_memory", "merge_buffers", "parameter_layout", "pose_as_cuda", "record"]

SOURCE = Path(__file__).with_name("recorder.c")
LIBRARY = "libcoflash_recorder.so"
RUNTIME = "libcute_dsl_runtime.so"  # as long as LIBRARY: its name is overwritten in place
CUDA_DEVICE = 2  # kDLCUDA
CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension

# cudaDeviceAttr numbers that host code may ask for.
DEVICE_ATTRIBUTES = {
    1: 1024,  # MaxThreadsPerBlock
    2: 1024,  # MaxBlockDimX
    3: 1024,  # MaxBlockDimY
    4: 64,  # MaxBlockDimZ
    5: 2**31 - 1,  # MaxGridDimX
    6: 65535,  # MaxGridDimY
    7: 65535,  # MaxGridDimZ
    8: 49152,  # MaxSharedMemoryPerBlock
    10: 32,  # WarpSize
    81: 233472,  # MaxSharedMemoryPerMultiprocessor
    97: 232448,  # MaxSharedMemoryPerBlockOptin
    111: 1024,  # ReservedSharedMemoryPerBlock
}
MULTIPROCESSOR_COUNT, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148, (10, 3): 148}


class RecorderError(RuntimeError):
    """The object, its PTX and the arguments do not fit together, or the recorder could not be built."""


# ---- The stand-in runtime --------------------------------------------------------------------------------


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def triple(self) -> tuple[int, int, int]:
        return (self.x, self.y, self.z)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p)
)

_lock = threading.Lock()  # one callback is installed at a time


def _cache_folder() -> Path:
    root = os.environ.get("COFLASH_CACHE")
    if root:
        return Path(root) / "recorder"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coflash" / "recorder"


def build() -> Path:
    """Compile recorder.c with the system's C compiler, once per version of the two sources."""
    digest = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    target = _cache_folder() / digest / LIBRARY
    if target.exists():
        return target
    compiler = _c_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / LIBRARY
        _run(
            [
                compiler,
                "-O1",
                "-shared",
                "-fPIC",
                "-fvisibility=hidden",
                "-Wl,-Bsymbolic",
                f"-Wl,-soname,{LIBRARY}",
            ]
            + [str(SOURCE), "-o", str(made)],
            "compile the recorder",
        )
        os.replace(made, target)
    return target


def _c_compiler() -> str:
    wanted = os.environ.get("CC")
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        path = shutil.which(name)
        if path:
            return path
    missing = wanted or "none of cc, gcc, clang"
    raise RecorderError(
        f"recording a launch needs a C compiler, and {missing} is not on the PATH; "
        "install one or name one in the environment variable CC"
    )


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RecorderError(f"could not {what}: {' '.join(command)}\n{done.stderr.strip()}")


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.coflash_recorder_set_callback.argtypes = [_Callback]
    library.coflash_recorder_set_callback.restype = None
    library.coflash_recorder_set_device_attribute.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.coflash_recorder_set_device_attribute.restype = None
    library.coflash_recorder_take_error.restype = ctypes.c_char_p
    return library


def _tvm_ffi() -> Any:
    try:
        import torch  # noqa: F401  before tvm_ffi, which looks for it while it is itself half imported
    except ImportError:
        pass
    try:
        import tvm_ffi
    except ImportError as error:
        raise RecorderError("recording a launch needs the package apache-tvm-ffi") from error
    return tvm_ffi


def _load(path: Path) -> Any:
    """The object as a module whose runtime calls go to the recorder."""
    tvm_ffi = _tvm_ffi()
    _runtime()
    with tempfile.TemporaryDirectory() as work:
        loadable = Path(work) / (hashlib.sha256(path.read_bytes()).hexdigest()[:16] + ".so")
        image = path.read_bytes()
        if image[:4] != b"\x7fELF":
            raise RecorderError(f"{path} is not an ELF object")
        if image[16] == 1:  # ET_REL
            _run(
                [_c_compiler(), "-shared", str(path), str(build()), tvm_ffi.libinfo.find_libtvm_ffi()]
                + ["-o", str(loadable)],
                f"link {path}",
            )
        else:
            # A needed library is found by name, and the recorder is already loaded under the other one.
            loadable.write_bytes(image.replace(RUNTIME.encode() + b"\0", LIBRARY.encode() + b"\0"))
        for name in _undefined_symbols(loadable.read_bytes()):
            # A real runtime that the process has loaded would offer them too, and must not be called.
            if re.match(r"_?cu|CuteDSLRT_", name) and not hasattr(_runtime(), name):
                raise RecorderError(f"{path} needs {name}, which the recorder does not offer")
        try:
            # Its own libraries first, whatever the process has loaded globally; every symbol at once, not
            # at call.
            ctypes.CDLL(str(loadable), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
            return tvm_ffi.load_module(str(loadable))
        except OSError as error:
            raise RecorderError(f"{path} cannot be loaded: {error}") from error


def _undefined_symbols(image: bytes) -> list[str]:
    """The dynamic symbols that a 64-bit ELF object expects from others."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_size) for i in range(count)]
    names = []
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for at in range(offset, offset + size, 24):
            name, _, _, section = struct.unpack_from("<IBBH", image, at)
            if name and section == 0:
                end = image.index(b"\0", strings + name)
                names.append(image[strings + name : end].decode())
    return names


def exported_functions(path: Path) -> list[str]:
    """The names a tvm-ffi object can be called by."""
    names = set(re.findall(rb"\x00__tvm_ffi_([A-Za-z0-9]\w*)(?=\x00)", path.read_bytes()))
    return sorted(name.decode() for name in names)


# ---- Host tensors as CUDA tensors ------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


class pose_as_cuda:
    """A host tensor that says through DLPack that it lives on CUDA device 0."""

    def __init__(self, tensor: Any):
        if getattr(tensor, "requires_grad", False):
            tensor = tensor.detach()
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA_DEVICE, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        managed = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        managed.tensor.device_type, managed.tensor.device_id = CUDA_DEVICE, 0
        return capsule


def host_memory(tensor: Any, name: str = "") -> Buffer | None:
    """The bytes from the first to the last element of a host tensor; None if it has no elements."""
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    capsule = tensor.__dlpack__()
    view = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    shape = view.shape[: view.ndim]
    if 0 in shape:
        return None
    itemsize = max(view.bits * view.lanes // 8, 1)
    if view.strides:
        strides = view.strides[: view.ndim]
    else:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(view.ndim)]
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    if min(reach, default=0) < 0:
        raise RecorderError(f"{name or 'a tensor'} has a negative stride")
    return _buffer(view.data + view.byte_offset, (sum(reach) + 1) * itemsize, name, keep=tensor)


def _buffer(address: int, nbytes: int, name: str, keep: Any) -> Buffer:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory._keep = keep  # type: ignore[attr-defined]  # the view is the memory's only other owner
    return Buffer(address, np.frombuffer(memoryview(memory).cast("B"), np.uint8), name)


def merge_buffers(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Buffers in order of address, those that share bytes (views of one allocation) joined into one."""
    merged: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (b.address, -b.nbytes)):
        last = merged[-1] if merged else None
        if last is None or buffer.address >= last.address + last.nbytes:
            merged.append(buffer)
            continue
        end = max(last.address + last.nbytes, buffer.address + buffer.nbytes)
        name = "+".join(dict.fromkeys([*last.name.split("+"), *buffer.name.split("+")]))
        merged[-1] = _buffer(last.address, end - last.address, name, keep=(last.data, buffer.data))
    return merged


# ---- Parameters ------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*(?=[.{])", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[^,]*?)?([\w$]+)\s*(?:\[(\d+)\])?\s*(?:,|$)"
)


def parameter_layout(ptx: str, kernel: str) -> list[tuple[int, int]]:
    """(offset, size) of each parameter of a kernel in its parameter space."""
    entries = dict(_ENTRY.findall(ptx))
    if kernel not in entries:
        raise RecorderError(f"the PTX has no kernel {kernel}; it has {', '.join(entries) or 'none'}")
    layout: list[tuple[int, int]] = []
    end = 0
    declared = 0
    for align, kind, _, count in _PARAM.findall(entries[kernel].strip()):
        element = int(re.sub(r"\D", "", kind)) // 8
        size = element * int(count or 1)
        alignment = int(align or element)
        offset = -(-end // alignment) * alignment
        layout.append((offset, size))
        end = offset + size
        declared += 1
    if declared != entries[kernel].count(".param"):
        raise RecorderError(f"the parameter list of {kernel} cannot be read:\n{entries[kernel]}")
    return layout


# ---- record ----------------------------------------------------------------------------------------------


def record(
    shared_object: str | os.PathLike[str],
    ptx: str | os.PathLike[str] | None = None,
    *,
    function: str | None = None,
    names: Iterable[str] | None = None,
    multiprocessors: int | None = None,
) -> Callable[..., list[Launch]]:
    """A callable that runs the host code of an exported object and returns its launches instead of
    launching.

    `shared_object` is what CuTe-DSL's `export_to_c` wrote, linked or not. `ptx` is its PTX, as text or as a
    file (by default the file beside the object that ends in .ptx). `function` is the exported name, needed
    where there are several. `names` names the arguments in reports. The callable takes what the compiled
    function takes; tensors are host tensors with DLPack, and kernels that run later read and write them in
    place.
    """
    path = Path(shared_object)
    if not path.exists():
        raise RecorderError(f"{path} does not exist")
    text = _ptx_text(path.with_suffix(".ptx") if ptx is None else ptx)
    target = re.search(r"^\s*\.target\s+sm_(\d+)(\d)", text, re.MULTILINE)
    if not target:
        raise RecorderError("the PTX names no .target sm_*")
    capability = int(target[1]), int(target[2])
    if capability not in MULTIPROCESSORS:
        raise RecorderError(
            f"the PTX is for sm_{target[1]}{target[2]}; the virtual GPU knows sm_90, sm_100, sm_103"
        )
    attributes = {
        **DEVICE_ATTRIBUTES,
        MULTIPROCESSOR_COUNT: multiprocessors or MULTIPROCESSORS[capability],
        CAPABILITY_MAJOR: capability[0],
        CAPABILITY_MINOR: capability[1],
    }

    functions = exported_functions(path)
    if function is None:
        if len(functions) != 1:
            raise RecorderError(
                f"{path} exports {functions or 'no tvm-ffi function'}; name one with function="
            )
        function = functions[0]
    elif function not in functions:
        raise RecorderError(f"{path} does not export {function}; it exports {functions}")
    call = _load(path)[function]
    argument_names = list(names or [])

    def launches_of(*arguments: Any) -> list[Launch]:
        tensors: list[Buffer] = []

        def posed(argument: Any, name: str) -> Any:
            if isinstance(argument, (tuple, list)):
                return (
                    type(argument)(*_each(argument, name))
                    if hasattr(argument, "_fields")
                    else type(argument)(_each(argument, name))
                )
            if not hasattr(argument, "__dlpack__"):
                return argument
            memory = host_memory(argument, name)
            if memory is not None:
                tensors.append(memory)
            return _tvm_ffi().from_dlpack(pose_as_cuda(argument))

        def _each(items: Iterable[Any], name: str) -> list[Any]:
            return [posed(item, f"{name}[{i}]") for i, item in enumerate(items)]

        claimed = [
            posed(argument, argument_names[i] if i < len(argument_names) else f"argument {i}")
            for i, argument in enumerate(arguments)
        ]
        buffers = merge_buffers(tensors)
        launches: list[Launch] = []
        failures: list[Exception] = []

        def on_launch(kernel: bytes, config: Any, values: Any) -> int:
            try:
                launches.append(_launch(text, kernel.decode(), config.contents, values, buffers))
                return 0
            except Exception as error:  # the caller is C: carry it across
                failures.append(error)
                return 719  # cudaErrorLaunchFailure

        runtime = _runtime()
        callback = _Callback(on_launch)
        with _lock:
            for number, value in attributes.items():
                runtime.coflash_recorder_set_device_attribute(number, value)
            runtime.coflash_recorder_set_callback(callback)
            try:
                call(*claimed)
            except Exception as error:
                if failures:
                    raise failures[0] from error
                refused = runtime.coflash_recorder_take_error().decode()
                raise RecorderError(
                    f"{function}: {error}{' (' + refused + ')' if refused else ''}"
                ) from error
            finally:
                runtime.coflash_recorder_set_callback(_Callback())
        return launches

    return launches_of


def _ptx_text(ptx: str | os.PathLike[str]) -> str:
    if isinstance(ptx, str) and "\n" in ptx:
        return ptx
    try:
        return Path(ptx).read_text()
    except OSError as error:
        raise RecorderError(f"the kernel's PTX cannot be read: {error}") from error


def _launch(ptx: str, kernel: str, config: _Config, values: Any, buffers: list[Buffer]) -> Launch:
    layout = parameter_layout(ptx, kernel)
    params = bytearray(max((offset + size for offset, size in layout), default=0))
    for i, (offset, size) in enumerate(layout):
        params[offset : offset + size] = ctypes.string_at(values[i], size)
    cluster: tuple[int, int, int] = (1, 1, 1)
    for i in range(config.attribute_count):
        attribute = config.attributes[i]
        if attribute.id == CLUSTER_DIMENSION and attribute.value[0]:
            cluster = (attribute.value[0], attribute.value[1], attribute.value[2])
    return Launch(
        ptx=ptx,
        kernel=kernel,
        grid=config.grid.triple(),
        block=config.block.triple(),
        cluster=cluster,
        shared_bytes=config.dynamic_shared_bytes,
        params=bytes(params),
        buffers=buffers,
    )
