"""Tensor memory: which lanes and columns tcgen05 instructions touch. 128 lanes x 512 columns of 32 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]


def ldst(shape: str, num: int, split_half: int = 0, packed: bool = False) -> tuple[Index, Index]:
    """tcgen05.ld / tcgen05.st: (lane, column), relative to the address operand, of each register of a warp.

    Arrays [32 threads, registers]; with packed (pack::16b / unpack::16b) [32, registers, 2]: low half first, the 16-bit elements
    of two neighbouring columns. shape: 32x32b 16x64b 16x128b 16x256b 16x32bx2 (split_half is immHalfSplitoff, in columns).
    Lane 0 is the lane of the address, which must be the warp's own quarter: 32 * (warp % 4) (or + 16 for 16-lane shapes).
    """
    raise NotImplementedError


def registers(shape: str, num: int, packed: bool = False) -> int:
    """Registers per thread of that tcgen05.ld/st."""
    raise NotImplementedError


def cp(shape: str, multicast: str = "") -> object:
    """tcgen05.cp: where the 32-bit words of the shared-memory matrix go; see the class it returns."""
    raise NotImplementedError


def accumulator(m: int, n: int, cta_group: int, ws: bool = False) -> tuple[Index, Index, Index]:
    """D of tcgen05.mma: (cta rank in pair, lane, column) of element [m, n], each an [m, n] array; relative to the address's column."""
    raise NotImplementedError
