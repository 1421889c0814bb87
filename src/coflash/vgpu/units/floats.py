"""IEEE arithmetic, comparisons and minima of float types, on raw registers.

NaN results are the canonical NaN of the type (0x7fffffff, 0x7fff), except float64, which keeps the host's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .form import Form
from .formats import (
    F2,
    F4,
    F8,
    NAN16,
    NAN32,
    U2,
    U4,
    U8,
    Array,
    Constant,
    UnsupportedInstruction,
    bf16_from_f32,
    bf16_to_f32,
    encode,
    every,
    flush,
    raw16,
    raw32,
    round_f32,
    round_to_odd,
    two_sum_error,
)

Function = Callable[..., Any]

UNSIGNED: dict[str, np.dtype[Any]] = {"f16": U2, "bf16": U2, "f32": U4, "f64": U8}
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52}
SIGN = {"f16": 0x8000, "bf16": 0x8000, "f32": 0x80000000, "f64": 1 << 63}


def is_float(type_: str) -> bool:
    return type_ in UNSIGNED


def values(raw: Array, type_: str) -> Array:
    """The register as floats (bf16 as float32)."""
    if type_ == "f32":
        return raw.view(F4)
    if type_ == "f64":
        return raw.view(F8)
    if type_ == "f16":
        return raw.view(F2)
    return bf16_to_f32(raw)


def flush_raw(raw: Array, type_: str) -> Array:
    """.ftz on a register of any float type."""
    unsigned = UNSIGNED[type_]
    exponent = unsigned.type(INFINITY[type_])
    sign = unsigned.type(SIGN[type_])
    return np.where((raw & exponent) == 0, raw & sign, raw)


# --- float32, the hot ones ---

_LOW28 = Constant(0x0FFFFFFF, U8)


def _odd_sum(p: Array, c: Array, s: Array) -> Array:
    """s = p + c of float64, rounded to odd where it is not exact."""
    t = s - p
    e = (p - (s - t)) + (c - t)
    if not np.count_nonzero(e):
        return s
    return round_to_odd(s, np.where(np.isfinite(s), e, 0.0))


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32: the float64 product is exact, but the float64 sum may make the rounding to float32 a second
    one.

    That can only go wrong where the first rounding left a float32 tie, whose low 28 bits are zero (also for
    subnormal results); then the sum is rounded to odd instead. NaN has zero low bits too, so it is looked for
    on that side only.
    """
    p = a.view(F4).astype(F8) * b.view(F4).astype(F8)
    c = c.view(F4).astype(F8)
    s = p + c
    bits = s.view(U8)
    if every(bits & _LOW28.like(bits)):
        return s.astype(F4).view(U4)
    return raw32(_odd_sum(p, c, s).astype(F4))


def _sum_directed(p: Array, c: Array, mode: str) -> Array:
    """p + c (float64, exact terms) rounded to float32 as mode says."""
    s = p + c
    t = s - p
    e = (p - (s - t)) + (c - t)
    exact = not np.count_nonzero(e)
    r = round_f32(s, None if exact else np.where(np.isfinite(s), e, 0.0), mode)
    if mode == "rm" and not every(s):  # an exact zero is -0 unless both terms are +0
        r = np.where((s == 0) & (np.signbit(p) | np.signbit(c)), F4.type(-0.0), r)
    return r


def _directed32(op: str, mode: str) -> Function:
    def add(a: Array, b: Array) -> Array:
        return _sum_directed(a.astype(F8), b.astype(F8), mode)

    def sub(a: Array, b: Array) -> Array:
        return _sum_directed(a.astype(F8), np.negative(b.astype(F8)), mode)

    def mul(a: Array, b: Array) -> Array:
        return round_f32(np.multiply(a, b, dtype=F8), None, mode)

    def fma(a: Array, b: Array, c: Array) -> Array:
        return _sum_directed(np.multiply(a, b, dtype=F8), c.astype(F8), mode)

    def div(a: Array, b: Array) -> Array:
        x, y = a.astype(F8), b.astype(F8)
        q = x / y
        # The remainder x - q y, from Dekker's exact product, tells on which side of q the quotient lies.
        h, low = _exact_product(q, y)
        rest = (x - h) - low
        rest = np.where(np.isfinite(q) & np.isfinite(rest), rest, 0.0)
        tiny = np.spacing(np.abs(q)) * 0.25  # smaller than any other gap to a float32
        return round_f32(q, np.sign(rest) * np.sign(y) * np.where(np.isfinite(tiny), tiny, 0), mode)

    def sqrt(a: Array) -> Array:
        x = a.astype(F8)
        q = np.sqrt(x)
        h, low = _exact_product(q, q)
        rest = (x - h) - low
        rest = np.where(np.isfinite(q) & np.isfinite(rest), rest, 0.0)
        return round_f32(q, np.sign(rest) * np.spacing(np.where(np.isfinite(q), q, 1.0)) * 0.25, mode)

    table: dict[str, Function] = {"add": add, "sub": sub, "mul": mul, "fma": fma, "div": div, "sqrt": sqrt}
    return table[op]


def _exact_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b = high + low exactly (Veltkamp and Dekker), for exponents away from the ends of float64."""
    split = 134217729.0
    ta, tb = a * split, b * split
    ah = ta - (ta - a)
    bh = tb - (tb - b)
    al, bl = a - ah, b - bh
    h = a * b
    return h, ((ah * bh - h) + ah * bl + al * bh) + al * bl


_NEAREST32: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: _fma32(a.view(U4), b.view(U4), c.view(U4)).view(F4),
    "div": np.divide,
    "sqrt": np.sqrt,
}


def _saturate(r: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes +0."""
    return np.where(r > 0, np.minimum(r, r.dtype.type(1)), r.dtype.type(0))


def arithmetic32(op: str, mode: str, ftz: bool, sat: bool) -> Function:
    """add sub mul fma div sqrt of float32 on raw registers."""
    if op == "fma" and mode == "rn" and not ftz and not sat:
        return _fma32
    core = _NEAREST32[op] if mode == "rn" else _directed32(op, mode)
    if not ftz and not sat:
        if op in ("add", "sub", "mul") and mode == "rn":
            return lambda a, b: raw32(core(a.view(F4), b.view(F4)))
        return lambda *x: raw32(core(*[v.view(F4) for v in x]))

    def run(*operands: Array) -> Array:
        x = [v.view(F4) for v in operands]
        if ftz:
            x = [flush(v) for v in x]
        r = core(*x)
        if ftz:
            r = flush(r)
        return raw32(_saturate(r) if sat else r)

    return run


# --- float16 and bfloat16 ---


def _narrow(op: str, type_: str, mode: str) -> Function:
    """add sub mul fma, to nearest even (fma of bf16 in every mode), on raw 16-bit registers.

    float32 has more than twice the bits plus two of either type, so that rounding add, sub and mul twice is
    innocuous; fma, and bf16 products in float32's subnormal range, go through float64.
    """
    if op == "fma":

        def fma(a: Array, b: Array, c: Array) -> Array:
            x, y, z = (values(v, type_).astype(F8) for v in (a, b, c))
            p = x * y
            s = p + z
            s = round_to_odd(s, two_sum_error(p, z, s))
            if type_ == "f16":
                return raw16(s.astype(F2))
            r = encode(s, "bf16", mode)
            if mode == "rm":  # an exact zero is -0 unless both terms are +0
                r = np.where((s == 0) & (np.signbit(p) | np.signbit(z)), U2.type(0x8000), r)
            return r

        return fma
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    if type_ == "f16":
        return lambda a, b: raw16(ufunc(a.view(F2), b.view(F2)))
    if op == "mul":

        def mul(a: Array, b: Array) -> Array:
            x, y = bf16_to_f32(a), bf16_to_f32(b)
            r = x * y
            if ((np.abs(r) < F4.type(2.0**-120)) & (r != 0)).any():
                return encode(np.multiply(x, y, dtype=F8), "bf16")
            return bf16_from_f32(r)

        return mul
    return lambda a, b: bf16_from_f32(ufunc(bf16_to_f32(a), bf16_to_f32(b)))


def arithmetic16(op: str, type_: str, ftz: bool, sat: bool, relu: bool, mode: str) -> Function:
    core = _narrow(op, type_, mode)
    if not (ftz or sat or relu):
        return core
    zero, one = U2.type(0), U2.type(0x3C00 if type_ == "f16" else 0x3F80)

    def run(*operands: Array) -> Array:
        r = core(*[flush_raw(v, type_) for v in operands] if ftz else operands)
        if ftz:
            r = flush_raw(r, type_)
        nan = (r & U2.type(0x7FFF)) == NAN16
        if sat:
            r = np.where(nan, zero, np.where(r & U2.type(0x8000), zero, np.minimum(r, one)))
        if relu:
            r = np.where(((r & U2.type(0x8000)) != 0) & ~nan, zero, r)
        return r

    return run


# --- float64 ---


def _exact64(op: str, mode: str) -> Function:
    """Correctly rounded float64 by rational arithmetic, lane by lane: slow, and rare in kernels."""

    def one(*x: float) -> float:
        if not all(map(math.isfinite, x)):
            return _ieee64(op, *x)
        q = [Fraction(v) for v in x]
        if op == "div" and x[1] == 0 or op == "sqrt" and x[0] <= 0:
            return _ieee64(op, *x)
        if op == "sqrt":
            r = math.sqrt(x[0])
            compare = q[0] - Fraction(r) ** 2
        else:
            if op == "add":
                exact = q[0] + q[1]
            elif op == "sub":
                exact = q[0] - q[1]
            elif op == "mul":
                exact = q[0] * q[1]
            elif op == "fma":
                exact = q[0] * q[1] + q[2]
            else:
                exact = q[0] / q[1]
            if exact == 0:
                r = _ieee64(op, *x)  # the sign of a zero
                if op in ("add", "sub", "fma") and mode == "rm":
                    first = math.copysign(1, x[0]) * (math.copysign(1, x[1]) if op == "fma" else 1)
                    second = math.copysign(1, x[-1]) * (-1 if op == "sub" else 1)
                    r = -0.0 if min(first, second) < 0 else 0.0
                return r
            try:
                r = float(exact)
            except OverflowError:
                r = math.inf if exact > 0 else -math.inf
            if math.isinf(r):
                toward_zero = mode == "rz" or mode == "rm" and exact > 0 or mode == "rp" and exact < 0
                return math.nextafter(r, 0) if toward_zero else r
            if r == 0:
                r = 0.0 if exact > 0 else -0.0
            compare = exact - Fraction(r)
        if mode == "rn" or compare == 0:
            return r
        if mode == "rm" or mode == "rz" and (r > 0 or r == 0 and compare > 0):
            return math.nextafter(r, -math.inf) if compare < 0 else r
        return math.nextafter(r, math.inf) if compare > 0 else r

    def run(*operands: Array) -> Array:
        b = np.broadcast_arrays(*operands)
        lanes = zip(*[v.ravel().tolist() for v in b], strict=True)
        return np.array([one(*lane) for lane in lanes], F8).reshape(b[0].shape)

    return run


def _ieee64(op: str, *x: float) -> float:
    v = [np.float64(f) for f in x]
    with np.errstate(all="ignore"):
        if op == "fma":
            return float(v[0] * v[1] + v[2])
        if op == "sqrt":
            return float(np.sqrt(v[0]))
        return float({"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op](*v))


def arithmetic64(op: str, mode: str) -> Function:
    nearest: dict[str, Function] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "sqrt": np.sqrt,
    }
    core = nearest[op] if mode == "rn" and op in nearest else _exact64(op, mode)
    return lambda *x: core(*[v.view(F8) for v in x]).view(U8)


# --- builders ---

_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _ftz(form: Form, type_: str) -> bool:
    """Whether .ftz is there; it is for f32 and f16."""
    ftz = form.take("ftz")
    if ftz and type_ not in ("f32", "f16"):
        form.fail(".ftz is for f32 and f16")
    return ftz


def _arithmetic(form: Form) -> Function:
    """add sub mul fma (and mad, which is fma for floats) of every scalar type, and the mixed add/sub/fma into
    float32."""
    op = "fma" if form.op == "mad" else form.op
    type_ = form.type()
    if form.op == "mad" and type_ not in ("f32", "f64"):
        form.fail()
    mode = form.maybe(*_ROUNDINGS)
    if op == "fma" and mode is None:
        form.fail("needs a rounding mode")
    mode = mode or "rn"
    ftz, sat = form.take("ftz"), form.take("sat")
    if form.packed and type_ == "f32" and sat:
        form.fail()
    if type_ == "f64":
        if ftz or sat:
            form.fail()
        return arithmetic64(op, mode)
    if type_ == "f32":
        run = arithmetic32(op, mode, ftz, sat)
        if len(form.types) == 1:
            return run
        if op == "mul" or ftz:
            form.fail()
        narrow = form.type()
        if narrow not in ("f16", "bf16"):
            form.fail()

        def widen(raw: Array) -> Array:
            return values(raw, narrow).astype(F4).view(U4)

        # The last operand is float32; the others are 16-bit.
        return lambda *x: run(*[widen(v) for v in x[:-1]], x[-1])
    relu = op == "fma" and form.take("relu")
    if type_ == "bf16" and (ftz or sat) or sat and relu:
        form.fail()
    if mode != "rn" and (op, type_) != ("fma", "bf16"):
        form.fail()
    return arithmetic16(op, type_, ftz, sat, relu, mode)


def _division(form: Form) -> Function:
    """div: .approx and .full are modelled as the correctly rounded quotient (their bound is 2 ulp), with the
    special cases of .approx."""
    type_ = form.type()
    ftz = _ftz(form, type_)
    kind = form.maybe("approx", "full")
    if kind is None:
        mode = form.one_of(*_ROUNDINGS)
        if type_ == "f64":
            return arithmetic64("div", mode)
        if type_ != "f32":
            form.fail()
        return arithmetic32("div", mode, ftz, False)
    if type_ != "f32":
        form.fail()
    exact = arithmetic32("div", "rn", ftz, False)
    if kind == "full":
        return exact
    big = F4.type(2.0**126)

    def run(a: Array, b: Array) -> Array:
        r = exact(a, b)
        x, y = a.view(F4), np.abs(b.view(F4))
        over = (y > big) & np.isfinite(y)
        if over.any():
            sign = (a ^ b) & U4.type(0x80000000)
            r = np.where(over, np.where(np.isinf(x) | np.isnan(x), NAN32, sign), r)
        return r

    return run


def _square_root(form: Form) -> Function:
    """sqrt: .approx is modelled as the correctly rounded root."""
    type_ = form.type()
    ftz = _ftz(form, type_)
    approx = form.take("approx")
    mode = "rn" if approx else form.one_of(*_ROUNDINGS)
    if type_ == "f64" and not approx:
        return arithmetic64("sqrt", mode)
    if type_ != "f32":
        form.fail()
    return arithmetic32("sqrt", mode, ftz, False)


def _minmax(form: Form) -> Function:
    """-0 is smaller than +0. A single NaN operand is ignored unless .NaN is given; two NaNs, or one with
    .NaN, give the canonical NaN."""
    type_ = form.type()
    ftz, nan, xorsign = _ftz(form, type_), form.take("NaN"), form.take("xorsign")
    absolute = form.take("abs")
    if absolute != xorsign and type_ != "f32" or (xorsign and not absolute):
        form.fail()
    if type_ == "f64" and (nan or absolute):
        form.fail()
    largest = form.op == "max"
    if type_ == "f32" and not xorsign and not absolute:
        ufunc = (np.maximum if largest else np.minimum) if nan else (np.fmax if largest else np.fmin)

        def fast(*operands: Array) -> Array:
            r = operands[0]
            x = r.view(F4)
            if ftz:
                x = flush(x)
            for other in operands[1:]:
                y = other.view(F4)
                if ftz:
                    y = flush(y)
                m = ufunc(x, y)
                if not every(m):  # zeros: their signs count
                    signs = np.signbit(x) & np.signbit(y) if largest else np.signbit(x) | np.signbit(y)
                    both = (x == 0) & (y == 0)
                    m = np.where(both, np.where(signs, F4.type(-0.0), F4.type(0)), m)
                x = m
            return raw32(x)

        return fast

    unsigned = UNSIGNED[type_]
    sign = unsigned.type(SIGN[type_])
    infinity = unsigned.type(INFINITY[type_])
    canonical = unsigned.type({"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48}[type_])

    def order(raw: Array) -> Array:
        """Unsigned integers in the order of the floats."""
        return np.where(raw & sign, ~raw, raw | sign)

    def two(a: Array, b: Array) -> Array:
        x, y = (a & ~sign, b & ~sign) if absolute else (a, b)
        a_nan, b_nan = (x & ~sign) > infinity, (y & ~sign) > infinity
        take_a = order(x) >= order(y) if largest else order(x) <= order(y)
        r = np.where(take_a, x, y)
        r = np.where(a_nan, y, np.where(b_nan, x, r))
        if xorsign:
            r = (r & ~sign) | ((a ^ b) & sign)
        return np.where((a_nan | b_nan) if nan else (a_nan & b_nan), canonical, r)

    def run(*operands: Array) -> Array:
        x = [flush_raw(v, type_) for v in operands] if ftz else list(operands)
        r = two(x[0], x[1])
        for more in x[2:]:
            r = two(r, more)
        return r

    return run


def _sign_bit(form: Form) -> Function:
    """abs, neg: the sign bit, and the canonical NaN (though an assembler may choose code that keeps its payload)."""
    type_ = form.type()
    ftz = _ftz(form, type_)
    unsigned = UNSIGNED[type_]
    sign = Constant(SIGN[type_] if form.op == "neg" else SIGN[type_] - 1, unsigned)
    change: Function = np.bitwise_xor if form.op == "neg" else np.bitwise_and
    infinity = unsigned.type(INFINITY[type_])
    magnitude = unsigned.type(SIGN[type_] - 1)

    def run(a: Array) -> Array:
        r = change(flush_raw(a, type_) if ftz else a, sign.like(a))
        if type_ == "f32":
            return raw32(r.view(F4))
        if type_ == "f64":
            return r
        return np.where((r & magnitude) > infinity, NAN16, r)

    return run


def _copysign(form: Form) -> Function:
    """copysign d, a, b: the sign of a on the magnitude of b."""
    type_ = form.type()
    if type_ not in ("f32", "f64"):
        form.fail()
    sign = UNSIGNED[type_].type(SIGN[type_])
    return lambda a, b: (a & sign) | (b & ~sign)


def _testp(form: Form) -> Function:
    """Zeros count as normal."""
    what = form.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    type_ = form.type()
    if type_ not in ("f32", "f64"):
        form.fail()
    tiny = np.finfo(F4 if type_ == "f32" else F8).tiny

    def run(a: Array) -> Array:
        x = values(a, type_)
        if what == "finite":
            return np.isfinite(x)
        if what == "infinite":
            return np.isinf(x)
        if what == "number":
            return x == x
        if what == "notanumber":
            return x != x
        subnormal = (np.abs(x) < tiny) & (x != 0)
        return subnormal if what == "subnormal" else np.isfinite(x) & ~subnormal

    return run


_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
# The negation of "ordered and opposite" is "unordered or this".
_UNORDERED = {
    "equ": np.not_equal,
    "ltu": np.greater_equal,
    "leu": np.greater,
    "gtu": np.less_equal,
    "geu": np.less,
}


def comparison(op: str, type_: str, ftz: bool) -> Function:
    """a op b as a predicate. Ordered comparisons are false with a NaN, those ending in u are true."""
    if op in ("num", "nan"):
        both: Function = lambda x, y: (x == x) & (y == y)  # noqa: E731
        compare: Function = both if op == "num" else lambda x, y: ~both(x, y)
    elif op in ("eq", "lt", "le", "gt", "ge"):
        compare = _ORDERED[op]
    elif op == "ne":
        compare = lambda x, y: (x < y) | (x > y)  # noqa: E731
    elif op == "neu":
        compare = np.not_equal
    elif op == "equ":
        compare = lambda x, y: ~((x < y) | (x > y))  # noqa: E731
    elif op in _UNORDERED:
        opposite = _UNORDERED[op]
        compare = lambda x, y: ~opposite(x, y)  # noqa: E731
    else:
        raise UnsupportedInstruction(f"comparison .{op}.{type_}")
    if ftz:
        return lambda a, b: compare(values(flush_raw(a, type_), type_), values(flush_raw(b, type_), type_))
    return lambda a, b: compare(values(a, type_), values(b, type_))


BUILDERS: dict[str, Callable[[Form], Function]] = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "mad": _arithmetic,
    "div": _division,
    "sqrt": _square_root,
    "min": _minmax,
    "max": _minmax,
    "abs": _sign_bit,
    "neg": _sign_bit,
    "copysign": _copysign,
    "testp": _testp,
}
