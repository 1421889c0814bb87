"""The hand-written kernels of these tests on a Hopper GPU.

    python -m tests.vgpu.units.on_hardware pack CASES      the launches of the test kernels, and their inputs
    python tests/vgpu/units/on_hardware.py run CASES OUT   run them (needs a GPU, its driver, NumPy), record results
    python -m tests.vgpu.units.on_hardware keep OUT        keep the results beside the tests

Recorded results are compared bit for bit with the virtual GPU's whenever a test runs the same kernel on the same input.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).with_name("data") / "h200.npz"
MAP_FIELDS = ("address", "element", "extents", "strides", "box", "element_strides", "swizzle")
_recorded: dict[str, np.ndarray] | None = None
_packed: list[dict[str, Any]] | None = None


def digest(source: str, inputs: Sequence[tuple[str, bytes]]) -> str:
    h = hashlib.sha256(source.encode())
    for name, data in inputs:
        if name != "table":  # addresses, different every time
            h.update(name.encode() + data)
    return h.hexdigest()[:16]


class Watch:
    """Around a launch: remembers its inputs, and holds its outputs against what hardware gave."""

    def __init__(self, launch: Any, map_: Any = None) -> None:
        """map_: the TensorMap that the parameters begin with, for a driver to encode."""
        self.launch = launch
        self.map = map_
        self.inputs = [(b.name, b.data.tobytes()) for b in launch.buffers]
        self.key = digest(launch.ptx, self.inputs)

    def finished(self, skip: Sequence[str] = ()) -> None:
        """Compare, where there is a record; buffers named in `skip` may differ (approximate functions)."""
        global _recorded
        if _packed is not None:
            self._pack()
        if _recorded is None:
            _recorded = dict(np.load(DATA)) if DATA.exists() else {}
        if ".target sm_90a" in self.launch.ptx and not any(key.startswith(self.key) for key in _recorded):
            warnings.warn("no H200 has run this kernel on this input: see on_hardware.py", stacklevel=2)
        for n, buffer in enumerate(self.launch.buffers):
            hardware = _recorded.get(f"{self.key}/{n}")
            if hardware is not None and buffer.name not in skip:
                np.testing.assert_array_equal(buffer.data, hardware, f"{buffer.name} against an H200")

    def _pack(self) -> None:
        assert _packed is not None
        launch = self.launch
        if ".target sm_90a" not in launch.ptx:
            return
        _packed.append(
            {
                "key": self.key,
                "test": os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split(" ")[0],
                "map": self.map and {f: getattr(self.map, f) for f in MAP_FIELDS},
                "ptx": launch.ptx,
                "kernel": launch.kernel,
                "grid": launch.grid,
                "block": launch.block,
                "cluster": launch.cluster,
                "shared": launch.shared_bytes,
                "params": launch.params,
                "buffers": [
                    (b.address, name, data)
                    for b, (name, data) in zip(launch.buffers, self.inputs, strict=True)
                ],
                "changed": [
                    n
                    for n, (b, (_, data)) in enumerate(zip(launch.buffers, self.inputs, strict=True))
                    if b.data.tobytes() != data
                ],
                "virtual": [b.data.tobytes() for b in launch.buffers],
            }
        )


def pack(path: str) -> None:
    import pytest
    from tests.vgpu.units import on_hardware  # the instance the tests use

    on_hardware._packed = []
    pytest.main(["-q", "-p", "no:cacheprovider", str(Path(__file__).parent), "-k", "kernels"])
    cases = {case["key"]: case for case in on_hardware._packed}
    Path(path).write_bytes(gzip.compress(pickle.dumps(list(cases.values()))))
    print(f"{len(cases)} launches in {path}")


# ---- On the GPU -----------------------------------------------------------------------------------------------


class Driver:
    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {(text.value or b'').decode()}")

    def load(self, ptx: str, kernel: str) -> ctypes.c_void_p:
        log = ctypes.create_string_buffer(8192)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        options = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        try:
            self("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode()}") from None
        self("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        return function


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def moved(data: bytes, addresses: dict[int, int]) -> bytes:
    """Host addresses among 8-byte words replaced by device addresses."""
    words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64).copy()
    for host, device in addresses.items():
        words[words == host] = device
    return words.tobytes() + data[len(data) // 8 * 8 :]


PARAMETER = re.compile(r"\.param\s+(?:\.align (\d+)\s+)?\.(\w+)\s+\w+(?:\[(\d+)\])?")


def parameter_offsets(ptx: str) -> list[int]:
    """Where each parameter lies in a launch's parameter bytes: natural alignment, in order.

    The parameters go to the driver one by one: it aligns a tensor map in the constant bank, whose parameters do
    not begin at a multiple of 64, so its layout is another one.
    """
    offsets, end = [], 0
    for align, type_, count in PARAMETER.findall(ptx.split("{")[0]):
        size = int(type_[1:]) // 8
        step = int(align or size)
        start = -(-end // step) * step
        offsets.append(start)
        end = start + size * int(count or 1)
    return offsets


DATA_TYPES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
}


def encoded(driver: Driver, map_: dict[str, Any], addresses: dict[int, int]) -> bytes:
    """The driver's encoding of a tensor map over device memory."""
    room = ctypes.create_string_buffer(192)
    start = -(-ctypes.addressof(room) // 64) * 64
    rank = len(map_["extents"])
    driver(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        DATA_TYPES[map_["element"]],
        rank,
        ctypes.c_void_p(addresses[map_["address"]]),
        (ctypes.c_uint64 * rank)(*map_["extents"]),
        (ctypes.c_uint64 * rank)(*map_["strides"][1:]),
        (ctypes.c_uint32 * rank)(*map_["box"]),
        (ctypes.c_uint32 * rank)(*map_["element_strides"]),
        0,
        {0: 0, 32: 1, 64: 2, 128: 3}[map_["swizzle"]],
        0,
        0,
    )
    return ctypes.string_at(start, 128)


def execute(driver: Driver, case: dict[str, Any]) -> list[np.ndarray]:
    addresses: dict[int, int] = {}
    pointers = []
    for address, _, data in case["buffers"]:
        pointer = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(len(data), 16)))
        addresses[address] = pointer.value
        pointers.append(pointer)
    for pointer, (_, name, data) in zip(pointers, case["buffers"], strict=True):
        data = moved(data, addresses) if name == "table" else data
        driver("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))
    function = driver.load(case["ptx"], case["kernel"])
    driver("cuFuncSetAttribute", function, 8, case["shared"])  # largest dynamic shared memory
    raw = moved(case["params"], addresses)
    if case["map"]:
        raw = encoded(driver, case["map"], addresses) + raw[128:]
    params = ctypes.create_string_buffer(raw, len(raw))
    offsets = parameter_offsets(case["ptx"])
    arguments = (ctypes.c_void_p * len(offsets))(*[ctypes.addressof(params) + o for o in offsets])
    attribute = Attribute(4, 0, (ctypes.c_uint * 16)(*case["cluster"]))  # cluster dimension
    config = Config(
        (ctypes.c_uint * 3)(*case["grid"]),
        (ctypes.c_uint * 3)(*case["block"]),
        case["shared"],
        None,
        ctypes.pointer(attribute),
        1,
    )
    driver("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)
    driver("cuCtxSynchronize")
    results = []
    for pointer, (_, _, data) in zip(pointers, case["buffers"], strict=True):
        out = np.empty(len(data), np.uint8)
        driver("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), pointer, ctypes.c_size_t(len(data)))
        driver("cuMemFree_v2", pointer)
        results.append(out)
    return results


def run(path: str, out: str) -> None:
    """Every launch; after one that breaks the context, a new process goes on with the next."""
    cases = pickle.loads(gzip.decompress(Path(path).read_bytes()))
    parts: dict[str, np.ndarray] = {}
    first = 0
    while first < len(cases):
        part = f"{out}.part.npz"
        done = subprocess.run([sys.executable, __file__, "part", path, part, str(first)], timeout=300)
        parts |= dict(np.load(part))
        first = int(parts.pop("next"))
        if done.returncode not in (0, 3):
            break
    np.savez_compressed(out, **parts)
    print(f"{len(parts)} results of {len(cases)} launches")


def run_part(path: str, out: str, start: str) -> None:
    driver = Driver()
    recorded: dict[str, np.ndarray] = {}
    cases = pickle.loads(gzip.decompress(Path(path).read_bytes()))
    for number in range(int(start), len(cases)):
        case = cases[number]
        try:
            results = execute(driver, case)
        except RuntimeError as error:
            print(f"{case['key']} {case['test']}: {error}", flush=True)
            np.savez_compressed(out, next=number + 1, **recorded)
            sys.exit(3)
        for n in case["changed"]:
            recorded[f"{case['key']}/{n}"] = results[n]
            if results[n].tobytes() != case["virtual"][n]:
                count = np.count_nonzero(results[n] != np.frombuffer(case["virtual"][n], np.uint8))
                print(
                    f"{case['key']} {case['test']} {case['buffers'][n][1]}: {count} bytes differ", flush=True
                )
    np.savez_compressed(out, next=len(cases), **recorded)


def keep(path: str) -> None:
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_bytes(Path(path).read_bytes())


if __name__ == "__main__":
    {"pack": pack, "run": run, "part": run_part, "keep": keep}[sys.argv[1]](*sys.argv[2:])
