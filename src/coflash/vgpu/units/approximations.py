"""The approximate functions: ex2 lg2 rcp rsqrt sin cos tanh.

Each is modelled as the float64 function rounded to the result type, which lies inside the manual's error
bound. Hardware differs from this in the last bits (the bounds: ex2 2^-22 relative, lg2 2^-22 absolute, rcp 1
ulp, rsqrt 2^-22.9 relative, sin and cos 2^-20.5 absolute in [-pi, pi], tanh.f32 2^-11 relative, the 16-bit
forms about one of their ulps). Special values are exactly the manual's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .floats import flush_raw, values
from .form import Form
from .formats import F2, F4, F8, U4, U8, Array, Constant, bf16_from_f32, every, flush, raw16, raw32

Function = Callable[..., Any]

_F64: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}


def _build(form: Form) -> Function:
    op = form.op
    type_ = form.type()
    ftz = form.take("ftz")
    exact = _F64[op]
    if op == "rcp" and not form.take("approx"):
        return _rounded_reciprocal(form, type_, ftz)
    if op != "rcp" and not form.take("approx"):
        form.fail("needs .approx")
    if type_ == "f64":
        if op == "rsqrt" and not ftz:
            return lambda a: exact(a.view(F8)).view(U8)
        if op not in ("rcp", "rsqrt") or not ftz:
            form.fail()
        return _coarse64(exact)
    if type_ == "f32":
        if op == "tanh" and ftz:
            form.fail()

        def run(a: Array) -> Array:
            return raw32(exact(a.view(F4).astype(F8)).astype(F4))

        def run_ftz(a: Array) -> Array:
            return raw32(flush(exact(flush(a.view(F4)).astype(F8)).astype(F4)))

        if op == "ex2" and ftz:
            return _ex2_ftz
        return run_ftz if ftz else run
    if type_ not in ("f16", "bf16") or op not in ("ex2", "tanh"):
        form.fail()
    if op == "ex2" and ftz != (type_ == "bf16") or op == "tanh" and ftz:
        form.fail()

    def narrow(a: Array) -> Array:
        x = exact(values(flush_raw(a, type_) if ftz else a, type_).astype(F8))
        if type_ == "f16":
            return raw16(x.astype(F2))
        r = bf16_from_f32(x.astype(F4))
        return flush_raw(r, type_) if ftz else r

    return narrow


_LOWEST = Constant(-126.0, F4)


def _ex2_ftz(a: Array) -> Array:
    """2^x; below -126 it is a subnormal, which flushes to +0; a subnormal x gives 1 anyway."""
    x = a.view(F4)
    r = np.exp2(x.astype(F8)).astype(F4)
    normal = x >= _LOWEST.like(x)
    if every(normal):  # so there is no NaN either
        return r.view(U4)
    return raw32(r * normal.astype(F4))


def _rounded_reciprocal(form: Form, type_: str, ftz: bool) -> Function:
    from .floats import arithmetic32, arithmetic64

    mode = form.one_of("rn", "rz", "rm", "rp")
    if type_ == "f64":
        divide64, one64 = arithmetic64("div", mode), np.array([1.0]).view(U8)
        return lambda a: divide64(one64, a)
    if type_ != "f32":
        form.fail()
    divide, one = arithmetic32("div", mode, ftz, False), np.array([1.0], F4).view(U4)
    return lambda a: divide(one, a)


def _coarse64(exact: Function) -> Function:
    """rcp/rsqrt.approx.ftz.f64: only the upper 32 bits of operand and result count; the lower half of the
    result is zero."""
    high = U8.type(0xFFFFFFFF00000000)

    def run(a: Array) -> Array:
        x = flush(np.asarray(a & high).view(F8))
        r = flush(exact(x))
        return np.where(r != r, U8.type(0x7FFFFFFF00000000), r.view(U8) & high)

    return run


BUILDERS: dict[str, Callable[[Form], Function]] = dict.fromkeys(_F64, _build)
