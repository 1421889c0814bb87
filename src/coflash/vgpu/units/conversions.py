"""cvt and cvt.pack on raw registers (PTX manual, "Data Movement and Conversion Instructions: cvt")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats, integers
from .form import Form
from .formats import (
    F2,
    F4,
    F8,
    FORMATS,
    NAN16,
    NAN32,
    U1,
    U2,
    U4,
    U8,
    Array,
    bf16_from_f32,
    bf16_to_f32,
    bf16_words,
    encode,
    flush,
    has_nan,
    raw16,
    raw32,
    round_f32,
    round_to_odd,
    to_float32,
    two_sum_error,
)

Function = Callable[..., Any]

_QUIET = np.uint64(1 << 51)
_FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_NARROW_PAIRS = {"e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2"}


def _cvt(form: Form) -> Function:
    target, source = form.type(), form.type()
    if form.take("rs"):
        form.fail("stochastic rounding is not modelled")
    if target in ("f16x2", "bf16x2") and source == "f32":
        return _pair_from_f32(form, target[:-2])
    if target in _NARROW_PAIRS:
        return _narrow_pair(form, target[:-2], source)
    if source in _NARROW_PAIRS or source == "ue8m0x2":
        return _widen_pair(form, target, source[:-2])
    if target == "tf32":
        return _tf32(form, source)
    if floats.is_float(target) and floats.is_float(source):
        return _float_to_float(form, target, source)
    if floats.is_float(target) and integers.is_integer(source):
        return _integer_to_float(form, target, source)
    if integers.is_integer(target) and floats.is_float(source):
        return _float_to_integer(form, target, source)
    if integers.is_integer(target) and integers.is_integer(source):
        return _integer_to_integer(form, target, source)
    form.fail()


def _operand(raw: Array, type_: str) -> Array:
    """The source register chopped to the type's width (registers may be wider than a source type)."""
    unsigned = integers.UNSIGNED[integers.width(type_)]
    raw = np.asarray(raw)
    return raw if raw.dtype == unsigned else raw.astype(unsigned)


def _register(values: Array, type_: str) -> Array:
    """Numbers of a type to a raw register; 8-bit results are extended to 16 bits, the smallest register."""
    n = integers.width(type_)
    if n == 8:
        return values.astype(np.int16).view(U2) if type_[0] == "s" else values.astype(U2)
    return values.view(integers.UNSIGNED[n])


def _integer_to_integer(form: Form, target: str, source: str) -> Function:
    saturate = form.take("sat")
    to = integers.SIGNED if target[0] == "s" else integers.UNSIGNED
    dtype = to[integers.width(target)]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)

    def run(a: Array) -> Array:
        x = integers.values(_operand(a, source), source)
        if saturate:
            most = min(high, int(np.iinfo(x.dtype).max))
            x = np.minimum(x, x.dtype.type(most))
            x = np.maximum(x, x.dtype.type(max(low, int(np.iinfo(x.dtype).min))))
        return _register(x.astype(dtype), target)

    return run


def _integer_to_float(form: Form, target: str, source: str) -> Function:
    mode = form.one_of(*_FLOAT_ROUNDINGS[:4])
    saturate = form.take("sat")
    if form.take("ftz") and target != "f32":
        form.fail()
    wide = integers.width(source) == 64

    def run(a: Array) -> Array:
        x = integers.values(_operand(a, source), source)
        if not wide or mode == "rn" and target in ("f32", "f64"):
            if target == "f32" and mode == "rn" and not saturate:
                return x.astype(F4).view(U4)
            v, error = x.astype(F8), None
            if wide and target == "f32":
                v = x.astype(F4).astype(F8)  # rounded once by the host
        else:
            high = (x >> x.dtype.type(32)).astype(F8) * 2.0**32
            low = (x & x.dtype.type(0xFFFFFFFF)).astype(F8)
            v = high + low
            error = two_sum_error(high, low, v)
        if saturate:
            v = np.clip(v, 0.0, 1.0)
        if target == "f64":
            if error is not None and error.any():
                form.fail("64-bit integers to f64 need .rn")
            return v.view(U8)
        if target == "f32":
            return round_f32(v, error, mode).view(U4)
        return encode(v if error is None else round_to_odd(v, error), target, mode)

    return run


def _float_to_integer(form: Form, target: str, source: str) -> Function:
    """Out-of-range values clamp. NaN gives 0, or 2^(n-1) where a 64-bit type takes part."""
    rounding = _INTEGER_ROUNDINGS[form.one_of(*_INTEGER_ROUNDINGS)]
    ftz = form.take("ftz")
    form.take("sat")  # integers always clamp
    if ftz and source != "f32":
        form.fail()
    n, signed = integers.width(target), target[0] == "s"
    dtype = (integers.SIGNED if signed else integers.UNSIGNED)[n]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    nan = 0 if source != "f64" and n < 64 else (low if signed else 1 << (n - 1))
    limit = float(high) if n < 64 else float(high + 1)

    def run(a: Array) -> Array:
        x = floats.values(a, source)
        if ftz:
            x = flush(x)
        x = rounding(x.astype(F8))
        bad = x != x
        over = x >= limit
        under = x <= low
        r = np.where(bad | over | under, 0.0, x).astype(dtype)
        if (bad | over | under).any():
            r = np.where(
                bad, dtype.type(nan), np.where(over, dtype.type(high), np.where(under, dtype.type(low), r))
            )
        return _register(r, target)

    return run


def _float_to_float(form: Form, target: str, source: str) -> Function:
    integral = form.maybe(*_INTEGER_ROUNDINGS)
    mode = form.maybe(*_FLOAT_ROUNDINGS[:4])
    ftz, saturate, relu = form.take("ftz"), form.take("sat"), form.take("relu")
    satfinite = form.take("satfinite")
    if ftz and "f32" not in (target, source):
        form.fail()
    if integral and mode:
        form.fail()
    if (relu or satfinite) and (target not in ("f16", "bf16") or source != "f32" or saturate or ftz):
        form.fail()
    size = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
    narrowing = size[target] < size[source] or {target, source} == {"f16", "bf16"}
    if source == "bf16" and size[target] > 2:
        narrowing = mode is not None  # a rounding mode is allowed, and does nothing
    if narrowing != (mode is not None):
        form.fail("a rounding mode belongs to narrowing conversions, and to those alone")
    if not (integral or ftz or saturate or relu or satfinite):
        if (target, source) == ("f32", "f16"):
            return lambda a: raw32(a.view(F2).astype(F4))
        if (target, source) == ("f32", "bf16"):
            return lambda a: bf16_to_f32(a).view(U4)  # a shift: NaN keeps its payload
        if (target, source, mode) == ("f16", "f32", "rn"):
            return lambda a: raw16(a.view(F4).astype(F2))
        if (target, source, mode) == ("bf16", "f32", "rn"):
            return lambda a: bf16_from_f32(a.view(F4))
        if target == source:
            return lambda a: a

    def run(a: Array) -> Array:
        x = floats.values(a, source)
        if ftz and source == "f32":
            x = flush(x)
        v = x.astype(F8)
        if integral:
            v = _INTEGER_ROUNDINGS[integral](v)
        if saturate:
            v = np.where(v > 0, np.minimum(v, 1.0), 0.0)
        if relu:
            v = np.where(v < 0, 0.0, np.where(v == 0, 0.0, v))
        if target == "f64":
            return np.where(v != v, v.view(U8) | _QUIET, v.view(U8))
        if target == "f32":
            r = round_f32(v, None, mode or "rn")
            r = flush(r) if ftz else r
            return (
                r.view(U4) if source == "f64" else raw32(r)
            )  # from f64 a NaN keeps what fits of its payload
        r = encode(v, target, mode or "rn", satfinite)
        if (target, source) == ("f16", "f64"):
            bits = v.view(U8)
            payload = (
                (bits >> U8.type(48) & U8.type(0x8000))
                | U8.type(0x7E00)
                | (bits >> U8.type(42) & U8.type(0x1FF))
            )
            r = np.where(v != v, payload.astype(U2), r)
        return r

    return run


def _relu(raw: Array) -> Array:
    """Negative values of a raw 16-bit float become +0; NaN becomes canonical, which has no sign."""
    return np.where(raw & U2.type(0x8000), U2.type(0), raw)


def _pair_from_f32(form: Form, name: str) -> Function:
    """cvt.rn.bf16x2.f32 d, a, b: a in the upper half."""
    mode = form.one_of("rn", "rz")
    relu, satfinite = form.take("relu"), form.take("satfinite")
    nearest = _bf16_pairs if name == "bf16" else _f16_pairs

    def run(a: Array, b: Array) -> Array:
        if a.shape != b.shape:
            a, b = np.broadcast_arrays(a, b)
        both = np.empty((*a.shape[:-1], 2 * a.shape[-1]), U4)
        both[..., 0::2] = b
        both[..., 1::2] = a
        if mode == "rn" and not satfinite:
            r = nearest(both)
        else:
            r = encode(both.view(F4), name, mode, satfinite)
        return (_relu(r) if relu else r).view(U4)

    return run


def _f16_pairs(words: Array) -> Array:
    return raw16(words.view(F4).astype(F2))


def _bf16_pairs(words: Array) -> Array:
    r = bf16_words(words).view(U2)[..., 1::2].copy()
    x = words.view(F4)
    return np.where(x != x, NAN16, r) if has_nan(x) else r


def _pair(a: Array, source: str) -> tuple[Array, Array]:
    """(upper, lower) float64 values of a packed 16-bit register."""
    half = source[:-2]
    low = floats.values((a & U4.type(0xFFFF)).astype(U2), half).astype(F8)
    high = floats.values((a >> U4.type(16)).astype(U2), half).astype(F8)
    return high, low


def _narrow_pair(form: Form, name: str, source: str) -> Function:
    """To two 8-, 6- or 4-bit floats from two f32 or a packed 16-bit pair; returned as uint16 (e2m1x2: in the
    low byte)."""
    form.one_of("rn")
    if not form.take("satfinite"):
        form.fail("needs .satfinite")
    relu = form.take("relu")
    if source not in ("f32", "f16x2", "bf16x2"):
        form.fail()
    shift = U2.type(4 if name == "e2m1" else 8)
    sign = U1.type(1 << (FORMATS[name].bits - 1))

    def one(v: Array) -> Array:
        r = encode(v, name, "rn", satfinite=True)
        return np.where(r & sign, U1.type(0), r) if relu else r

    def run(*operands: Array) -> Array:
        if source == "f32":
            high, low = (v.view(F4) for v in operands)
        else:
            high, low = _pair(operands[0], source)
        return (one(high).astype(U2) << shift) | one(low)

    return run


def _widen_pair(form: Form, target: str, name: str) -> Function:
    form.one_of("rn")
    relu = form.take("relu")
    if target != ("bf16x2" if name == "ue8m0" else "f16x2") or relu and name == "ue8m0":
        form.fail()
    shift, mask = (U2.type(4), U2.type(15)) if name == "e2m1" else (U2.type(8), U2.type(255))

    def one(code: Array) -> Array:
        v = to_float32(code, name)
        r = encode(v, target[:-2])
        return (_relu(r) if relu else r).astype(U4)

    def run(a: Array) -> Array:
        a = np.asarray(a).astype(U2)
        return (one((a >> shift) & mask) << U4.type(16)) | one(a & mask)

    return run


def _tf32(form: Form, source: str) -> Function:
    """To tf32: 10 mantissa bits in a 32-bit register, the low 13 bits zero."""
    mode = form.one_of("rna", "rn", "rz")
    relu, satfinite = form.take("relu"), form.take("satfinite")
    if source != "f32" or relu and mode == "rna":
        form.fail()

    def run(a: Array) -> Array:
        low = a & U4.type(0x1FFF)
        down = a & U4.type(0xFFFFE000)
        if mode == "rz":
            up = np.zeros_like(low, dtype=bool)
        elif mode == "rna":
            up = low >= U4.type(0x1000)
        else:
            up = low + ((a >> U4.type(13)) & U4.type(1)) > U4.type(0x1000)
        r = np.where(up, down + U4.type(0x2000), down)
        x = a.view(F4)
        r = np.where(np.isinf(x), a, r)
        if satfinite:
            largest = U4.type(0x7F7FE000)
            r = np.where((r & U4.type(0x7FFFFFFF)) > largest, (a & U4.type(0x80000000)) | largest, r)
        r = np.where(x != x, NAN32, r)
        return np.where(r & U4.type(0x80000000), U4.type(0), r) if relu else r

    return run


def _cvt_pack(form: Form) -> Function:
    """cvt.pack.sat.T.s32{.b32}: a and b saturate to T; b takes the low bits; with c, its low bits move up to
    make room."""
    if not form.take("sat"):
        form.fail("needs .sat")
    target = form.type()
    form.type("s32")
    with_c = len(form.types) == 3 and form.type("b32") == "b32"
    if target not in ("u16", "s16", "u8", "s8"):
        form.fail("sub-byte types are not modelled")
    n = integers.width(target)
    if with_c != (n == 8):
        form.fail()
    dtype = (integers.SIGNED if target[0] == "s" else integers.UNSIGNED)[n]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    mask, shift = U4.type(2**n - 1), U4.type(n)

    def one(x: Array) -> Array:
        return np.clip(x.view(np.int32), low, high).view(U4) & mask

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        r = (one(a) << shift) | one(b)
        return r if c is None else (c << U4.type(2 * n)) | r

    return run


def build(form: Form) -> Function:
    return _cvt_pack(form) if form.take("pack") else _cvt(form)
