"""The hardware's 128-byte tensor map: what `cuTensorMapEncodeTiled` writes and a TMA instruction reads.

    word  bits   field (32-bit little-endian words; a tiled map ends with word 14)
    0, 1         global address
    2     0-3    kind of map, 2: tiled
          4-6    rank - 1
          7-10   element type
          11-12  interleave: none, 16 bytes, 32 bytes
          13-14  swizzle: none, 32, 64, 128 bytes
          18     set in every map seen
          21     set for tensors larger than 128 KiB; no effect on what is copied
    3-6          strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits
    7            their high bits, 4 per stride
    8-12         extents - 1
    13    24-31  box extent - 1 of dimension 0
    14           box extents - 1 of dimensions 1 to 4, a byte each

The layout was found by varying one argument at a time of what CuTe-DSL encodes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .units.tma import TiledMap

__all__ = ["TensorMap", "decode", "encode"]

BYTES = 128

# Element types in the order of their codes, and their sizes.
ELEMENTS = (
    "u8 u16 u32 s32 u64 s64 f16 f32 f32ftz f64 bf16 tf32 tf32ftz".split(),
    (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4),
)
INTERLEAVES = (0, 16, 32)
SWIZZLES = (0, 32, 64, 128)
TILED = 2
HINTS = 1 << 18 | 1 << 21


@dataclass(frozen=True)
class TensorMap:
    address: int
    tile: TiledMap
    im2col: bool = False


def decode(raw: bytes | bytearray | memoryview) -> TensorMap:
    """The fields of a tensor map; ValueError names the one that is not understood."""
    if len(raw) < BYTES:
        raise ValueError(f"a tensor map has {BYTES} bytes, not {len(raw)}")
    words = struct.unpack_from("<16I", raw)
    flags = words[2]
    if flags & 0xF != TILED:
        raise ValueError(f"tensor map of kind {flags & 0xF}; only tiled maps (kind {TILED}) are modelled")
    rank = (flags >> 4 & 7) + 1
    if rank > 5:
        raise ValueError(f"tensor map of rank {rank}")
    element_code = flags >> 7 & 0xF
    if element_code >= len(ELEMENTS[0]):
        raise ValueError(f"tensor map with element type {element_code}")
    interleave_code = flags >> 11 & 3
    if interleave_code >= len(INTERLEAVES):
        raise ValueError("tensor map with interleave 3")
    unknown = flags >> 15 & ~(HINTS >> 15)
    if unknown:
        raise ValueError(f"tensor map with unknown flags 0x{unknown << 15:x}")
    if words[13] & 0xFFFFFF:
        raise ValueError(f"tensor map with unknown bits 0x{words[13] & 0xFFFFFF:x} beside its box")
    itemsize = ELEMENTS[1][element_code]
    strides = [itemsize]
    for i in range(rank - 1):
        strides.append((words[3 + i] | (words[7] >> 4 * i & 0xF) << 32) * 16)
    box = [words[13] >> 24, *struct.unpack("<4B", struct.pack("<I", words[14]))]
    return TensorMap(
        address=words[0] | words[1] << 32,
        tile=TiledMap(
            element=ELEMENTS[0][element_code],
            extents=tuple(word + 1 for word in words[8 : 8 + rank]),
            strides=tuple(strides),
            box=tuple(extent + 1 for extent in box[:rank]),
            element_strides=(1,) * rank,
            swizzle=SWIZZLES[flags >> 13 & 3],
            interleave=INTERLEAVES[interleave_code],
        ),
    )


def encode(address: int, tile: TiledMap) -> bytes:
    """The 128 bytes of a tiled map: what `decode` reads back."""
    rank = len(tile.extents)
    words = [0] * 32
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = (
        TILED
        | (rank - 1) << 4
        | ELEMENTS[0].index(tile.element) << 7
        | INTERLEAVES.index(tile.interleave) << 11
        | SWIZZLES.index(tile.swizzle) << 13
        | 1 << 18
    )
    for i, stride in enumerate(tile.strides[1:]):
        if stride % 16 or not 0 <= stride < 1 << 40:
            raise ValueError(f"stride {stride} is not a multiple of 16 below 2^40")
        words[3 + i] = stride // 16 & 0xFFFFFFFF
        words[7] |= (stride >> 36) << 4 * i
    for i, extent in enumerate(tile.extents):
        words[8 + i] = extent - 1
    for i, extent in enumerate(tile.box):
        if not 1 <= extent <= 256:
            raise ValueError(f"box extent {extent} is not in 1..256")
        words[13 if i == 0 else 14] |= (extent - 1) << (24 if i == 0 else 8 * (i - 1))
    return struct.pack("<32I", *words)
