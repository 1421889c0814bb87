"""The hardware's 128-byte tensor map: what `cuTensorMapEncodeTiled` writes and a TMA instruction reads.

    word  bits   field (32-bit little-endian words)
    0, 1         global address
    2     1      set by CuTe-DSL's own encoder and not by the driver's
          4-6    rank - 1
          7-10   element type
          11-12  interleave: none, 16 bytes, 32 bytes
          13-14  swizzle: none, 32, 64, 128 bytes
          15     fill elements outside the tensor with NaN, not zero
          16     round float32 elements to tf32
          17-18  L2 promotion: none, 64, 128, 256 bytes
          21     set by CuTe-DSL for tensors larger than 128 KiB, never by the driver
    3-6          strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits
    7            their high bits, 4 per stride
    8-12         extents - 1
    13    0-14   element strides - 1, 3 bits each
          24-31  box extent - 1 of dimension 0
    14           box extents - 1 of dimensions 1 to 4, a byte each
    16, 18       bytes of a box and alignment of its shared memory, for the driver's own use

The layout was found by varying one argument at a time, and is held against 1000 maps encoded by a driver
(tests/vgpu/hardware). L2 promotion and bits 1 and 21 of word 2 change no byte that is copied, and are
skipped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from .units.tma import TiledMap

__all__ = ["TensorMap", "decode", "encode"]

BYTES = 128

# In the order of their codes; the tf32 types are f32 types with a flag.
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32ftz", "f64", "bf16")
SIZES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2)
AS_TF32 = {"f32": "tf32", "f32ftz": "tf32ftz"}
AS_F32 = {tf32: f32 for f32, tf32 in AS_TF32.items()}
INTERLEAVES = (0, 16, 32)
SWIZZLES = (0, 32, 64, 128)

RANK, ELEMENT, INTERLEAVE, SWIZZLE = 4, 7, 11, 13  # first bits of the fields of word 2
NAN_FILL = 1 << 15
ROUND_TO_TF32 = 1 << 16
SKIPPED = 1 << 1 | 3 << 17 | 1 << 21
KNOWN = 7 << RANK | 15 << ELEMENT | 3 << INTERLEAVE | 3 << SWIZZLE | NAN_FILL | ROUND_TO_TF32 | SKIPPED


@dataclass(frozen=True)
class TensorMap:
    """The arguments of `cuTensorMapEncodeTiled`, innermost dimension first; L2 promotion is not among
    them."""

    address: int
    element: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; strides[0] is the element size
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    nan_fill: bool = False

    im2col = False  # such maps are refused

    @cached_property
    def tile(self) -> TiledMap:
        """The map as the copy unit takes it, which refuses what it does not model."""
        return TiledMap(
            element=self.element,
            extents=self.extents,
            strides=self.strides,
            box=self.box,
            element_strides=self.element_strides,
            swizzle=self.swizzle,
            interleave=self.interleave,
            nan_fill=self.nan_fill,
        )


def decode(raw: bytes | bytearray | memoryview) -> TensorMap:
    """The fields of a tiled tensor map; ValueError names the one that is not understood."""
    if len(raw) < BYTES:
        raise ValueError(f"a tensor map has {BYTES} bytes, not {len(raw)}")
    words = struct.unpack_from("<16I", raw)
    flags = words[2]
    if flags & ~KNOWN:
        raise ValueError(f"tensor map with unknown flags 0x{flags & ~KNOWN:x}: not a tiled map")
    rank = (flags >> RANK & 7) + 1
    if rank > 5:
        raise ValueError(f"tensor map of rank {rank}")
    code = flags >> ELEMENT & 15
    if code >= len(ELEMENTS):
        raise ValueError(f"tensor map with element type {code}")
    element = ELEMENTS[code]
    if flags & ROUND_TO_TF32:
        if element not in AS_TF32:
            raise ValueError(f"tensor map that rounds {element} to tf32")
        element = AS_TF32[element]
    interleave = flags >> INTERLEAVE & 3
    if interleave >= len(INTERLEAVES):
        raise ValueError(f"tensor map with interleave {interleave}")
    strides = [SIZES[code]]
    for i in range(rank - 1):
        strides.append((words[3 + i] | (words[7] >> 4 * i & 15) << 32) * 16)
    if words[13] >> 15 & 0x1FF:
        raise ValueError(
            f"tensor map with unknown bits 0x{words[13] & 0xFF8000:x} beside its element strides"
        )
    box = [words[13] >> 24, *struct.unpack("<4B", struct.pack("<I", words[14]))]
    return TensorMap(
        address=words[0] | words[1] << 32,
        element=element,
        extents=tuple(word + 1 for word in words[8 : 8 + rank]),
        strides=tuple(strides),
        box=tuple(extent + 1 for extent in box[:rank]),
        element_strides=tuple((words[13] >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=SWIZZLES[flags >> SWIZZLE & 3],
        interleave=INTERLEAVES[interleave],
        nan_fill=bool(flags & NAN_FILL),
    )


def encode(map_: TensorMap, l2_promotion: int = 0) -> bytes:
    """The map as the driver writes it, without its own two words: what `decode` reads back."""
    words = [0] * 32
    words[0], words[1] = map_.address & 0xFFFFFFFF, map_.address >> 32
    words[2] = (
        (len(map_.extents) - 1) << RANK
        | ELEMENTS.index(AS_F32.get(map_.element, map_.element)) << ELEMENT
        | INTERLEAVES.index(map_.interleave) << INTERLEAVE
        | SWIZZLES.index(map_.swizzle) << SWIZZLE
        | (NAN_FILL if map_.nan_fill else 0)
        | (ROUND_TO_TF32 if map_.element in AS_F32 else 0)
        | (0, 64, 128, 256).index(l2_promotion) << 17
    )
    for i, stride in enumerate(map_.strides[1:]):
        if stride % 16 or not 0 <= stride < 1 << 40:
            raise ValueError(f"stride {stride} is not a multiple of 16 below 2^40")
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= (stride >> 36) << 4 * i
    for i, extent in enumerate(map_.extents):
        if not 1 <= extent <= 1 << 32:
            raise ValueError(f"extent {extent} is not in 1..2^32")
        words[8 + i] = extent - 1
    for i, stride in enumerate(map_.element_strides):
        if not 1 <= stride <= 8:
            raise ValueError(f"element stride {stride} is not in 1..8")
        words[13] |= (stride - 1) << 3 * i
    for i, extent in enumerate(map_.box):
        if not 1 <= extent <= 256:
            raise ValueError(f"box extent {extent} is not in 1..256")
        words[13 if i == 0 else 14] |= (extent - 1) << (24 if i == 0 else 8 * (i - 1))
    return struct.pack("<32I", *words)
