"""The tensor memory accelerator: which global and shared bytes a tiled bulk copy touches.

PTX manual, "Tensors: Tiled Mode, Out of Boundary Access, Swizzling Modes". im2col modes and interleaved
layouts are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import arith
from .descriptors import swizzled
from .formats import UnsupportedInstruction

ELEMENT_BYTES = {
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "s32": 4,
    "u64": 8,
    "s64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f32ftz": 4,
    "f64": 8,
    "tf32": 4,
    "tf32ftz": 4,
}


@dataclass(frozen=True, slots=True)
class TiledMap:
    """What a tiled tensor map says, innermost dimension first. Hashable: index arrays are cached by it."""

    element: str  # a key of ELEMENT_BYTES
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, one per dimension; strides[0] is the element size
    box: tuple[int, ...]  # elements
    element_strides: tuple[int, ...]
    swizzle: int = 0  # 0, 32, 64, 128 bytes
    swizzle_atom: int = 16  # 32 or 64 for the sm_100 forms of the 128-byte swizzle
    interleave: int = 0
    nan_fill: bool = False  # out-of-bounds elements read as NaN, not zero

    def __post_init__(self) -> None:
        rank = len(self.extents)
        if not 1 <= rank <= 5 or not rank == len(self.strides) == len(self.box) == len(self.element_strides):
            raise ValueError(
                "a tensor map has 1 to 5 dimensions, and extents, strides, box and element strides for each"
            )
        if self.interleave:
            raise UnsupportedInstruction("interleaved tensor maps are not modelled")
        if "ftz" in self.element or self.element == "tf32":
            raise UnsupportedInstruction(
                f"tensor maps that convert their elements ({self.element}) are not modelled"
            )
        size = ELEMENT_BYTES[self.element]
        if self.strides[0] != size:
            raise ValueError("the innermost dimension of a tensor map is contiguous")
        if not all(1 <= b <= 256 for b in self.box):
            raise ValueError(f"box {self.box}: every dimension must be 1 to 256 elements")
        if not all(1 <= s <= 8 for s in self.element_strides):
            raise ValueError(f"element strides {self.element_strides} must be 1 to 8")
        if self.box[0] * size % 16:
            raise ValueError(
                f"the innermost box dimension has {self.box[0] * size} bytes, not a multiple of 16"
            )
        inner = self.box[0] * size
        if self.swizzle and inner > self.swizzle:
            raise ValueError(
                f"{inner} bytes of innermost box dimension exceed the {self.swizzle}-byte swizzle"
            )
        if self.swizzle and inner < self.swizzle:
            raise UnsupportedInstruction(
                f"{inner} bytes of innermost box under a {self.swizzle}-byte swizzle"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements the box takes along each dimension. The innermost stride is ignored without interleave."""
        rest = tuple(-(-b // s) for b, s in zip(self.box[1:], self.element_strides[1:], strict=True))
        return (self.box[0], *rest)

    @property
    def box_bytes(self) -> int:
        """Shared bytes of a box: what it adds to a transaction count, out-of-bounds elements included."""
        total = ELEMENT_BYTES[self.element]
        for c in self.counts:
            total *= c
        return total


@dataclass(frozen=True, slots=True)
class Tile:
    """The bytes of one box, as chunks of `width` bytes. Chunks outside the tensor have `inside` False and no
    valid global offset."""

    width: (
        int  # 16, or less where the tensor's innermost bound or the coordinate is not a multiple of 16 bytes
    )
    shared: NDArray[np.int32]  # [n] shared addresses
    global_: NDArray[np.int64]  # [n] byte offsets from the tensor's global address, modulo 2^64
    inside: NDArray[np.bool_] | None  # [n]; None when all are
    bytes: int  # of the whole box


@lru_cache(maxsize=512)
def _grid(map_: TiledMap, width: int) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64]]:
    """Coordinates of the chunks relative to the box (innermost first, in elements, flat), and their global
    byte offsets."""
    size = ELEMENT_BYTES[map_.element]
    steps = [np.arange(0, map_.counts[0], width // size)]
    steps += [np.arange(c) * s for c, s in zip(map_.counts[1:], map_.element_strides[1:], strict=True)]
    mesh = np.meshgrid(*reversed(steps), indexing="ij")
    coords = tuple(np.ascontiguousarray(x.ravel()).astype(np.int64) for x in reversed(mesh))
    offset = sum(
        (c * s for c, s in zip(coords, map_.strides, strict=True)), np.zeros(coords[0].size, np.int64)
    )
    return coords, offset


@lru_cache(maxsize=2048)
def _shared(box_bytes: int, width: int, swizzle: int, atom: int, phase: int) -> NDArray[np.int32]:
    linear = np.arange(phase, phase + box_bytes, width, dtype=np.int32)
    if swizzle == 0:
        return linear
    return swizzled(linear, swizzle, atom).astype(np.int32)


def _wrapped(offset: int) -> np.int64:
    """Addresses are 64 bits wide: a base far off the tensor and coordinates that come back are legal."""
    return np.int64((offset + (1 << 63)) % (1 << 64) - (1 << 63))


def tile(map_: TiledMap, coords: Sequence[int], shared_address: int) -> Tile:
    """The chunks of the box at coords (innermost first), which may be negative or beyond the tensor.

    The box lies in shared memory as a dense array, innermost dimension first, under the swizzle, which
    follows the shared address.
    """
    if shared_address % 16:
        raise ValueError(f"shared address {shared_address:#x} of a tensor copy is not 16-byte aligned")
    if map_.swizzle and shared_address % 128:
        raise ValueError(f"shared address {shared_address:#x} under a swizzle is not 128-byte aligned")
    size = ELEMENT_BYTES[map_.element]
    first, bound = coords[0] * size, map_.extents[0] * size
    width = 16
    while first % width or bound % width:
        width //= 2
    width = max(width, size)
    relative, offset = _grid(map_, width)
    base = shared_address & ~1023
    shared = _shared(map_.box_bytes, width, map_.swizzle, map_.swizzle_atom, shared_address - base)
    if base:
        shared = shared + np.int32(base)
    start = _wrapped(sum(c * s for c, s in zip(coords, map_.strides, strict=True)))
    inside: NDArray[np.bool_] | None = None
    for i, (c, n) in enumerate(zip(coords, map_.counts, strict=True)):
        step = map_.element_strides[i] if i else 1
        if c >= 0 and c + (n - 1) * step < map_.extents[i]:
            continue
        here = relative[i] + c
        good = (here >= 0) & (here < map_.extents[i])
        inside = good if inside is None else inside & good
    return Tile(width, shared, offset + start, inside, map_.box_bytes)


def gather4(map_: TiledMap, column: int, rows: Sequence[int], shared_address: int) -> Tile:
    """.tile::gather4 and .tile::scatter4: four rows of a 2-D tensor, stacked in shared memory. The map's box
    has one row."""
    if len(map_.extents) != 2 or map_.counts[1] != 1 or len(rows) != 4:
        raise ValueError("gather4/scatter4 take four rows of a two-dimensional map with a box of one row")
    four = TiledMap(
        map_.element,
        map_.extents,
        map_.strides,
        (map_.box[0], 4),
        (1, 1),
        map_.swizzle,
        map_.swizzle_atom,
        nan_fill=map_.nan_fill,
    )
    whole = tile(four, (column, 0), shared_address)
    row = np.repeat(np.asarray(rows, np.int64), whole.shared.size // 4)
    relative, offset = _grid(four, whole.width)
    here = relative[0] + column
    inside = (row >= 0) & (row < map_.extents[1]) & (here >= 0) & (here < map_.extents[0])
    global_ = here * map_.strides[0] + row * map_.strides[1]
    return Tile(whole.width, whole.shared, global_, None if inside.all() else inside, whole.bytes)


@lru_cache(maxsize=64)
def fill(map_: TiledMap) -> NDArray[np.uint8]:
    """The 16 bytes an out-of-bounds chunk reads as (take the first `width`): zeros, or the canonical NaN.

    The manual calls the fill "a special NaN constant" without its bits.
    """
    if not map_.nan_fill:
        return np.zeros(16, np.uint8)
    nan: dict[str, Any] = {
        "f16": np.uint16(0x7FFF),
        "bf16": np.uint16(0x7FFF),
        "f32": np.uint32(0x7FFFFFFF),
        "f64": np.uint64(0x7FFFFFFFFFFFFFFF),
    }
    if map_.element not in nan:
        raise ValueError(f"NaN fill of {map_.element} elements")
    value = nan[map_.element]
    return np.full(16 // value.itemsize, value).view(np.uint8)


_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def reduce(op: str, element: str, old: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """cp.reduce.async.bulk and its tensor form: old op new, element by element, on raw bytes (last axis).

    op: add min max inc dec and or xor. Floats add to nearest even, subnormals kept (.noftz is the only
    f16/bf16 form). inc and dec wrap at `new`, as atom.inc and atom.dec do.
    """
    dtype = _RAW[ELEMENT_BYTES[element]]
    a, b = old.view(dtype), new.view(dtype)
    if op in ("and", "or", "xor"):
        if dtype.itemsize < 4 or element[0] == "f":
            raise UnsupportedInstruction(f"bulk reduction .{op}.{element}")
        result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](a, b)
    elif op in ("inc", "dec"):
        if element != "u32":
            raise UnsupportedInstruction(f"bulk reduction .{op}.{element}")
        one, zero = np.uint32(1), np.uint32(0)
        if op == "inc":
            result = np.where(a >= b, zero, a + one)
        else:
            result = np.where((a == 0) | (a > b), b, a - one)
    elif op in ("add", "min", "max"):
        if element in ("u8", "u16") or op != "add" and element in ("f32", "f64"):
            raise UnsupportedInstruction(f"bulk reduction .{op}.{element}")
        result = arith.resolve(f"{op}.{element}")(a, b)
    else:
        raise UnsupportedInstruction(f"bulk reduction .{op}")
    return np.ascontiguousarray(result).view(np.uint8)
