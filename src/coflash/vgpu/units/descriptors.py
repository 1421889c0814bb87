"""Shared-memory matrix descriptors (wgmma, tcgen05) and tcgen05 instruction descriptors.

A tile is addressed in three steps: the start address, plus an offset from the canonical layout of the
descriptor's swizzle mode and major-ness, then an exclusive-or inside the address itself (bits 7.. into bits
4.., or 5.. for the 32-byte atoms). All fields are multiples of 16 bytes, so a tile is made of whole 16-byte
chunks, and everything here works on those.

Canonical layouts, with T = 16 bytes of elements (the forms that CUTLASS's make_gmma_desc and make_umma_desc
document):
  K-major   none     ((8, m), (T, 2)) : ((16 B, SBO), (1, LBO))
            W bytes  ((8, m), (T, 2)) : ((W, SBO), (1, T))              LBO is not used
  MN-major  none     ((T, 1, m), (8, k)) : ((1, T, SBO), (16 B, LBO))
            W bytes  ((T, W/16, m), (8, k)) : ((1, T, LBO), (W, SBO))
            32-byte atoms: as 128 bytes, but 4 rows of k to an atom
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DescriptorError(ValueError):
    """A descriptor with reserved bits set, an invalid field, or a combination the manual forbids."""


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A decoded 64-bit shared-memory descriptor; all sizes in bytes."""

    start: int  # shared::cta address of the tile, 18 bits
    leading: int  # leading-dimension byte offset
    stride: int  # stride-dimension byte offset
    swizzle: int  # 0, 32, 64 or 128
    atom: int  # bytes that a swizzle keeps together: 16, or 32 for "128-byte with 32-byte atoms"
    base_offset: int  # 0..7: where the swizzle pattern starts, in units of 128 bytes

    def moved(self, address: int) -> MatrixDescriptor:
        """The same layout at another start address."""
        return MatrixDescriptor(
            address & 0x3FFFF, self.leading, self.stride, self.swizzle, self.atom, self.base_offset
        )


def _field(raw: int, low: int, bits: int) -> int:
    return raw >> low & ((1 << bits) - 1)


def _sizes(raw: int) -> tuple[int, int, int]:
    return _field(raw, 0, 14) << 4, _field(raw, 16, 14) << 4, _field(raw, 32, 14) << 4


@lru_cache(maxsize=4096)
def decode_wgmma(raw: int) -> MatrixDescriptor:
    """The descriptor of wgmma.mma_async (PTX manual, "Asynchronous Warpgroup Level Matrix: Matrix Descriptor
    Format").

    start 0-13, leading 16-29, stride 32-45, base offset 49-51, swizzle 62-63 (0 none, 1 128, 2 64, 3 32
    bytes); other bits are ignored, as the manual leaves them undefined.
    """
    start, leading, stride = _sizes(raw)
    swizzle = (0, 128, 64, 32)[_field(raw, 62, 2)]
    return MatrixDescriptor(start, leading, stride, swizzle, 16, _field(raw, 49, 3))


@lru_cache(maxsize=4096)
def decode_tcgen05(raw: int) -> MatrixDescriptor:
    """The descriptor of tcgen05.mma and tcgen05.cp (PTX manual, "tcgen05: Shared Memory Descriptor").

    As on sm_90, with 46-48 the constant 0b001, 52 the leading-dimension mode (absolute is sm_103's and not
    modelled), 53-60 zero, and the swizzle in 61-63: 0 none, 1 128 bytes with 32-byte atoms, 2 128, 4 64, 6 32
    bytes.
    """
    start, leading, stride = _sizes(raw)
    constant = _field(raw, 46, 3)
    if constant != 1:
        raise DescriptorError(
            f"shared-memory descriptor {raw:#018x}: bits 46-48 are {constant:#05b}, must be 0b001"
        )
    if _field(raw, 53, 8):
        raise DescriptorError(
            f"shared-memory descriptor {raw:#018x}: bits 53-60 are {_field(raw, 53, 8):#x}, must be 0"
        )
    if _field(raw, 52, 1):
        raise DescriptorError(
            f"shared-memory descriptor {raw:#018x}: absolute leading address (sm_103) is not modelled"
        )
    modes = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}
    code = _field(raw, 61, 3)
    if code not in modes:
        raise DescriptorError(f"shared-memory descriptor {raw:#018x}: swizzle mode {code} is invalid")
    swizzle, atom = modes[code]
    return MatrixDescriptor(start, leading, stride, swizzle, atom, _field(raw, 49, 3))


def swizzled(address: NDArray[Any], swizzle: int, atom: int = 16, base_offset: int = 0) -> NDArray[Any]:
    """Shared addresses after the exclusive-or of a swizzle mode; also what the tensor memory accelerator
    does.

    128 bytes: bits 7-9 into 4-6; 64: 7-8 into 4-5; 32: 7 into 4; with 32-byte atoms 7-8 into 5-6, with
    64-byte atoms 7 into 6. A base offset moves the start of the pattern, so it is taken off the row number:
    the manual gives only its formula, (pattern start >> 7) & 7, and an H200 does this.
    """
    if swizzle == 0:
        return address
    low = atom.bit_length() - 1
    mask = swizzle // atom - 1
    row = (address >> 7) - base_offset if base_offset else address >> 7
    return address ^ ((row & mask) << low)


@lru_cache(maxsize=4096)
def _chunks(
    phase: int,
    leading: int,
    stride: int,
    swizzle: int,
    atom: int,
    base: int,
    rows: int,
    k: int,
    bits: int,
    k_major: bool,
) -> NDArray[np.int32]:
    """Chunk offsets of a tile that starts at `phase`, its address modulo the 1024 bytes after which swizzles
    repeat."""
    per_chunk = 128 // bits
    span = swizzle or 16
    if k_major:
        if atom == 32:
            raise DescriptorError("128-byte swizzle with 32-byte atoms is for MN-major operands")
        row = np.arange(rows)[:, None]
        chunk = np.arange(k // per_chunk)[None, :]
        offset = row % 8 * span + row // 8 * stride + chunk * (16 if swizzle else leading)
    else:
        depth = np.arange(k)[:, None]
        chunk = np.arange(rows // per_chunk)[None, :]
        group = 4 if atom == 32 else 8
        if swizzle:
            across = span // 16
            offset = chunk % across * 16 + chunk // across * leading
            offset = offset + depth % group * span + depth // group * stride
        else:
            offset = chunk * stride + depth % 8 * 16 + depth // 8 * leading
    result = swizzled((phase + offset).astype(np.int32), swizzle, atom, base)
    result.setflags(write=False)
    return result


def _checked(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> int:
    """Element width in shared memory; sub-byte elements take the room of 8 bits."""
    if bits not in (4, 6, 8, 16, 32):
        raise DescriptorError(f"no {bits}-bit operands in shared memory")
    if bits < 8 and not k_major:
        raise DescriptorError("sub-byte operands must be K-major")
    held = max(bits, 8)
    if (k if k_major else rows) * held % 128 or (
        k_major and rows % 8 and rows != 4
    ):  # 4 rows: tcgen05.cp.4x256b
        raise DescriptorError(
            f"a tile of {rows} x {k} elements of {bits} bits is not made of 8 x 16-byte blocks"
        )
    return held


def operand_chunks(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int32]:
    """Addresses of the tile's 16-byte chunks: [rows, k * bits / 128] if k_major, else [k, rows * bits / 128].

    rows is M of A or N of B (one CTA's part); k the depth of the instruction; bits the element width, where 6
    and 4 mean the padded form of kind::f8f6f4, 16 elements to a 16-byte chunk.
    """
    held = _checked(d, rows, k, bits, k_major)
    base = d.start & ~1023
    relative = _chunks(
        d.start & 1023, d.leading, d.stride, d.swizzle, d.atom, d.base_offset, rows, k, held, k_major
    )
    return relative + np.int32(base) if base else relative


@lru_cache(maxsize=1024)
def _offsets(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int32]:
    held = _checked(d, rows, k, bits, k_major)
    if bits < 8:
        raise DescriptorError("sub-byte elements have no byte offsets of their own")
    chunks = operand_chunks(d, rows, k, bits, k_major)
    inside = np.arange(128 // held, dtype=np.int32) * (held // 8)
    elements = (chunks[:, :, None] + inside).reshape(chunks.shape[0], -1)
    result = elements if k_major else np.ascontiguousarray(elements.T)
    result.setflags(write=False)
    return result


def operand_offsets(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int32]:
    """Shared-memory byte address of every element of a tile, int32 [rows, k], read-only and cached."""
    return _offsets(d, rows, k, bits, k_major)


_UNSIGNED: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
}
_CHUNK = np.dtype(np.complex128)  # any 16-byte type: moves a chunk as one item


def load_operand(
    memory: NDArray[np.uint8], d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool
) -> NDArray[Any]:
    """The tile's raw elements, uint8/16/32 [rows, k], from a CTA's shared memory (uint8, a multiple of 16
    bytes long).

    4- and 6-bit elements come out one to a byte. Raises IndexError when the tile leaves the memory.
    """
    chunks = operand_chunks(d, rows, k, bits, k_major)
    moved = memory.view(_CHUNK)[chunks >> 4]
    if bits >= 8:
        tile = moved.view(_UNSIGNED[bits])
        return tile if k_major else tile.T
    return unpack_padded(moved.view(np.uint8).reshape(rows, -1, 16), bits).reshape(rows, k)


def unpack_padded(chunks: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """16 elements of 4 or 6 bits, packed at the low end of each 16-byte chunk (last axis), one to a byte."""
    used = np.unpackbits(chunks[..., : 2 * bits], axis=-1, bitorder="little")
    fields = used.reshape(*chunks.shape[:-1], 16, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """A decoded tcgen05 instruction descriptor (no block scaling)."""

    kind: str
    m: int
    n: int
    k: int
    a_type: str  # names of arith.to_float32
    b_type: str
    d_type: str  # f16, f32, s32
    negate_a: bool
    negate_b: bool
    a_k_major: bool  # not transposed
    b_k_major: bool
    saturate: bool
    sparse: bool
    max_shift: int  # of .ws: 0, 8, 16, 32

    @property
    def a_bits(self) -> int:
        return ELEMENT_BITS[self.a_type]

    @property
    def b_bits(self) -> int:
        return ELEMENT_BITS[self.b_type]


ELEMENT_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e2m3": 6,
    "e3m2": 6,
    "e2m1": 4,
    "u8": 8,
    "s8": 8,
}
_INPUTS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_OUTPUTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


def k_of(kind: str) -> int:
    """Depth K of one dense tcgen05.mma: 32 bytes of elements."""
    return {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[kind]


@lru_cache(maxsize=1024)
def decode_instruction(raw: int, kind: str, cta_group: int = 1, ws: bool = False) -> InstructionDescriptor:
    """Decode and check the 32-bit instruction descriptor of tcgen05.mma of kind f16, tf32, f8f6f4 or i8.

    PTX manual, "tcgen05: Instruction Descriptor" and "Matrix Shape" (the table of M, N per kind). CUTLASS is
    stricter than the table for some N; the table is what counts here.
    """

    def bad(why: str) -> DescriptorError:
        return DescriptorError(f"instruction descriptor {raw:#010x} (kind::{kind}): {why}")

    if kind not in _INPUTS:
        raise bad("this kind is not modelled")
    if _field(raw, 6, 1) or _field(raw, 23, 1) or _field(raw, 29, 1):
        raise bad("reserved bit 6, 23 or 29 is set")
    inputs, outputs = _INPUTS[kind], _OUTPUTS[kind]
    a_code, b_code, d_code = _field(raw, 7, 3), _field(raw, 10, 3), _field(raw, 4, 2)
    if a_code not in inputs or b_code not in inputs:
        raise bad(f"element types {a_code}, {b_code} are not of this kind")
    if d_code not in outputs:
        raise bad(f"accumulator type {d_code} is not of this kind")
    a_type, b_type, d_type = inputs[a_code], inputs[b_code], outputs[d_code]
    if kind == "f16" and a_type != b_type:
        raise bad("A and B must be both f16 or both bf16")
    if d_type == "f16" and a_type == "bf16":
        raise bad("bf16 accumulates in f32")
    sparse, saturate = bool(_field(raw, 2, 1)), bool(_field(raw, 3, 1))
    if sparse:
        raise bad("sparsity is not modelled")
    if saturate and kind != "i8":
        raise bad("saturation is for kind::i8")
    negate_a, negate_b = bool(_field(raw, 13, 1)), bool(_field(raw, 14, 1))
    if (negate_a or negate_b) and kind == "i8":
        raise bad("kind::i8 cannot negate")
    a_k_major, b_k_major = not _field(raw, 15, 1), not _field(raw, 16, 1)
    if ELEMENT_BITS[a_type] < 8 and not a_k_major or ELEMENT_BITS[b_type] < 8 and not b_k_major:
        raise bad("sub-byte operands cannot be transposed")
    m, n = _field(raw, 24, 5) << 4, _field(raw, 17, 6) << 3
    shift = _field(raw, 30, 2)
    if shift and not ws:
        raise bad("a maximum shift is for .ws")
    if ws:
        if cta_group != 1 or m not in (32, 64, 128) or n not in (64, 128, 256):
            raise bad(
                f"{m} x {n} with .ws, cta_group {cta_group}: needs M 32, 64, 128, N 64, 128, 256, one CTA"
            )
    else:
        step = 8 if cta_group == 1 else 16
        rows = (64, 128) if cta_group == 1 else (128, 256)
        fits = n % step == 0
        if kind == "i8":  # 8, 16, 24, 32, then steps of 16
            fits = n in (8, 16, 24) or n % 16 == 0 if cta_group == 1 else n % 32 == 0
        if m not in rows or not 1 <= n <= 256 or not fits:
            raise bad(f"M {m}, N {n} is not a shape of cta_group::{cta_group}")
    return InstructionDescriptor(
        kind,
        m,
        n,
        k_of(kind),
        a_type,
        b_type,
        d_type,
        negate_a,
        negate_b,
        a_k_major,
        b_k_major,
        saturate,
        sparse,
        (0, 8, 16, 32)[shift],
    )
