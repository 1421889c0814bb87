"""Tiled bulk copies against an element-by-element copy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coflash.vgpu.units import tma
from coflash.vgpu.units.formats import UnsupportedInstruction
from coflash.vgpu.units.tma import TiledMap


def swizzle(address: int, span: int, atom: int) -> int:
    """The manual's swizzle, bit by bit."""
    if not span:
        return address
    low = {16: 4, 32: 5, 64: 6}[atom]
    count = (span // atom).bit_length() - 1
    for i in range(count):
        address ^= (address >> (7 + i) & 1) << (low + i)
    return address


def load(map_: TiledMap, source: np.ndarray, coords: tuple[int, ...], address: int, size: int) -> np.ndarray:
    memory = np.full(size, 0xEE, np.uint8)
    t = tma.tile(map_, coords, address)
    inside = np.ones(t.shared.size, bool) if t.inside is None else t.inside
    for s, g, ok in zip(t.shared.tolist(), t.global_.tolist(), inside.tolist(), strict=True):
        memory[s : s + t.width] = source[g : g + t.width] if ok else tma.fill(map_)[: t.width]
    return memory


def reference(
    map_: TiledMap, source: np.ndarray, coords: tuple[int, ...], address: int, size: int
) -> np.ndarray:
    memory = np.full(size, 0xEE, np.uint8)
    width = tma.ELEMENT_BYTES[map_.element]
    steps = [range(0, map_.box[0])]
    steps += [range(0, b, s) for b, s in zip(map_.box[1:], map_.element_strides[1:], strict=True)]
    for n, place in enumerate(itertools.product(*reversed(steps))):
        at = [c + p for c, p in zip(coords, reversed(place), strict=True)]
        target = swizzle(address + n * width, map_.swizzle, map_.swizzle_atom)
        if all(0 <= a < e for a, e in zip(at, map_.extents, strict=True)):
            start = sum(a * s for a, s in zip(at, map_.strides, strict=True))
            memory[target : target + width] = source[start : start + width]
        else:
            nan = {"bf16": [0xFF, 0x7F], "f32": [0xFF, 0xFF, 0xFF, 0x7F]}
            memory[target : target + width] = nan[map_.element] if map_.nan_fill else 0
    return memory


CASES = {
    "1d": TiledMap("f32", (100,), (4,), (64,), (1,)),
    "2d swizzle 128": TiledMap("bf16", (64, 200), (2, 128), (64, 16), (1, 1), 128),
    "2d swizzle 64": TiledMap("bf16", (64, 50), (2, 128), (32, 16), (1, 1), 64),
    "2d swizzle 32": TiledMap("f16", (64, 50), (2, 128), (16, 8), (1, 1), 32),
    "32-byte atoms": TiledMap("f32", (64, 50), (4, 256), (32, 16), (1, 1), 128, 32),
    "64-byte atoms": TiledMap("f32", (64, 50), (4, 256), (32, 16), (1, 1), 128, 64),
    "odd bound": TiledMap("bf16", (61, 20), (2, 128), (64, 8), (1, 1), 128),
    "byte": TiledMap("u8", (100, 20), (1, 112), (32, 4), (1, 1)),
    "nan": TiledMap("bf16", (40, 9), (2, 80), (32, 8), (1, 1), nan_fill=True),
    "steps": TiledMap("f32", (40, 30), (4, 160), (8, 9), (1, 2)),
    "4d": TiledMap("bf16", (64, 5, 4, 3), (2, 512, 128, 2560), (64, 4, 2, 1), (1, 1, 1, 1), 128),
    "5d": TiledMap("f32", (8, 3, 3, 2, 2), (4, 32, 96, 288, 576), (4, 2, 2, 2, 1), (1, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_against_elements(name: str) -> None:
    map_ = CASES[name]
    rng = np.random.default_rng(1)
    extent = sum((e - 1) * s for e, s in zip(map_.extents, map_.strides, strict=True)) + 32
    source = rng.integers(0, 256, extent, dtype=np.uint8)
    origin = (0,) * len(map_.extents)
    drawn = [
        tuple(int(rng.integers(-b, e + 2)) for b, e in zip(map_.box, map_.extents, strict=True))
        for _ in range(6)
    ]
    for coords in [origin, *drawn]:
        for address in (0, 1024 + 128 * 3):
            got = load(map_, source, coords, address, 8192)
            np.testing.assert_array_equal(got, reference(map_, source, coords, address, 8192), str(coords))
    assert tma.tile(map_, origin, 0).bytes == map_.box_bytes


def test_whole_boxes_move_16_bytes_at_a_time() -> None:
    map_ = CASES["2d swizzle 128"]
    t = tma.tile(map_, (0, 3), 2048)
    assert (t.width, t.inside, t.shared.size) == (16, None, 128)
    assert t.global_[0] == 3 * 128
    assert tma.tile(map_, (0, 190), 2048).inside is not None


def test_offsets_wrap_at_64_bits() -> None:
    """Packed sequences are stored through maps whose base lies far below the buffer."""
    stride = 1 << 39
    map_ = TiledMap("bf16", (64, 2**30, 2**31 - 1), (2, 128, stride), (64, 2, 1), (1, 1, 1), 128)
    t = tma.tile(map_, (0, 5, 2**30), 0)
    assert t.inside is None
    assert int(t.global_[0]) % 2**64 == (5 * 128 + 2**30 * stride) % 2**64


def test_gather4() -> None:
    map_ = TiledMap("bf16", (64, 20), (2, 128), (64, 1), (1, 1), 128)
    source = np.random.default_rng(2).integers(0, 256, 64 * 20 * 2, dtype=np.uint8)
    t = tma.gather4(map_, 0, [7, 0, 25, 3], 1024)
    memory = np.zeros(2048, np.uint8)
    assert t.inside is not None and t.bytes == 512
    for s, g, ok in zip(t.shared.tolist(), t.global_.tolist(), t.inside.tolist(), strict=True):
        memory[s : s + t.width] = source[g : g + t.width] if ok else 0
    for place, row in enumerate([7, 0, None, 3]):
        for byte in range(128):
            want = 0 if row is None else source[row * 128 + byte]
            assert memory[swizzle(1024 + place * 128 + byte, 128, 16)] == want


@pytest.mark.parametrize(
    ("op", "element", "old", "new", "want"),
    [
        ("add", "f32", [1.5, -2], [2, 2], [3.5, 0]),
        ("add", "u32", [2**32 - 1], [2], [1]),
        ("min", "s32", [-5, 5], [3, 3], [-5, 3]),
        ("max", "u64", [2**63], [1], [2**63]),
        ("inc", "u32", [3, 4, 9], [4, 4, 4], [4, 0, 0]),
        ("dec", "u32", [3, 0, 9], [4, 4, 4], [2, 4, 4]),
        ("xor", "u32", [6], [3], [5]),
        ("add", "f16", [1, 2048], [2, 1], [3, 2048]),
        ("max", "f16", [1, -1], [2, -2], [2, -1]),
    ],
)
def test_reductions(op: str, element: str, old: list[float], new: list[float], want: list[float]) -> None:
    dtype = {"f32": "f4", "u32": "u4", "s32": "i4", "u64": "u8", "f16": "f2"}[element]
    a, b = np.array(old, dtype).view(np.uint8), np.array(new, dtype).view(np.uint8)
    np.testing.assert_array_equal(tma.reduce(op, element, a, b).view(dtype), np.array(want, dtype))


def test_bf16_reduction() -> None:
    a, b = np.array([0x3F80], np.uint16).view(np.uint8), np.array([0x4000], np.uint16).view(np.uint8)
    assert tma.reduce("add", "bf16", a, b).view(np.uint16)[0] == 0x4040


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match="interleaved"):
        TiledMap("f32", (16, 4), (4, 64), (8, 1), (1, 1), interleave=16)
    with pytest.raises(UnsupportedInstruction, match="innermost"):
        TiledMap("f32", (16, 4), (4, 64), (8, 1), (1, 1), swizzle=128)
    with pytest.raises(ValueError, match="exceed"):
        TiledMap("f32", (64, 4), (4, 256), (64, 1), (1, 1), swizzle=128)
    with pytest.raises(ValueError, match="multiple of 16"):
        TiledMap("f32", (64, 4), (4, 256), (3, 1), (1, 1))
    with pytest.raises(ValueError, match="dimensions"):
        TiledMap("f32", (64,), (4, 256), (4, 1), (1, 1))
    with pytest.raises(ValueError, match="aligned"):
        tma.tile(CASES["1d"], (0,), 8)
    for op, element in (("min", "f32"), ("and", "f32"), ("inc", "s32"), ("mul", "f32"), ("add", "u8")):
        with pytest.raises(UnsupportedInstruction, match=f"{op}.{element}|{op}"):
            tma.reduce(op, element, np.zeros(8, np.uint8), np.zeros(8, np.uint8))
