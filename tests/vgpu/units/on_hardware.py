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
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).with_name("data") / "h200.npz"
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

    def __init__(self, launch: Any) -> None:
        self.launch = launch
        self.inputs = [(b.name, b.data.tobytes()) for b in launch.buffers]
        self.key = digest(launch.ptx, self.inputs)

    def finished(self, skip: Sequence[str] = ()) -> None:
        """Compare, where there is a record; buffers named in `skip` may differ (approximate functions)."""
        global _recorded
        if _packed is not None:
            self._pack()
        if _recorded is None:
            _recorded = dict(np.load(DATA)) if DATA.exists() else {}
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
    params = ctypes.create_string_buffer(moved(case["params"], addresses), len(case["params"]))
    size = ctypes.c_size_t(len(case["params"]))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(params), 2, ctypes.addressof(size), 0)
    attribute = Attribute(4, 0, (ctypes.c_uint * 16)(*case["cluster"]))  # cluster dimension
    config = Config(
        (ctypes.c_uint * 3)(*case["grid"]),
        (ctypes.c_uint * 3)(*case["block"]),
        case["shared"],
        None,
        ctypes.pointer(attribute),
        1,
    )
    driver("cuLaunchKernelEx", ctypes.byref(config), function, None, extra)
    driver("cuCtxSynchronize")
    results = []
    for pointer, (_, _, data) in zip(pointers, case["buffers"], strict=True):
        out = np.empty(len(data), np.uint8)
        driver("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), pointer, ctypes.c_size_t(len(data)))
        driver("cuMemFree_v2", pointer)
        results.append(out)
    return results


def run(path: str, out: str) -> None:
    driver = Driver()
    recorded, failed, different = {}, 0, 0
    for case in pickle.loads(gzip.decompress(Path(path).read_bytes())):
        try:
            results = execute(driver, case)
        except RuntimeError as error:
            failed += 1
            print(f"{case['key']}: {error}", flush=True)
            if "700" in str(error) or "71" in str(error):  # the context is gone
                break
            continue
        for n in case["changed"]:
            recorded[f"{case['key']}/{n}"] = results[n]
            if results[n].tobytes() != case["virtual"][n]:
                different += 1
                virtual = np.frombuffer(case["virtual"][n], np.uint8)
                print(
                    f"{case['key']} {case['buffers'][n][1]}: {np.count_nonzero(results[n] != virtual)} bytes differ"
                )
    np.savez_compressed(out, **recorded)
    print(f"{len(recorded)} results, {different} differ from the virtual GPU, {failed} launches failed")


def keep(path: str) -> None:
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_bytes(Path(path).read_bytes())


if __name__ == "__main__":
    {"pack": pack, "run": run, "keep": keep}[sys.argv[1]](*sys.argv[2:])
