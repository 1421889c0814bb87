"""Record what a Hopper GPU does, for tests that run without one: python -m tests.vgpu.hardware.collect
PACKED OUT

Needs PyTorch with a GPU, and for the kernels apache-tvm-ffi and CuTe-DSL's runtime library. PACKED is a
folder made by `pack.py` (or an empty one). Writes OUT/tensormaps.npz, OUT/approximations.npz,
OUT/approximation_errors.json and OUT/kernels.npz.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests.vgpu.hardware.samples import FLOAT16, FLOAT32, float16_inputs, float32_inputs

MAPS = 1000

# CUtensorMapDataType, with element sizes
DATA_TYPES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]
FLOATS = (6, 7, 8, 9, 10, 11, 12)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA driver error {status}")


# ---- Tensor maps -----------------------------------------------------------------------------------------


def draw_map(rng: random.Random) -> dict:
    """Arguments of cuTensorMapEncodeTiled that its documentation allows (the driver has the last word)."""
    kind = rng.randrange(13)
    size = DATA_TYPES[kind]
    interleave = rng.choice([0, 0, 0, 0, 1, 2])
    rank = rng.randint(3 if interleave else 1, 5)
    unit = 32 if interleave == 2 else 16
    swizzle = 1 if interleave == 2 else rng.choice([0, 1, 2, 3])
    inner_bytes = {0: 1024, 1: 32, 2: 64, 3: 128}[swizzle]
    if interleave:
        inner_bytes = 16 * interleave
    inner = max(unit, rng.randint(1, max(inner_bytes // unit, 1)) * unit) // size
    box = [min(inner, 256)] + [
        rng.choice([1, 2, 7, 8, 64, 128, 256, rng.randint(1, 256)]) for _ in range(rank - 1)
    ]
    extents = [rng.choice([64, 128, rng.randint(1, 1 << rng.randint(1, 32))]) for _ in range(rank)]
    strides = []
    for _ in range(rank - 1):
        strides.append(unit * rng.randint(1, (1 << rng.choice([6, 12, 20, 35])) - 1))
    return {
        "kind": kind,
        "rank": rank,
        "address": unit * rng.randint(1, 1 << 40),
        "extents": extents,
        "strides": strides,
        "box": box,
        "element_strides": [1 if rng.random() < 0.7 else rng.randint(1, 8) for _ in range(rank)],
        "interleave": interleave,
        "swizzle": swizzle,
        "l2": rng.randrange(4),
        "nan_fill": rng.randrange(2) if kind in FLOATS else 0,
    }


def encode_map(driver: ctypes.CDLL, map_: dict) -> bytes | None:
    raw = (ctypes.c_uint8 * 192)()
    aligned = (ctypes.addressof(raw) + 63) // 64 * 64
    rank = map_["rank"]
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(map_["kind"]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(map_["address"]),
        (ctypes.c_uint64 * rank)(*map_["extents"]),
        (ctypes.c_uint64 * 4)(*map_["strides"]),
        (ctypes.c_uint32 * rank)(*map_["box"]),
        (ctypes.c_uint32 * rank)(*map_["element_strides"]),
        ctypes.c_int(map_["interleave"]),
        ctypes.c_int(map_["swizzle"]),
        ctypes.c_int(map_["l2"]),
        ctypes.c_int(map_["nan_fill"]),
    )
    return None if status else ctypes.string_at(aligned, 128)


def collect_maps(driver: ctypes.CDLL) -> dict[str, np.ndarray]:
    rng = random.Random(20261129)
    kept: list[dict] = []
    raws: list[bytes] = []
    refused = 0
    while len(kept) < MAPS and refused < 100_000:
        map_ = draw_map(rng)
        raw = encode_map(driver, map_)
        if raw is None:
            refused += 1
            continue
        kept.append(map_)
        raws.append(raw)
    print(f"tensor maps: {len(kept)} encoded, {refused} drawn ones refused")

    def padded(name: str, width: int) -> np.ndarray:
        return np.array([(m[name] + [0] * width)[:width] for m in kept], np.uint64)

    columns = {n: np.array([m[n] for m in kept], np.uint64) for n in
               ("kind", "rank", "address", "interleave", "swizzle", "l2", "nan_fill")}  # fmt: skip
    for name, width in (("extents", 5), ("strides", 4), ("box", 5), ("element_strides", 5)):
        columns[name] = padded(name, width)
    columns["raw"] = np.frombuffer(b"".join(raws), np.uint8).reshape(-1, 128)
    return columns


# ---- Approximate functions -------------------------------------------------------------------------------


def unary_ptx(operation: str) -> str:
    bits = 16 if operation in FLOAT16 else 32
    shift = {16: 1, 32: 2}[bits]
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry apply(.param .u64 source, .param .u64 target, .param .u32 count)
{{
  .reg .pred %p; .reg .b{bits} %x; .reg .b32 %i, %n, %t, %c; .reg .b64 %a, %b, %o;
  ld.param.u64 %a, [source]; ld.param.u64 %b, [target]; ld.param.u32 %n, [count];
  mov.u32 %c, %ctaid.x; mov.u32 %t, %tid.x; shl.b32 %c, %c, 8; add.u32 %i, %c, %t;
  setp.ge.u32 %p, %i, %n; @%p bra done;
  cvt.u64.u32 %o, %i; shl.b64 %o, %o, {shift}; add.u64 %a, %a, %o; add.u64 %b, %b, %o;
  ld.global.b{bits} %x, [%a]; {operation} %x, %x; st.global.b{bits} [%b], %x;
done: ret;
}}
"""


class Unary:
    """One PTX operation as a function of a GPU tensor of raw bits (int16 or int32)."""

    def __init__(self, driver: ctypes.CDLL, operation: str):
        self._driver = driver
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), unary_ptx(operation).encode() + b"\0"))
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"apply"))

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.zeros_like(source)
        count = source.numel()
        values = [
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint32(count),
        ]
        arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
        torch.cuda.synchronize()
        grid = -(-count // 256)
        _check(self._driver.cuLaunchKernel(self._function, grid, 1, 1, 256, 1, 1, 0, None, arguments, None))
        torch.cuda.synchronize()
        return target


def collect_approximations(driver: ctypes.CDLL) -> dict[str, np.ndarray]:
    made = {}
    for operation in (*FLOAT32, *FLOAT16):
        given = float32_inputs(operation) if operation in FLOAT32 else float16_inputs()
        source = torch.from_numpy(given.view(f"int{given.itemsize * 8}").copy()).cuda()
        made[operation] = Unary(driver, operation)(source).cpu().numpy().view(given.dtype)
    return made


FLOAT64 = {
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "rcp": torch.reciprocal,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
}
SMALLEST_NORMAL = 2.0**-126


def _flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers whose differences count float32 values."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def measure_errors(driver: ctypes.CDLL) -> dict[str, dict[str, float]]:
    """Over every float32 (sin and cos: every one in [-pi, pi]): the distance to the float64 function,
    rounded."""
    worst: dict[str, dict[str, float]] = {}
    chunk = 1 << 27
    for operation in FLOAT32:
        apply = Unary(driver, operation)
        ftz = ".ftz" in operation
        name = operation.split(".")[0]
        ulp, absolute, relative, at = -1, 0.0, 0.0, 0
        for start in range(-(1 << 31), 1 << 31, chunk):
            source = torch.arange(start, start + chunk, dtype=torch.int64, device="cuda").to(torch.int32)
            x = source.view(torch.float32)
            got = apply(source).view(torch.float32)
            right = FLOAT64[name]((_flush(x) if ftz else x).double())
            rounded = right.float()
            if ftz:
                rounded = _flush(rounded)
            keep = rounded.isfinite() & got.isfinite()
            if name in ("sin", "cos"):
                keep &= x.abs() <= 3.1415927
            if not keep.any():
                continue
            distance = torch.where(keep, (_ordered(got) - _ordered(rounded)).abs(), -1)
            here = distance.argmax()
            if distance[here].item() > ulp:
                ulp, at = distance[here].item(), source[here].item()
            off = torch.where(keep, (got.double() - rounded.double()).abs(), 0.0)
            absolute = max(absolute, off.max().item())
            normal = keep & (rounded.abs() >= SMALLEST_NORMAL)
            relative = max(relative, torch.where(normal, off / rounded.double().abs(), 0.0).max().item())
        worst[operation] = {"ulp": ulp, "at": at & 0xFFFFFFFF, "absolute": absolute, "relative": relative}
        print(operation, worst[operation])
    return worst


# ---- Compiled kernels ------------------------------------------------------------------------------------


def run_packed(path: Path) -> dict[str, np.ndarray]:
    """Run the calls of one packed case on the GPU and return its outputs as raw bits."""
    import tvm_ffi

    packed = pickle.loads(path.read_bytes())
    storages = [
        (address, torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda())
        for address, data in packed["storages"]
    ]

    def tensor(spec: dict) -> torch.Tensor:
        for address, storage in storages:
            start = spec["address"] - address
            if 0 <= start < storage.numel():
                dtype = getattr(torch, spec["dtype"])
                flat = storage[start : start + (storage.numel() - start) // dtype.itemsize * dtype.itemsize]
                return flat.view(dtype).as_strided(spec["shape"], spec["strides"])
        raise ValueError(f"no storage holds {spec}")

    def argument(value: object) -> object:
        if isinstance(value, dict):
            return tensor(value)
        return tuple(argument(v) for v in value) if isinstance(value, tuple) else value

    for shared_object, function, arguments in packed["calls"]:
        module = tvm_ffi.load_module(str(path.parent / shared_object))
        module[function](*[argument(a) for a in arguments])
    torch.cuda.synchronize()
    outputs = {}
    for name, spec in packed["outputs"].items():
        value = tensor(spec).contiguous()
        outputs[f"{path.stem}/{name}"] = (
            value.view(torch.int16 if value.itemsize == 2 else torch.int32).cpu().numpy()
        )
    return outputs


def run_gemm(driver: ctypes.CDLL) -> np.ndarray:
    """The hand-written kernel `gemm` (tests/vgpu/mutations), its tensor maps made by our own encoder."""
    from tests.vgpu.mutations import kernels

    from coflash.vgpu.tensormap import encode

    problem = kernels.hopper()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), kernels.HOPPER.encode() + b"\0"))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"gemm"))
    tensors = [torch.from_numpy(b.data.copy()).cuda() for b in problem.launch.buffers]
    maps = [encode(replace(m, address=t.data_ptr())) for m, t in zip(problem.maps, tensors, strict=True)]
    values = [(ctypes.c_uint8 * 128).from_buffer_copy(m) for m in maps]
    blocks = ctypes.c_uint32(kernels.BLOCKS)
    arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in [*values, blocks]))
    shared = problem.launch.shared_bytes
    torch.cuda.synchronize()
    _check(driver.cuLaunchKernel(function, 2, 1, 1, 160, 1, 1, shared, None, arguments, None))
    torch.cuda.synchronize()
    made = tensors[2].cpu().numpy().view(np.uint16)
    print("gemm is right:", np.array_equal(made, problem.right.reshape(-1)))
    return made


def main() -> None:
    packed, out = Path(sys.argv[1]), Path(sys.argv[2])
    print(torch.cuda.get_device_name(), torch.version.cuda)
    torch.zeros(1).cuda()
    driver = ctypes.CDLL("libcuda.so.1")
    kernels: dict[str, np.ndarray] = {}
    if "--kernels" not in sys.argv:
        np.savez_compressed(out / "tensormaps.npz", **collect_maps(driver))
        np.savez_compressed(out / "approximations.npz", **collect_approximations(driver))
        (out / "approximation_errors.json").write_text(json.dumps(measure_errors(driver), indent=1))
    for path in sorted(packed.glob("*.pkl")):
        try:
            kernels.update(run_packed(path))
            print("ran", path.stem)
        except Exception as error:
            print("FAILED", path.stem, repr(error)[:500])
    np.savez_compressed(out / "kernels.npz", **kernels)
    np.savez_compressed(out / "gemm.npz", gemm=run_gemm(driver))


if __name__ == "__main__":
    main()
