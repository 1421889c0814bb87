"""Shared-memory matrix descriptors (wgmma, tcgen05) and tcgen05 instruction descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DescriptorError(ValueError):
    """A descriptor with reserved bits set, an invalid field, or a combination the manual forbids."""


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A decoded 64-bit shared-memory descriptor; all sizes in bytes."""

    start: int  # shared::cta address of the tile, 18 bits
    leading: int  # leading-dimension byte offset (or absolute address)
    stride: int  # stride-dimension byte offset
    swizzle: int  # 0, 32, 64 or 128
    atom: int  # bytes that a swizzle keeps together: 16, or 32 for "128-byte with 32-byte atoms"
    base_offset: int  # 0..7: phase of the swizzle pattern
    absolute_leading: bool  # sm_103 only


def decode_wgmma(raw: int) -> MatrixDescriptor:
    """The sm_90 descriptor of wgmma.mma_async."""
    raise NotImplementedError


def decode_tcgen05(raw: int) -> MatrixDescriptor:
    """The sm_100 descriptor of tcgen05.mma and tcgen05.cp."""
    raise NotImplementedError


def operand_offsets(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int32]:
    """Shared-memory byte address of every element of an operand tile, int32 [rows, k], read-only (cached).

    rows is M of A, N of B; k the depth of one instruction; bits the element width in shared memory (8, 16, 32)."""
    raise NotImplementedError


def operand_chunks(d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int32]:
    """Addresses of the 16-byte chunks of the tile: [rows, k * bits / 128] if k_major, else [k, rows * bits / 128]; what shadow state needs."""
    raise NotImplementedError


def load_operand(
    memory: NDArray[np.uint8], d: MatrixDescriptor, rows: int, k: int, bits: int, k_major: bool
) -> NDArray[Any]:
    """The tile's raw elements, uint8/16/32 [rows, k], from a CTA's shared memory (a uint8 array, 16-byte multiple long).

    Raises IndexError when the tile leaves the memory."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """A decoded tcgen05 instruction descriptor (dense or sparse; block scaling separate)."""

    kind: str
    m: int
    n: int
    a_type: str  # names of arith.to_float32
    b_type: str
    d_type: str  # f16, f32, s32
    negate_a: bool
    negate_b: bool
    a_k_major: bool  # not transposed
    b_k_major: bool
    saturate: bool
    sparse: bool
    ws_max_shift: int


def decode_instruction(raw: int, kind: str, cta_group: int = 1, ws: bool = False) -> InstructionDescriptor:
    """Decode and check the 32-bit instruction descriptor of tcgen05.mma for kind f16, tf32, f8f6f4 or i8 (no dot, no prefix)."""
    raise NotImplementedError


def k_of(kind: str) -> int:
    """Depth K of one dense tcgen05.mma: 16 for f16, 8 for tf32, 32 for f8f6f4 and i8."""
    raise NotImplementedError
