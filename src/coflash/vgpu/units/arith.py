"""Arithmetic of the scalar, packed and tensor-core instructions, on raw register values.

Register convention, for operands and results: a NumPy array over lanes of an unsigned type as wide as the PTX
type: uint16 for 16-bit (and 8-bit) types, uint32 for 32-bit types and 16-bit pairs (f16x2, bf16x2, s16x2),
uint64 for 64-bit types and f32x2; bool for predicates. Operands may have any shapes that broadcast, but equal
ones are quickest: an immediate is best spread over the lanes once, at decode time. Only cvt narrows an
operand that is wider than its type. Callers run inside `np.errstate(all="ignore")`: entering it costs more
than an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from . import approximations, conversions, floats, integers
from .form import Form
from .formats import F4, U2, U4, U8, Array, UnsupportedInstruction, from_float32, to_float32
from .tensorcore import mma, mma_i8_saturating

__all__ = [
    "UnsupportedInstruction",
    "from_float32",
    "mma",
    "mma_i8_saturating",
    "operand_counts",
    "resolve",
    "to_float32",
]

Function = Callable[..., Any]

_PACKED: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    "f16x2": (U4, U2),
    "bf16x2": (U4, U2),
    "u16x2": (U4, U2),
    "s16x2": (U4, U2),
    "f32x2": (U8, U4),
}
_HALVES = frozenset("add sub mul fma min max abs neg ex2 tanh".split())
_PACKED_OPS = {
    "f16x2": _HALVES,
    "bf16x2": _HALVES,
    "f32x2": frozenset("add sub mul fma".split()),
    "u16x2": frozenset("add min max".split()),
    "s16x2": frozenset("add min max".split()),
}


@cache
def resolve(mnemonic: str, dual: bool = False) -> Function:
    """The function of a computing instruction, by its full name without operands:
    `resolve("fma.rn.ftz.f32")(a, b, c)`.

    Covers add sub mul mad fma div rem sqrt rcp rsqrt neg abs min max (of three operands too) copysign testp
    sin cos lg2 ex2 tanh; cvt, cvt.pack; and or xor not cnot lop3 (its immediate is the last operand) shl shr
    shf prmt bfe bfi bfind brev popc clz fns szext bmsk sad dp4a dp2a mul24 mad24; add/sub/mad with .cc, addc
    subc madc; set setp selp slct.
    - add.cc, sub.cc, mad.cc return (result, carry); addc, subc, madc take the carry (bool) last, and with .cc
      return it too.
    - setp returns the predicate p; with `dual` (the form `p|q`) it returns (p, q). With a boolean operator
      (setp.lt.and.f32) the source predicate is the third operand. setp on a packed type is always (p, q), low
      half first.
    - selp(a, b, p), slct(a, b, c).
    - cvt from two registers (cvt.rn.bf16x2.f32 d, a, b): fn(a, b) puts a in the upper half, as PTX does.
      Raises UnsupportedInstruction for what it does not know.
    """
    form = Form(mnemonic)
    if form.op in ("setp", "set", "selp", "slct"):
        return form.finished(
            _COMPARING[form.op](form, dual) if form.op == "setp" else _COMPARING[form.op](form)
        )
    if form.op == "cvt":
        return form.finished(conversions.build(form))
    if not form.types:
        form.fail("a type is missing")
    first = form.types[0]
    if first in _PACKED:
        if form.op not in _PACKED_OPS[first] or len(form.types) != 1:
            form.fail()
        half = Form(mnemonic.replace("." + first, "." + first[:-2]), packed=True)
        return _packed(half.finished(_build(half)), *_PACKED[first])
    return form.finished(_build(form))


def _build(form: Form) -> Function:
    if form.op in approximations.BUILDERS:
        return approximations.BUILDERS[form.op](form)
    if not floats.is_float(form.types[0]):
        return integers.build(form)
    if form.op not in floats.BUILDERS:
        form.fail()
    return floats.BUILDERS[form.op](form)


_ONE = frozenset("abs neg not cnot brev popc clz bfind sqrt rcp rsqrt sin cos lg2 ex2 tanh testp".split())
_THREE = frozenset("fma mad mad24 sad bfe shf prmt fns dp4a dp2a selp slct".split())
_FOUR = frozenset(["bfi", "lop3", "madc"])


def operand_counts(mnemonic: str) -> tuple[int, ...]:
    """How many source operands a form that `resolve` takes can have; carries count, as its functions take them."""
    form = Form(mnemonic)
    op = form.op
    if op == "cvt":
        if "pack" in form.modifiers:
            return (3,) if form.types[-1] == "b32" else (2,)
        return (2,) if form.types[0].endswith("x2") and form.types[-1] == "f32" else (1,)
    if op in ("setp", "set"):
        return (3,) if set(form.modifiers) & set(_BOOLEAN) else (2,)
    if op in ("addc", "subc"):
        return (3,)
    if op in ("min", "max"):
        if form.types[0] != "f32" or "xorsign" in form.modifiers:
            return (2,)
        return (3,) if "abs" in form.modifiers else (2, 3)
    if op in _ONE:
        return (1,)
    return (4,) if op in _FOUR else (3,) if op in _THREE else (2,)


def _packed(function: Function, whole: np.dtype[Any], part: np.dtype[Any]) -> Function:
    """Apply an elementwise function to both halves of packed registers."""

    def run(*operands: Array) -> Array:
        first = operands[0]
        shape = np.shape(first)
        for x in operands[1:]:
            if np.shape(x) != shape:
                shape = np.broadcast_shapes(*[np.shape(y) for y in operands])
                operands = tuple(np.array(np.broadcast_to(y, shape)) for y in operands)
                break
        if not shape:
            return run(*[np.reshape(x, (1,)) for x in operands])[0]
        return function(*[(x if x.flags.c_contiguous else x.copy()).view(part) for x in operands]).view(whole)

    return run


def _condition(form: Form, op: str, type_: str) -> Function:
    if floats.is_float(type_):
        ftz = form.take("ftz")
        if ftz and type_ not in ("f32", "f16"):
            form.fail(".ftz is for f32 and f16")
        return floats.comparison(op, type_, ftz)
    if integers.is_integer(type_):
        return integers.comparison(op, type_)
    form.fail()


_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_OPERATORS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan".split()


def _setp(form: Form, dual: bool) -> Function:
    op = form.one_of(*_OPERATORS)
    boolean = form.maybe(*_BOOLEAN)
    type_ = form.type()
    if type_ in ("f16x2", "bf16x2"):
        half = _condition(form, op, type_[:-2])
        if boolean:
            form.fail("packed comparison with a boolean operator is not modelled")
        mask, sixteen = U4.type(0xFFFF), U4.type(16)

        def both(a: Array, b: Array) -> tuple[Array, Array]:
            low = half((a & mask).astype(U2), (b & mask).astype(U2))
            return low, half((a >> sixteen).astype(U2), (b >> sixteen).astype(U2))

        return both
    compare = _condition(form, op, type_)
    if boolean is None:
        if not dual:
            return compare

        def plain(a: Array, b: Array) -> tuple[Array, Array]:
            p = compare(a, b)
            return p, ~p

        return plain
    combine = _BOOLEAN[boolean]
    if not dual:
        return lambda a, b, c: combine(compare(a, b), c)

    def run(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        p = compare(a, b)
        return combine(p, c), combine(~p, c)

    return run


def _set(form: Form) -> Function:
    """The result is all ones for integer types, 1.0 for f32. 16-bit sources can also set 16 bits."""
    op = form.one_of(*_OPERATORS)
    boolean = form.maybe(*_BOOLEAN)
    target, source = form.type(), form.type()
    if target not in ("u32", "s32", "f32") and (target, source) not in (("u16", "f16"), ("u16", "bf16")):
        form.fail()
    if target == "f32" and source in ("f16", "bf16"):
        form.fail()
    compare = _condition(form, op, source)
    if target == "u16":
        true, false = U2.type(0xFFFF), U2.type(0)
    else:
        true, false = U4.type(0x3F800000 if target == "f32" else 0xFFFFFFFF), U4.type(0)
    if boolean is None:
        return lambda a, b: np.where(compare(a, b), true, false)
    combine = _BOOLEAN[boolean]
    return lambda a, b, c: np.where(combine(compare(a, b), c), true, false)


_SELECTED = frozenset("b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64".split())


def _selp(form: Form) -> Function:
    type_ = form.type()
    if type_ not in _SELECTED:
        form.fail()
    return lambda a, b, p: np.where(p, a, b)


def _slct(form: Form) -> Function:
    if form.type() not in _SELECTED:
        form.fail()
    by = form.type()
    ftz = form.take("ftz")
    if by == "s32" and not ftz:
        return lambda a, b, c: np.where(c.view(np.int32) >= 0, a, b)
    if by != "f32":
        form.fail()

    def run(a: Array, b: Array, c: Array) -> Array:
        x = floats.flush_raw(c, "f32") if ftz else c
        return np.where(x.view(F4) >= 0, a, b)  # -0 counts as 0; NaN selects b

    return run


_COMPARING: dict[str, Callable[..., Function]] = {"setp": _setp, "set": _set, "selp": _selp, "slct": _slct}
