"""Exponentials by two units at once: the special-function unit, and the multiply-add units through a polynomial.

The special-function unit gives 16 results a clock and multiprocessor, which on Blackwell takes as long as the
products of a tile.  A part of a row's exponentials is therefore computed as `2**floor(x) * p(x - floor(x))` on
packed float32 pairs.  Both ways round differently in the last bits of float32 only to the degree chosen; after
rounding to 16 bits they are the same to within `docs/numerics.md`'s figures.
"""

from typing import Any

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives as prims

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


def exp2_polynomial(pair: tuple[Float32, Float32], degree: int) -> tuple[Float32, Float32]:
    """Both at once on the multiply-add units, for arguments up to 126."""
    coefficients = COEFFICIENTS[degree]
    clamped = (_max(pair[0], LOWEST), _max(pair[1], LOWEST))
    shifted = prims.add_packed_f32x2(clamped, _twice(ROUNDER), rnd="rm")
    whole = prims.add_packed_f32x2(shifted, _twice(-ROUNDER), rnd="rn")
    fraction = prims.fma_packed_f32x2(whole, _twice(-1.0), clamped, rnd="rn")
    power = _twice(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        power = prims.fma_packed_f32x2(power, fraction, _twice(coefficient), rnd="rn")
    return _scale(power[0], shifted[0]), _scale(power[1], shifted[1])


def exp2_pairs(pairs: list[tuple[Float32, Float32]], polynomial: int, degree: int, out_of: int = 16) -> list:
    """`polynomial` of every `out_of` pairs by polynomial, spread evenly; the rest by the special-function unit."""
    results = []
    for i, pair in enumerate(pairs):
        turn = (i + 1) * polynomial // out_of > i * polynomial // out_of
        results.append(exp2_polynomial(pair, degree) if turn else (exp2(pair[0]), exp2(pair[1])))
    return results


def _twice(value: float) -> tuple[Float32, Float32]:
    return Float32(value), Float32(value)


@dsl_user_op
def _max(a: Float32, b: float, *, loc: Any = None, ip: Any = None) -> Float32:
    from cutlass import cute

    return cute.arch.fmax(a, Float32(b), loc=loc, ip=ip)


@dsl_user_op
def _scale(power: Float32, shifted: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """power * 2**n, n being the integer in the low bits of `shifted`: one shift-and-add on the bits."""
    bits = Int32(llvm.bitcast(T.i32(), power.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    whole = Int32(llvm.bitcast(T.i32(), shifted.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return Float32(llvm.bitcast(T.f32(), (bits + (whole << 23)).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
