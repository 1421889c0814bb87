"""cvt against rationals and, for the narrow formats, their tables of values."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from coflash.vgpu.units import arith
from coflash.vgpu.units.arith import UnsupportedInstruction
from coflash.vgpu.units.formats import FORMATS, encode

from .exact import canonical, decode, round_to, samples

NAN, INF = math.nan, math.inf


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def run(mnemonic: str, *operands: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return arith.resolve(mnemonic)(*operands)


def converted(bits: int, source: str, target: str, mode: str) -> int:
    v = decode(bits, source)
    if isinstance(v, Fraction):
        return round_to(v, target, mode)
    if math.isnan(v):
        # From f64 the sign and the top of the payload stay.
        return (
            bits >> 32 & 1 << 31 | 0x7FC00000 | bits >> 29 & 0x3FFFFF
            if source == "f64"
            else canonical(target)
        )
    sign = 1 if math.copysign(1, v) < 0 else 0
    top = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000}[target] if math.isinf(v) else 0
    return top | sign << {"f16": 15, "bf16": 15, "f32": 31}[target]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_narrowing_f32(target: str, mode: str) -> None:
    a = samples("f32", 1500, 1)
    got = run(f"cvt.{mode}.{target}.f32", a)
    want = [converted(int(x), "f32", target, mode) for x in a]
    np.testing.assert_array_equal(got, np.array(want, np.uint16))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_narrowing_f64(mode: str) -> None:
    a = samples("f64", 600, 2)
    # Values that a float32 can hold, too: their exponents are rarely drawn.
    a[::2] = np.random.default_rng(0).standard_normal(300).view(np.uint64)
    got = run(f"cvt.{mode}.f32.f64", a)
    np.testing.assert_array_equal(
        got, np.array([converted(int(x), "f64", "f32", mode) for x in a], np.uint32)
    )


def test_widening_is_exact() -> None:
    every = np.arange(65536, dtype=np.uint16)
    for source in ("f16", "bf16"):
        got = run(f"cvt.f32.{source}", every).view(np.float32)
        for bits in range(0, 65536, 97):
            v = decode(bits, source)
            assert (v != v and got[bits] != got[bits]) or float(v) == got[bits]
        back = run(f"cvt.rn.{source}.f32", got.view(np.uint32))
        number = got == got
        np.testing.assert_array_equal(back[number], every[number])
        assert (back[~number] == 0x7FFF).all()


def test_pairs_put_the_first_operand_high() -> None:
    assert run("cvt.rn.bf16x2.f32", f32(1), f32(2))[0] == 0x3F804000
    assert run("cvt.rn.f16x2.f32", f32(1), f32(-2))[0] == 0x3C00C000
    assert run("cvt.rn.relu.bf16x2.f32", f32(-1), f32(2))[0] == 0x00004000
    assert run("cvt.rz.bf16x2.f32", f32(1.999), f32(-1.999))[0] == 0x3FFFBFFF
    assert run("cvt.rn.satfinite.f16x2.f32", f32(1e30), f32(-INF))[0] == 0x7BFFFBFF
    a, b = samples("f32", 500, 3), samples("f32", 500, 4)
    for name in ("bf16", "f16"):
        high, low = (run(f"cvt.rn.{name}.f32", x).astype(np.uint32) for x in (a, b))
        np.testing.assert_array_equal(run(f"cvt.rn.{name}x2.f32", a, b), high << 16 | low)


# Largest finite value and spacing near 1 of each narrow type, from the manual's "Alternate Floating-Point
# Data Formats".
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}


@pytest.mark.parametrize("name", list(LARGEST))
def test_narrow_types(name: str) -> None:
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint8)
    table = arith.to_float32(codes, name)
    assert np.nanmax(table[np.isfinite(table)]) == LARGEST[name]
    assert table[0] == 0 and table[1] > 0 and table[1 << (bits - 1)] == 0
    half = table[: 1 << (bits - 1)]
    half = half[np.isfinite(half)]
    assert (np.diff(half) > 0).all()
    # Encoding is the inverse, and rounds to the nearest, to the even code on ties.
    finite = np.isfinite(table)
    np.testing.assert_array_equal(encode(table[finite], name, satfinite=True), codes[finite])
    middle = (half[:-1].astype(np.float64) + half[1:]) / 2
    even = np.where(np.arange(middle.size) % 2 == 0, np.arange(middle.size), np.arange(middle.size) + 1)
    np.testing.assert_array_equal(encode(middle, name, satfinite=True), even)
    np.testing.assert_array_equal(
        encode(np.nextafter(middle, 0), name, satfinite=True), np.arange(middle.size)
    )
    np.testing.assert_array_equal(
        encode(np.nextafter(middle, 1e9), name, satfinite=True), np.arange(middle.size) + 1
    )
    assert encode(np.array([1e9]), name, satfinite=True)[0] == half.size - 1


def test_eight_bit_pairs() -> None:
    assert run("cvt.rn.satfinite.e4m3x2.f32", f32(1), f32(1000))[0] == 0x387E
    assert run("cvt.rn.satfinite.e4m3x2.f32", f32(NAN), f32(-INF))[0] == 0x7FFE
    assert run("cvt.rn.satfinite.e5m2x2.f32", f32(-1), f32(1e9))[0] == 0xBC7B
    assert run("cvt.rn.satfinite.relu.e4m3x2.f32", f32(-1), f32(1))[0] == 0x0038
    assert run("cvt.rn.satfinite.e2m1x2.f32", f32(6), f32(-0.5))[0] == 0x79
    assert run("cvt.rn.satfinite.e4m3x2.f16x2", np.array([0x3C004000], np.uint32))[0] == 0x3840
    assert run("cvt.rn.f16x2.e4m3x2", np.array([0x3840], np.uint16))[0] == 0x3C004000
    assert run("cvt.rn.relu.f16x2.e5m2x2", np.array([0xBC3C], np.uint16))[0] == 0x00003C00
    assert run("cvt.rn.f16x2.e2m1x2", np.array([0x79], np.uint16))[0] == 0x4600B800
    assert run("cvt.rn.bf16x2.ue8m0x2", np.array([0x7F80], np.uint16))[0] == 0x3F804000


def test_tf32() -> None:
    a = f32(1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23, 1 + 3 * 2.0**-11, -1 - 2.0**-11)
    down = f32(1, 1, 1 + 2.0**-10, -1)
    np.testing.assert_array_equal(run("cvt.rz.tf32.f32", a), down)
    np.testing.assert_array_equal(run("cvt.rn.tf32.f32", a), f32(1, 1 + 2.0**-10, 1 + 2.0**-9, -1))
    np.testing.assert_array_equal(
        run("cvt.rna.tf32.f32", a), f32(1 + 2.0**-10, 1 + 2.0**-10, 1 + 2.0**-9, -1 - 2.0**-10)
    )
    np.testing.assert_array_equal(run("cvt.rna.tf32.f32", f32(NAN, INF)), [0x7FFFFFFF, 0x7F800000])
    assert run("cvt.rna.satfinite.tf32.f32", f32(-INF))[0] == 0xFF7FE000


@pytest.mark.parametrize(
    ("mnemonic", "values", "want"),
    [
        ("cvt.rni.s32.f32", [0.5, 1.5, -2.5, 1e10, -1e10, NAN], [0, 2, -2, 2**31 - 1, -(2**31), 0]),
        ("cvt.rzi.s32.f32", [0.9, -0.9, 2147483520.0, 2147483648.0], [0, 0, 2147483520, 2**31 - 1]),
        ("cvt.rmi.s32.f32", [-0.1, 1.9], [-1, 1]),
        ("cvt.rpi.s32.f32", [-0.9, 1.1], [0, 2]),
        ("cvt.rzi.u32.f32", [-5, 4e9, 1e11, NAN], [0, 4000000000, 2**32 - 1, 0]),
        ("cvt.rzi.s64.f32", [1e10, 1e20, -1e20, NAN], [10**10, 2**63 - 1, -(2**63), -(2**63)]),
        ("cvt.rzi.u64.f32", [1e10, 1e20, -1, NAN], [10**10, 2**64 - 1, 0, 2**63]),
        ("cvt.rzi.s16.f32", [40000, -40000, 12.7], [32767, -32768, 12]),
        ("cvt.rzi.s8.f32", [200, -200, -1], [127, -128, -1]),
        ("cvt.rzi.u8.f32", [300, -1, 7.5], [255, 0, 7]),
        ("cvt.rzi.ftz.s32.f32", [1e-40, 3.5], [0, 3]),
    ],
)
def test_float_to_integer(mnemonic: str, values: list[float], want: list[int]) -> None:
    got = run(mnemonic, f32(*values))
    bits = got.dtype.itemsize * 8
    np.testing.assert_array_equal(got, np.array([w & ((1 << bits) - 1) for w in want], got.dtype))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64", "s16", "u8"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_integer_to_float(source: str, target: str, mode: str) -> None:
    bits = int(source[1:])
    rng = np.random.default_rng(bits)
    raw = rng.integers(0, 1 << 62, 300, dtype=np.uint64) << np.uint64(2)
    raw |= rng.integers(0, 4, 300, dtype=np.uint64)
    raw >>= rng.integers(0, 64, 300, dtype=np.uint64)
    raw[:4] = [0, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    raw &= np.uint64((1 << bits) - 1)
    a = raw.astype({8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])
    got = run(f"cvt.{mode}.{target}.{source}", a)
    for x, r in zip(raw.tolist(), got.tolist(), strict=True):
        v = x - (1 << bits) if source[0] == "s" and x >> (bits - 1) else x
        want = round_to(Fraction(v), target, mode) if v else 0
        assert r == want, (source, target, mode, v)


def test_integer_to_integer() -> None:
    a = np.array([0x80, 0x1FF, 0x7F], np.uint32)
    np.testing.assert_array_equal(run("cvt.s32.s8", a), np.array([-128, -1, 127], np.int32).view(np.uint32))
    np.testing.assert_array_equal(run("cvt.u32.u8", a), [0x80, 0xFF, 0x7F])
    np.testing.assert_array_equal(run("cvt.s64.s32", np.array([0xFFFFFFFF], np.uint32)), [2**64 - 1])
    np.testing.assert_array_equal(run("cvt.u64.u32", np.array([0xFFFFFFFF], np.uint32)), [2**32 - 1])
    np.testing.assert_array_equal(run("cvt.u32.u64", np.array([0x123456789], np.uint64)), [0x23456789])
    np.testing.assert_array_equal(
        run("cvt.sat.u8.s32", np.array([-5, 300, 7], np.int32).view(np.uint32)), [0, 255, 7]
    )
    np.testing.assert_array_equal(run("cvt.sat.s32.u32", np.array([2**31], np.uint32)), [2**31 - 1])
    np.testing.assert_array_equal(run("cvt.sat.u32.s32", np.array([2**31], np.uint32)), [0])
    assert run("cvt.s16.s8", np.array([0x80], np.uint16))[0] == 0xFF80


def test_float_to_float_modifiers() -> None:
    np.testing.assert_array_equal(run("cvt.rni.f32.f32", f32(2.5, -0.4)), f32(2, -0.0))
    np.testing.assert_array_equal(run("cvt.rmi.f32.f32", f32(2.5, -0.4)), f32(2, -1))
    np.testing.assert_array_equal(run("cvt.sat.f32.f32", f32(2.5, -0.4, NAN, 0.5)), f32(1, 0, 0, 0.5))
    np.testing.assert_array_equal(run("cvt.ftz.f32.f32", f32(1e-40)), f32(0))
    np.testing.assert_array_equal(run("cvt.rn.ftz.f32.f64", np.array([-1e-40]).view(np.uint64)), f32(-0.0))
    np.testing.assert_array_equal(run("cvt.f64.f32", f32(1.5)).view(np.float64), [1.5])
    np.testing.assert_array_equal(run("cvt.rn.relu.f16.f32", f32(-3, 3, NAN)), [0, 0x4200, 0x7FFF])


def test_pack() -> None:
    a, b = np.array([70000], np.int32).view(np.uint32), np.array([-70000], np.int32).view(np.uint32)
    assert run("cvt.pack.sat.s16.s32", a, b)[0] == 0x7FFF8000
    assert run("cvt.pack.sat.u8.s32.b32", a, b, np.array([0xABCD], np.uint32))[0] == 0xABCDFF00


@pytest.mark.parametrize(
    "mnemonic",
    [
        "cvt.f16.f32",
        "cvt.rn.f32.f16",
        "cvt.s32.f32",
        "cvt.rs.bf16x2.f32",
        "cvt.rn.e4m3x2.f32",
        "cvt.rn.tf32.f16",
        "cvt.ftz.f64.f16",
        "cvt.f32.s32",
    ],
)
def test_invalid_forms_are_refused(mnemonic: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="cvt"):
        arith.resolve(mnemonic)
