"""Floating-point formats narrower than float64, and correct rounding into them.

Exact values travel as float64. A sum that float64 cannot hold goes through `round_to_odd` first: with at
least two bits more than the target, rounding to odd and then to the target is the same as rounding once
(Boldo and Melquiond).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

F2: np.dtype[Any]
F4: np.dtype[Any]
F8: np.dtype[Any]
F2, F4, F8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
U1: np.dtype[Any]
U2: np.dtype[Any]
U4: np.dtype[Any]
U8: np.dtype[Any]
U1, U2, U4, U8 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)


class UnsupportedInstruction(ValueError):
    """An instruction form that is not modelled, or not valid PTX; the message names the form."""


@dataclass(frozen=True, slots=True)
class Format:
    """Sign, exponent and mantissa of a small binary format."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    top: int  # raw bits of the largest finite value
    infinity: int | None  # raw bits of +inf, None where the format has none
    nan: int | None  # raw bits of the NaN that conversions produce, None where the format has none
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def raw(self) -> np.dtype[Any]:
        return U1 if self.bits <= 8 else U2 if self.bits <= 16 else U4

    @property
    def lowest(self) -> int:
        """Exponent of the least significant bit of a subnormal."""
        return 1 - self.bias - self.mantissa


FORMATS = {
    f.name: f
    for f in (
        Format("f16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
        Format("bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
        Format("f32", 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
        Format("e4m3", 4, 3, 7, 0x7E, None, 0x7F),
        Format("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F),
        Format("e2m3", 2, 3, 1, 0x1F, None, None),
        Format("e3m2", 3, 2, 3, 0x1F, None, None),
        Format("e2m1", 2, 1, 1, 0x7, None, None),
    )
}


class Constant:
    """One value as a row as long as an operand's: NumPy adds two rows three times as fast as a row and a
    scalar."""

    def __init__(self, value: float, dtype: np.dtype[Any]) -> None:
        self.value, self.dtype = value, dtype
        self._rows: dict[int, Array] = {}

    def like(self, x: Array) -> Array:
        shape = x.shape
        n = shape[-1] if shape else 1
        row = self._rows.get(n)
        if row is None:
            row = self._rows[n] = np.full(n, self.value, self.dtype)
            row.setflags(write=False)
        return row


_TINY = {F4: Constant(2.0**-126, F4), F8: Constant(2.0**-1022, F8), F2: Constant(2.0**-14, F2)}


def flush(x: Array) -> Array:
    """Subnormals become zero of the same sign (.ftz)."""
    return x * (np.abs(x) >= _TINY[x.dtype].like(x)).astype(x.dtype)


def has_nan(x: Array) -> bool:
    """Whether any element is NaN: a sum of squares is NaN exactly then, and BLAS is the quickest reduction
    there is."""
    d = x.dot(x) if x.ndim == 1 else np.vdot(x, x)
    return bool(d != d)


def every(x: Array) -> bool:
    """Whether all elements are nonzero: as x.all(), in a third of the time."""
    return np.count_nonzero(x) == x.size


NAN32 = np.uint32(0x7FFFFFFF)
NAN16 = np.uint16(0x7FFF)


def raw32(r: Array) -> Array:
    """float32 results as raw registers; every NaN is the canonical one, as the hardware returns it."""
    if has_nan(r):
        return np.where(r != r, NAN32, r.view(U4))
    return r.view(U4)


def canonical_nan(row: Array, where: Array | None = None) -> None:
    """The same in place, on the lanes in `where`."""
    d = row.dot(row)
    if d != d:
        bad = row != row
        np.putmask(row.view(U4), bad if where is None else bad & where, NAN32)


def raw16(r: Array) -> Array:
    """float16 results as raw registers with the canonical NaN."""
    u = r.view(U2)
    nan = r != r
    return np.where(nan, NAN16, u) if nan.any() else u


def two_sum_error(a: Array, b: Array, s: Array) -> Array:
    """a + b - s exactly, for s the rounded float64 sum; 0 where the sum is infinite or NaN."""
    t = s - a
    e = (a - (s - t)) + (b - t)
    return np.where(np.isfinite(s), e, 0.0)


def round_to_odd(s: Array, error: Array) -> Array:
    """The float64 next to the exact value s + error whose last bit is 1, unless s is already exact."""
    bits = s.view(np.int64)
    # An even mantissa moves one step towards the error: away from zero when both have the same sign.
    step = np.where((error > 0) == (s > 0), 1, -1)
    odd = np.where((error != 0) & ((bits & 1) == 0), bits + step, bits)
    return odd.view(F8)


def round_f32(s: Array, error: Array | None, mode: str) -> Array:
    """The exact value s + error rounded to float32. A zero keeps the sign of s."""
    if mode == "rn":
        return (s if error is None else round_to_odd(s, error)).astype(F4)
    r = s.astype(F4)
    rest = s - r  # exact: r is within half a float32 ulp of s (or both are zero, or r overflowed)
    if error is not None:
        rest = rest + error  # the sign is right: rest is 0, or no smaller than an ulp of s
    if mode == "rm":
        wrong, towards = rest < 0, F4.type(-np.inf)
    elif mode == "rp":
        wrong, towards = rest > 0, F4.type(np.inf)
    else:
        wrong, towards = (rest < 0) & (s > 0) | (rest > 0) & (s < 0), F4.type(0)
    return np.where(wrong, np.nextafter(r, towards), r)


_ROUND: dict[str, Callable[..., Any]] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda x: np.trunc(x + np.copysign(0.5, x)),
}


def encode(values: Array, name: str, mode: str = "rn", satfinite: bool = False) -> Array:
    """Raw bits of float64 values rounded to a format (exact up to float64; odd-rounded values round
    correctly).

    Overflow gives infinity or the largest finite value as the rounding mode says, the largest with satfinite,
    and NaN in a format without infinity. NaN in a format without NaN gives the largest positive value, as the
    manual has it.
    """
    f = FORMATS[name]
    v = np.asarray(values, F8)
    nan = np.isnan(v)
    v = np.where(nan, 0.0, v)
    infinite = np.isinf(v)
    finite = np.where(infinite, 0.0, v)
    _, e = np.frexp(finite)
    q = np.where(finite == 0, f.lowest, np.maximum(e - 1 - f.mantissa, f.lowest))
    n = np.abs(_ROUND[mode](np.ldexp(finite, -q)))
    bits = ((q - f.lowest).astype(np.int64) << f.mantissa) + n.astype(np.int64)
    negative = np.signbit(v)
    over = (bits > f.top) & ~infinite
    if satfinite:
        bits = np.where(over | infinite, f.top, bits)
    else:
        none = f.infinity if f.infinity is not None else f.nan if f.nan is not None else f.top
        to_top = {"rn": False, "rna": False, "rz": True, "rm": ~negative, "rp": negative}[mode]
        bits = np.where(infinite | over, np.where(over & to_top, f.top, none), bits)
    bits = np.where(negative, bits | (1 << (f.bits - 1)), bits)
    bits = np.where(nan, f.top if f.nan is None else f.nan, bits)
    return bits.astype(f.raw)


_S16, _ONE, _HALF = Constant(16, U4), Constant(1, U4), Constant(0x7FFF, U4)


def bf16_words(u: Array) -> Array:
    """Raw float32 words, rounded to bf16 in their upper halves: half an ulp is added, less 1 if the value is
    even."""
    r = u >> _S16.like(u)
    r &= _ONE.like(u)
    r += _HALF.like(u)
    r += u
    return r


def bf16_from_f32(x: Array) -> Array:
    """float32 to bf16, nearest even, raw uint16."""
    r = (bf16_words(x.view(U4)) >> np.uint32(16)).astype(U2)
    return np.where(x != x, NAN16, r) if has_nan(x) else r


def bf16_to_f32(raw: Array) -> Array:
    return (raw.astype(U4) << _S16.like(raw)).view(F4)


@cache
def _table(name: str) -> NDArray[np.float32]:
    """Value of every code of an 8-bit or smaller format; higher bits of the byte are ignored."""
    codes = np.arange(256)
    if name == "ue8m0":
        out = np.ldexp(1.0, codes - 127)
        out[255] = np.nan
    elif name in ("s8", "u8"):
        out = codes.astype(np.int8 if name == "s8" else np.uint8).astype(F8)
    elif name in FORMATS and FORMATS[name].bits <= 8:
        f = FORMATS[name]
        magnitude = codes & ((1 << (f.bits - 1)) - 1)
        field = magnitude >> f.mantissa
        fraction = magnitude & ((1 << f.mantissa) - 1)
        out = np.where(
            field > 0,
            np.ldexp(1.0 + fraction / (1 << f.mantissa), field - f.bias),
            np.ldexp(fraction / (1 << f.mantissa), 1 - f.bias),
        )
        if f.infinity is not None:
            out[magnitude == f.infinity] = np.inf
            out[magnitude > f.infinity] = np.nan
        elif f.nan is not None:
            out[magnitude == f.nan] = np.nan
        out = np.where(codes >> (f.bits - 1) & 1, -out, out)
    else:
        raise UnsupportedInstruction(f"element type {name}")
    table = out.astype(F4)
    table.setflags(write=False)
    return table


def to_float32(raw: Array, type_: str) -> NDArray[np.float32]:
    """Exact float32 values of tensor-core elements: raw is unsigned, one element each (uint8 for 8-bit and
    smaller types).

    type_: f16 bf16 tf32 f32 e4m3 e5m2 e2m3 e3m2 e2m1 ue8m0 s8 u8. A tf32 element is a 32-bit word whose low
    13 bits are ignored.
    """
    if type_ == "bf16":
        return bf16_to_f32(raw)
    if type_ == "f16":
        return raw.view(F2).astype(F4)
    if type_ == "f32":
        return raw.view(F4)
    if type_ == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(F4)
    return _table(type_)[raw]


def from_float32(values: Array, type_: str) -> Array:
    """Round to nearest even to f16, bf16 or f32 and return the raw bits."""
    if type_ == "f32":
        return raw32(values)
    if type_ == "f16":
        return raw16(values.astype(F2))
    if type_ == "bf16":
        return bf16_from_f32(values)
    raise UnsupportedInstruction(f"rounding float32 to {type_}")
