"""Arithmetic by rationals: the reference that the vectorised functions are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

# name -> (exponent bits, mantissa bits, has infinity)
FORMATS = {
    "f16": (5, 10),
    "bf16": (8, 7),
    "f32": (8, 23),
    "f64": (11, 52),
    "e5m2": (5, 2),
}
NAN = "nan"


def width(fmt: str) -> int:
    e, m = FORMATS[fmt]
    return 1 + e + m


def decode(bits: int, fmt: str) -> Fraction | float:
    """A Fraction, or a float for infinities, NaN and -0."""
    e, m = FORMATS[fmt]
    sign = -1 if bits >> (e + m) & 1 else 1
    field, fraction = bits >> m & ((1 << e) - 1), bits & ((1 << m) - 1)
    bias = (1 << (e - 1)) - 1
    if field == (1 << e) - 1:
        return math.nan if fraction else sign * math.inf
    if field == 0 and fraction == 0:
        return sign * 0.0
    if field == 0:
        return sign * Fraction(fraction) * Fraction(2) ** (1 - bias - m)
    return sign * Fraction((1 << m) + fraction) * Fraction(2) ** (field - bias - m)


def round_to(q: Fraction, fmt: str, mode: str) -> int:
    """Bits of a non-zero rational rounded to a format with infinities."""
    e, m = FORMATS[fmt]
    bias = (1 << (e - 1)) - 1
    sign = 1 if q < 0 else 0
    a = abs(q)
    exponent = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** exponent > a:
        exponent -= 1
    quantum = max(exponent, 1 - bias) - m
    scaled = a / Fraction(2) ** quantum
    low = scaled.numerator // scaled.denominator
    rest = scaled - low
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low & 1 == 1),
        "rz": False,
        "rm": bool(sign) and rest > 0,
        "rp": not sign and rest > 0,
        "rna": rest >= Fraction(1, 2),
    }[mode]
    n = low + up
    bits = ((quantum - (1 - bias - m)) << m) + n
    infinity = ((1 << e) - 1) << m
    if bits >= infinity:
        clamp = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        bits = infinity - 1 if clamp else infinity
    return bits | sign << (e + m)


def canonical(fmt: str) -> int:
    return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}[fmt]


def operate(op: str, operands: tuple[int, ...], fmt: str, mode: str) -> int | str:
    """The IEEE result of an operation on raw operands, or NAN."""
    x = [decode(b, fmt) for b in operands]
    if any(isinstance(v, float) and math.isnan(v) for v in x):
        return NAN
    sign_bit = 1 << (width(fmt) - 1)
    infinity = ((1 << FORMATS[fmt][0]) - 1) << FORMATS[fmt][1]

    def sign(v: Fraction | float) -> int:
        return 1 if (math.copysign(1, v) < 0 if isinstance(v, float) else v < 0) else 0

    def is_infinite(v: Fraction | float) -> bool:
        return isinstance(v, float) and math.isinf(v)

    def product(a: Fraction | float, b: Fraction | float) -> Fraction | float | None:
        s = sign(a) ^ sign(b)
        if is_infinite(a) or is_infinite(b):
            return None if a == 0 or b == 0 else (-math.inf if s else math.inf)
        if a == 0 or b == 0:
            return -0.0 if s else 0.0
        return Fraction(a) * Fraction(b)

    def total(a: Fraction | float, b: Fraction | float) -> Fraction | float | None:
        if is_infinite(a) or is_infinite(b):
            if is_infinite(a) and is_infinite(b) and a != b:
                return None
            return a if is_infinite(a) else b
        s = Fraction(a) + Fraction(b)
        if s == 0:
            if a == 0 and b == 0 and sign(a) == sign(b):
                return -0.0 if sign(a) else 0.0
            return -0.0 if mode == "rm" else 0.0
        return s

    r: Fraction | float | None
    if op == "add":
        r = total(x[0], x[1])
    elif op == "sub":
        r = total(x[0], -x[1])
    elif op == "mul":
        r = product(x[0], x[1])
    elif op == "fma":
        p = product(x[0], x[1])
        r = None if p is None else total(p, x[2])
    elif op == "div":
        s = sign(x[0]) ^ sign(x[1])
        if is_infinite(x[0]):
            r = None if is_infinite(x[1]) else (-math.inf if s else math.inf)
        elif is_infinite(x[1]):
            r = -0.0 if s else 0.0
        elif x[1] == 0:
            r = None if x[0] == 0 else (-math.inf if s else math.inf)
        else:
            r = (-0.0 if s else 0.0) if x[0] == 0 else Fraction(x[0]) / Fraction(x[1])
    elif op == "sqrt":
        if x[0] == 0 or x[0] == math.inf:
            r = x[0]
        elif x[0] < 0:
            r = None
        else:
            # 2^200 times finer than any format: an exact root stays exact, any other is on the right side.
            q = Fraction(x[0])
            scale = 1 << 1400
            root = math.isqrt(q.numerator * scale * scale // q.denominator)
            exact = Fraction(root, scale) ** 2 == q
            r = Fraction(root, scale) if exact else Fraction(2 * root + 1, 2 * scale)
    else:
        raise AssertionError(op)
    if r is None:
        return NAN
    if isinstance(r, float):
        return (infinity if math.isinf(r) else 0) | (sign_bit if math.copysign(1, r) < 0 else 0)
    return round_to(r, fmt, mode)


def samples(fmt: str, n: int, seed: int) -> np.ndarray:
    """Raw values: specials, subnormals, neighbours in exponent, short mantissas (ties), and anything."""
    rng = np.random.default_rng(seed)
    e, m = FORMATS[fmt]
    bits = width(fmt)
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64, 8: np.uint8}[bits]
    any_ = rng.integers(0, 1 << 62, n, dtype=np.uint64) << np.uint64(2) | rng.integers(
        0, 4, n, dtype=np.uint64
    )
    any_ &= np.uint64((1 << bits) - 1)
    bias = (1 << (e - 1)) - 1
    near = (bias + rng.integers(-3, 4, n)).astype(np.uint64) << np.uint64(m)
    near |= any_ & np.uint64((1 << m) - 1)
    near |= any_ & np.uint64(1 << (bits - 1))
    short = near & ~np.uint64((1 << (m - 2)) - 1)
    tiny = any_ & np.uint64((1 << (bits - 1)) | ((1 << (m + 1)) - 1))
    specials = [
        0,
        1,
        (1 << m) - 1,
        1 << m,
        ((1 << e) - 1) << m,
        (((1 << e) - 1) << m) - 1,
        (((1 << e) - 1) << m) + 1,
    ]
    special = np.array(specials, np.uint64)[rng.integers(0, len(specials), n)]
    special |= any_ & np.uint64(1 << (bits - 1))
    kind = rng.choice(6, n, p=[0.25, 0.35, 0.15, 0.1, 0.1, 0.05])
    out = np.choose(kind, [any_, near, short, tiny, special, near])
    return out.astype(dtype)


def check(
    function: Callable[..., np.ndarray], op: str, operands: list[np.ndarray], fmt: str, mode: str
) -> None:
    """Every lane bit for bit; NaN as the canonical one (any NaN for f64)."""
    with np.errstate(all="ignore"):
        got = function(*operands)
    assert got.dtype == operands[0].dtype
    for lane in range(operands[0].size):
        raw = tuple(int(o[lane]) for o in operands)
        want = operate(op, raw, fmt, mode)
        have = int(got[lane])
        inputs = [hex(b) for b in raw]
        what = (
            f"{op}.{mode}.{fmt} {inputs}: got {have:#x}, want {want if isinstance(want, str) else hex(want)}"
        )
        if want == NAN:
            if fmt == "f64":
                assert math.isnan(float(got[lane : lane + 1].view(np.float64)[0])), what
            else:
                assert have == canonical(fmt), what
        else:
            assert have == want, what
