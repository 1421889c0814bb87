"""The tensor memory accelerator: which global and shared bytes a tiled bulk copy touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TiledMap:
    """What a tiled tensor map says, innermost dimension first. Hashable: index arrays are cached by it."""

    element: str  # u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 tf32 (ftz forms: f32ftz, tf32ftz)
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, one per dimension, strides[0] is the element size
    box: tuple[int, ...]  # elements
    element_strides: tuple[int, ...]
    swizzle: int = 0  # 0, 32, 64, 128 bytes
    swizzle_atom: int = 16  # 32 or 64 for the sm_100 forms of 128-byte swizzle
    interleave: int = 0  # 0, 16, 32 bytes
    nan_fill: bool = False  # out-of-bounds elements read as NaN, not zero


@dataclass(frozen=True, slots=True)
class Tile:
    """The bytes of one box, as chunks of `width` bytes. Out-of-bounds chunks have inside False (their global offset is meaningless)."""

    width: int  # 16, or less where bounds or boxes are not 16-byte multiples
    shared: NDArray[np.int32]  # [n] shared addresses (swizzled: they depend on the tile's address)
    global_: NDArray[np.int64]  # [n] byte offsets from the tensor's global address
    inside: NDArray[np.bool_] | None  # [n], None when all are
    bytes: int  # what an mbarrier's transaction count sees: the whole box, fill included


def tile(map_: TiledMap, coords: Sequence[int], shared_address: int) -> Tile:
    """The chunks of the box at coords (innermost first)."""
    raise NotImplementedError


def fill(map_: TiledMap) -> NDArray[np.uint8]:
    """The 16 bytes an out-of-bounds chunk reads as (take the first `width`)."""
    raise NotImplementedError


def reduce(op: str, element: str, old: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """cp.reduce.async.bulk: old op new, elementwise on raw bytes (last axis). op: add min max inc dec and or xor."""
    raise NotImplementedError
