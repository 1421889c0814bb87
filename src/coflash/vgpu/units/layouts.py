"""Register fragments of warp and warpgroup matrix instructions.

Throughout, a warp's thread t is group g = t // 4 and place q = t % 4 in its group (PTX manual, "Warp Level
Matrix Instructions" and "Register Fragments for wgmma.mma_async"). All arrays are read-only and cached.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import UnsupportedInstruction

Index = NDArray[np.intp]


def _frozen(*arrays: NDArray[Any]) -> tuple[Any, ...]:
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    out = []
    for a in arrays:
        b = np.ascontiguousarray(np.broadcast_to(a, shape), dtype=np.intp)
        b.setflags(write=False)
        out.append(b)
    return tuple(out)


def _axes(threads: int, registers: int, elements: int) -> tuple[Index, Index, Index]:
    t = np.arange(threads)[:, None, None]
    r = np.arange(registers)[None, :, None]
    e = np.arange(elements)[None, None, :]
    return t, r, e


@cache
def ldmatrix(shape: str, num: int, trans: bool, store: bool = False) -> tuple[Index, Index]:
    """ldmatrix or stmatrix: (address_lane, byte) of every element that a thread's registers hold.

    Both arrays are [32 threads, registers, elements per register], lowest element first: the element is at
    shared address `addresses[address_lane] + byte`. Shapes: m8n8 (16-bit elements, 2 per register) and
    stmatrix's m16n8 with .trans (8-bit, 4 per register). ldmatrix's 8-bit m16n16 is not modelled: CUTLASS and
    CuTe-DSL describe its registers differently. Nor are the m8n16 forms that unpack 6- and 4-bit elements.
    """
    if num not in (1, 2, 4):
        raise UnsupportedInstruction(f"ldmatrix/stmatrix .x{num}")
    if shape == "m8n8":
        t, r, e = _axes(32, num, 2)
        row, col = (t % 4 * 2 + e, t // 4) if trans else (t // 4, t % 4 * 2 + e)
        return _frozen(8 * r + row, 2 * col + 0 * r)
    if shape == "m16n8" and trans and store:
        t, r, e = _axes(32, num, 4)
        return _frozen(8 * r + 2 * (t % 4) + e % 2, t // 4 + 8 * (e // 2) + 0 * r)
    form = "stmatrix" if store else "ldmatrix"
    raise UnsupportedInstruction(f"{form} .{shape}.x{num}{'.trans' if trans else ''}")


@cache
def mma_fragment(shape: str, operand: str, bits: int) -> tuple[Index, Index]:
    """mma.sync m16n8k*: (row, col) of each element of A (M x K), B (K x N), C and D (M x N): [32, registers,
    elements each].

    bits is the element width: 8, 16 or 32 for A and B; 32, or 16 for f16 accumulators, of C and D.
    """
    m, n, k = (int(x) for x in shape.replace("m", " ").replace("n", " ").replace("k", " ").split())
    if (m, n) != (16, 8) or bits not in (8, 16, 32):
        raise UnsupportedInstruction(f"mma.sync {shape} with {bits}-bit elements")
    if operand in ("c", "d"):
        per = 32 // bits
        if bits == 8:
            raise UnsupportedInstruction(f"mma.sync {shape} accumulators of 8 bits")
        t, r, e = _axes(32, 4 // per, per)
        i = r * per + e
        return _frozen(t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2)
    per = 32 // bits
    blocks = k // (4 * per)
    if blocks not in (1, 2) or k % (4 * per):
        raise UnsupportedInstruction(f"mma.sync {shape} with {bits}-bit elements")
    if operand == "a":
        t, r, e = _axes(32, 2 * blocks, per)
        return _frozen(t // 4 + 8 * (r % 2), t % 4 * per + e + r // 2 * 4 * per)
    if operand == "b":
        t, r, e = _axes(32, blocks, per)
        return _frozen(t % 4 * per + e + r * 4 * per, t // 4 + 0 * r)
    raise ValueError(f"operand must be a, b, c or d, not {operand!r}")


@cache
def wgmma_accumulator(n: int, bits: int = 32) -> tuple[Index, Index]:
    """wgmma D: (row, col) in the 64 x n tile: [128 threads, registers, elements each]; 16 bits packs two
    columns a register."""
    if n % 8 or not 8 <= n <= 256 or bits not in (16, 32):
        raise UnsupportedInstruction(f"wgmma accumulator of {n} columns, {bits} bits")
    per = 32 // bits
    t, r, e = _axes(128, n // 2 // per, per)
    i = r * per + e
    row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
    return _frozen(row, 8 * (i // 4) + t % 4 * 2 + i % 2)


@cache
def wgmma_a(bits: int) -> tuple[Index, Index]:
    """wgmma A from registers: (row, k) in the 64 x (256 / bits) tile: [128 threads, 4 registers, 32 / bits
    elements]."""
    row, col = mma_fragment(f"m16n8k{256 // bits}", "a", bits)
    warp = np.arange(128)[:, None, None] // 32
    return _frozen(np.tile(row, (4, 1, 1)) + 16 * warp, np.tile(col, (4, 1, 1)))
