"""Tensor memory: which lanes and columns tcgen05 instructions touch. 128 lanes of 512 columns of 32 bits.

Sources: PTX manual, "tcgen05: Data Movement Shape" and "Data Path Layout Organization"; the bit-exact maps of
CUTLASS's copy and MMA traits for sm_100. All arrays are read-only and cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import UnsupportedInstruction

Index = NDArray[np.intp]

LANES, COLUMNS = 128, 512

# Registers of .x1 per thread, columns of .x1, the largest .num.
_SHAPES = {
    "32x32b": (1, 1, 128),
    "16x64b": (1, 2, 128),
    "16x128b": (2, 4, 64),
    "16x256b": (4, 8, 32),
    "16x32bx2": (1, 1, 128),
}


def _frozen(array: NDArray[Any]) -> Index:
    out = np.ascontiguousarray(array, dtype=np.intp)
    out.setflags(write=False)
    return out


def _static(shape: str, num: int) -> tuple[int, int]:
    if shape not in _SHAPES:
        raise UnsupportedInstruction(f"tcgen05.ld/st .{shape}")
    per, columns, most = _SHAPES[shape]
    if num not in (1, 2, 4, 8, 16, 32, 64, 128) or num > most:
        raise UnsupportedInstruction(f"tcgen05.ld/st .{shape}.x{num}")
    return per, columns


def registers(shape: str, num: int) -> int:
    """Registers per thread of tcgen05.ld/st (packing leaves it as it is: it doubles the columns)."""
    return _static(shape, num)[0] * num


def lanes_of(shape: str) -> int:
    """Lanes a warp touches: all 32 of its quarter, or 16 of them."""
    return 32 if shape == "32x32b" else 16


@cache
def ldst(shape: str, num: int, split_half: int = 0, packed: bool = False) -> tuple[Index, Index]:
    """tcgen05.ld and tcgen05.st: (lane, column), relative to the address operand, of each register of a warp:
    [32, registers].

    With packed (.pack::16b, .unpack::16b) the arrays are [32, registers, 2]: a register's low half belongs to
    the low 16 bits of an even column, its high half to those of the next one; the manual does not say what st
    leaves in the upper 16 bits of those columns. split_half is the immediate of 16x32bx2, in columns: where
    threads 16-31 start. The address's lane must be in the warp's own quarter: 32 * (warp % 4), or 16 more for
    the 16-lane shapes.
    """
    per, columns = _static(shape, num)
    t = np.arange(32)[:, None]
    r = np.arange(per * num)[None, :]
    repeat, within = r // per, r % per
    if shape == "32x32b":
        lane, column = t + 0 * r, 0 * t + r
    elif shape == "16x64b":
        # Neighbouring threads are 8 lanes apart, pairs one column apart.
        lane, column = t // 4 + 8 * (t % 2) + 0 * r, t // 2 % 2 + 2 * repeat
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * within, t % 4 + 4 * repeat
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (within // 2), t % 4 * 2 + within % 2 + 8 * repeat
    else:
        lane, column = t % 16 + 0 * r, 0 * t + r
    if packed:
        lane, column = np.repeat(lane[:, :, None], 2, 2), 2 * column[:, :, None] + np.arange(2)
    if shape == "16x32bx2":
        second = (np.arange(32) >= 16).reshape(32, *[1] * (column.ndim - 1))
        column = column + split_half * second
    return _frozen(lane), _frozen(column)


@dataclass(frozen=True)
class Copy:
    """tcgen05.cp: rows of a K-major shared-memory matrix (its descriptor), and the lanes each of them goes
    to.

    Row i, `words` 32-bit words long, goes to columns 0.. of every lane in lanes[i], relative to the address.
    The source chunks are `operand_chunks(d, rows, 4 * words, 8, k_major=True)`. cta_group::2 does this in
    both CTAs of the pair, each from its own shared memory at the same descriptor.
    """

    rows: int
    words: int
    lanes: Index  # [rows, copies]


@cache
def cp(shape: str, multicast: str = "") -> Copy:
    """The static map of tcgen05.cp: shape 128x256b 4x256b 128x128b 64x128b 32x128b; multicast "",
    warpx2::02_13, warpx2::01_23, warpx4."""
    form = (shape, multicast)
    if form in (("128x256b", ""), ("128x128b", "")):
        lanes = np.arange(128)[:, None]
    elif form == ("4x256b", ""):
        lanes = 32 * np.arange(4)[:, None]  # one lane of each quarter
    elif form == ("64x128b", "warpx2::02_13"):
        lanes = np.arange(64)[:, None] + np.array([0, 64])
    elif form == ("64x128b", "warpx2::01_23"):
        row = np.arange(64)[:, None]
        lanes = row % 32 + 64 * (row // 32) + np.array([0, 32])
    elif form == ("32x128b", "warpx4"):
        lanes = np.arange(32)[:, None] + 32 * np.arange(4)
    else:
        raise UnsupportedInstruction(f"tcgen05.cp .{shape}{'.' if multicast else ''}{multicast}")
    return Copy(len(lanes), int(shape.split("x")[1][:-1]) // 32, _frozen(lanes))


def shift_lanes() -> tuple[Index, Index]:
    """tcgen05.shift.down: (from, to) lanes of the 8 columns (256 bits) at the address: each row moves one
    lane down.

    Rows 1 to 31 of a 32-lane quarter move to 0 to 30, relative to the address's lane; the last lane keeps its
    value. The manual's shape for it is 31x256b.
    """
    source = np.arange(1, 32)
    return _frozen(source), _frozen(source - 1)


@cache
def accumulator(m: int, n: int, cta_group: int, ws: bool = False) -> tuple[Index, Index, Index]:
    """D of tcgen05.mma: (rank in the CTA pair, lane, column) of element [i, j], each [m, n]; relative to the
    address.

    One element takes one 32-bit column, also of type f16. Layouts of the manual: D (M 128), F (M 64), A
    (pair, M 256), B (pair, M 128), E (.ws, M 64), G (.ws, M 32).
    """
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    zero = 0 * i * j
    rank, lane, column = zero, i + zero, j + zero
    if cta_group == 1 and ws:
        if m == 64:
            lane, column = i + 64 * (j // (n // 2)), j % (n // 2) + zero
        elif m == 32:
            lane, column = i + 32 * (j // (n // 4)), j % (n // 4) + zero
        elif m != 128:
            raise UnsupportedInstruction(f"tcgen05.mma.ws with M {m}")
    elif cta_group == 1:
        if m == 64:
            lane = i % 16 + 32 * (i // 16) + zero
        elif m != 128:
            raise UnsupportedInstruction(f"tcgen05.mma with M {m}, one CTA")
    elif cta_group == 2 and not ws:
        if m == 256:
            rank, lane = i // 128 + zero, i % 128 + zero
        elif m == 128:
            rank = i // 64 + zero
            lane, column = i % 64 + 64 * (j // (n // 2)), j % (n // 2) + zero
        else:
            raise UnsupportedInstruction(f"tcgen05.mma with M {m}, CTA pair")
    else:
        raise UnsupportedInstruction(f"tcgen05.mma cta_group::{cta_group}{' .ws' if ws else ''}")
    return _frozen(rank), _frozen(lane), _frozen(column)


@cache
def a_operand(m: int, cta_group: int, ws: bool = False) -> tuple[Index, Index]:
    """A of tcgen05.mma in tensor memory: (rank, lane) of row i, each [copies, m]; copy c feeds the c-th of
    equal parts of N.

    Row i holds its K elements packed in columns 0 .. K * bits / 32 - 1 from the address on. Where D folds N
    over lanes (a pair with M 128) each half of the lanes reads its own copy of A, so a kernel has to store A
    twice; everywhere else there is one copy. The manual does not draw A for .ws with M 32 or 64: not
    modelled.
    """
    i = np.arange(m)[None, :]
    if ws and m != 128:
        raise UnsupportedInstruction(f"tcgen05.mma.ws with A in tensor memory and M {m}")
    if cta_group == 1:
        lane = i % 16 + 32 * (i // 16) if m == 64 else i
        return _frozen(0 * i), _frozen(lane)
    if m == 256:
        return _frozen(i // 128), _frozen(i % 128)
    copies = np.arange(2)[:, None]
    return _frozen(i // 64 + 0 * copies), _frozen(i % 64 + 64 * copies)
