"""Register fragments of warp and warpgroup matrix instructions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]


def ldmatrix(shape: str, num: int, trans: bool) -> tuple[Index, Index]:
    """ldmatrix/stmatrix: (address_lane, byte) of every element that a thread's registers receive.

    shape "m8n8" (b16), "m16n16" (b8, trans), "m8n16" (b8, sub-byte unpacking raises). Both arrays are [32 threads, registers, elements per register] (16-bit
    elements for m8n8: 2 per register, low half first; 8-bit: 4). The element comes from
    shared address `addresses[address_lane] + byte`. For stmatrix the same arrays say where an element goes.
    """
    raise NotImplementedError


def mma_fragment(shape: str, operand: str, bits: int) -> tuple[Index, Index]:
    """mma.sync: (row, col) of each element of A (M x K), B (K x N), C/D (M x N) as [32, registers, elements per register].

    shape like "m16n8k16"; operand "a", "b", "c" or "d"; bits the element width (C/D: 32, or 16 for f16 accumulators)."""
    raise NotImplementedError


def wgmma_accumulator(n: int, bits: int = 32) -> tuple[Index, Index]:
    """wgmma D: (row, col) in the 64 x n tile as [128 threads, registers, elements per register]."""
    raise NotImplementedError


def wgmma_a(bits: int) -> tuple[Index, Index]:
    """wgmma A from registers: (row, k) in the 64 x (256 / bits) tile as [128, 4, 32 // bits]."""
    raise NotImplementedError
