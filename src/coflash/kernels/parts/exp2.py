"""Exponentials by two units at once: the special-function unit, and the multiply-add units through a polynomial.

The special-function unit gives 16 results a clock and multiprocessor, which on Blackwell takes as long as the
products of a tile.  A part of a row's exponentials is therefore computed as `2**floor(x) * p(x - floor(x))` on
packed float32 pairs, p being a cubic.  A pair takes nine instructions where the special-function
unit takes three, the scaling that makes x of a score included:

    y = saturate((x - lowest) / span)              two, one a number: bounds x on both sides, at no cost of its own
    t = span y + magic, rounded down               floor(x) in the low bits of t
    s = q (x - floor(x) + a)                       two: shift - q t, to which q span y is added
    p = (s s + square) s + constant                two
    2**x = p's bits + (t << 23)                    two, one a number

`coflash.exp2.Depressed` has the numbers.  After rounding to 16 bits both units agree to within
`docs/numerics.md`'s figures.

The functions give PTX text, so that a kernel can put a whole row's work into one piece of inline PTX.
"""

from __future__ import annotations

import struct
from typing import Any

from cutlass import Float32
from cutlass.cutlass_dsl import T, dsl_user_op

from coflash.exp2 import DEPRESSED as CUBIC
from coflash.kernels.parts.inline import ptx


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """By the special-function unit."""
    return Float32(ptx(T.f32(), "ex2.approx.ftz.f32 $0, $1;", "=f,f", x, pure=True, loc=loc, ip=ip))


#: Registers that the functions below use, beside the pair itself.
SCRATCH = ".reg .b32 lo, hi, p_lo, p_hi;\n.reg .b64 whole, part, power, k;"


def special(pair: str) -> list[str]:
    """Both numbers of the 64-bit register `pair`, by the special-function unit."""
    return [
        f"mov.b64 {{lo, hi}}, {pair};",
        "ex2.approx.ftz.f32 lo, lo;",
        "ex2.approx.ftz.f32 hi, hi;",
        f"mov.b64 {pair}, {{lo, hi}};",
    ]


def bounded(scale: Any, offset: Any) -> tuple[Any, Any]:
    """What a score is multiplied by, and what is added, to give y where `score * scale + offset` is x."""
    return scale * (1 / CUBIC.span), offset * (1 / CUBIC.span) + (-CUBIC.lowest / CUBIC.span)


def polynomial(pair: str, low: str, high: str, scale: str, offset: str) -> list[str]:
    """Of the scores `low` and `high`, on the multiply-add units; `scale` and `offset` are those of `bounded`."""
    return [
        f"fma.rn.sat.f32 lo, {low}, {scale}, {offset};",
        f"fma.rn.sat.f32 hi, {high}, {scale}, {offset};",
        f"mov.b64 {pair}, {{lo, hi}};",
        f"mov.b64 k, {_twice(CUBIC.span)};",
        f"mov.b64 part, {_twice(CUBIC.magic)};",
        f"fma.rm.f32x2 whole, {pair}, k, part;",
        f"mov.b64 k, {_twice(-CUBIC.q)};",
        f"mov.b64 part, {_twice(CUBIC.shift)};",
        "fma.rn.f32x2 part, whole, k, part;",
        f"mov.b64 k, {_twice(CUBIC.q * CUBIC.span)};",
        f"fma.rn.f32x2 part, {pair}, k, part;",
        f"mov.b64 k, {_twice(CUBIC.square)};",
        "fma.rn.f32x2 power, part, part, k;",
        f"mov.b64 k, {_twice(CUBIC.constant)};",
        "fma.rn.f32x2 power, power, part, k;",
        # The integer sits in the low bits: shifted into the exponent field it multiplies by 2**floor(x).
        "mov.b64 {lo, hi}, whole;",
        "mov.b64 {p_lo, p_hi}, power;",
        f"mad.lo.s32 lo, lo, {1 << 23}, p_lo;",
        f"mad.lo.s32 hi, hi, {1 << 23}, p_hi;",
        f"mov.b64 {pair}, {{lo, hi}};",
    ]


def by_polynomial(pair: int, share: int, out_of: int = 16) -> bool:
    """Whether pair number `pair` is one of the `share` in `out_of` that the polynomial takes, spread evenly."""
    return (pair + 1) * share // out_of > pair * share // out_of


def _twice(value: float) -> str:
    return "0x" + struct.pack(">f", value).hex() * 2
