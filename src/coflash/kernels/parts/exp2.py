"""Exponentials by two units at once: the special-function unit, and the multiply-add units through a polynomial.

The special-function unit gives 16 results a clock and multiprocessor, which on Blackwell takes as long as the
products of a tile.  A part of a row's exponentials is therefore computed as `2**floor(x) * p(x - floor(x))` on
packed float32 pairs, ten instructions a pair in place of two.  After rounding to 16 bits the two ways agree to
within `docs/numerics.md`'s figures.

The pair functions give PTX text, so that a kernel can put a whole row's work into one piece of inline PTX.
"""

from __future__ import annotations

import struct
from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from coflash.exp2 import COEFFICIENTS

LOWEST = -127.0  # exponents below would wrap; 2**-127 is as good as zero beside any sum that holds a 1
ROUNDER = float(2**23 + 2**22)  # added with rounding down, leaves floor(x) in the low bits


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """By the special-function unit."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip)],
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


#: Registers that the pair functions use, beside the pair itself.
SCRATCH = ".reg .b32 lo, hi, p_lo, p_hi;\n.reg .b64 whole, part, power, k;"


def special(pair: str) -> list[str]:
    """Both numbers of the 64-bit register `pair`, by the special-function unit."""
    return [
        f"mov.b64 {{lo, hi}}, {pair};",
        "ex2.approx.ftz.f32 lo, lo;",
        "ex2.approx.ftz.f32 hi, hi;",
        f"mov.b64 {pair}, {{lo, hi}};",
    ]


def polynomial(pair: str, degree: int) -> list[str]:
    """Both at once on the multiply-add units, for numbers up to 126."""
    *lower, highest = COEFFICIENTS[degree]
    lines = [
        f"mov.b64 {{lo, hi}}, {pair};",
        f"max.f32 lo, lo, {_word(LOWEST)};",
        f"max.f32 hi, hi, {_word(LOWEST)};",
        f"mov.b64 {pair}, {{lo, hi}};",
        f"mov.b64 k, {_twice(ROUNDER)};",
        f"add.rm.f32x2 whole, {pair}, k;",
        "sub.rn.f32x2 part, whole, k;",
        f"sub.rn.f32x2 part, {pair}, part;",
        f"mov.b64 power, {_twice(highest)};",
    ]
    for coefficient in reversed(lower):
        lines += [f"mov.b64 k, {_twice(coefficient)};", "fma.rn.f32x2 power, power, part, k;"]
    # The integer sits in the low bits: shifted into the exponent field it multiplies by 2**floor(x).
    lines += [
        "mov.b64 {lo, hi}, whole;",
        "mov.b64 {p_lo, p_hi}, power;",
        "shl.b32 lo, lo, 23;",
        "shl.b32 hi, hi, 23;",
        "add.s32 lo, lo, p_lo;",
        "add.s32 hi, hi, p_hi;",
        f"mov.b64 {pair}, {{lo, hi}};",
    ]
    return lines


def by_polynomial(pair: int, share: int, out_of: int = 16) -> bool:
    """Whether pair number `pair` is one of the `share` in `out_of` that the polynomial takes, spread evenly."""
    return (pair + 1) * share // out_of > pair * share // out_of


def _word(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def _twice(value: float) -> str:
    return "0x" + struct.pack(">f", value).hex() * 2
