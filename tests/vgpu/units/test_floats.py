"""IEEE arithmetic of every float type and rounding mode against rational arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import arith
from coflash.vgpu.units.arith import UnsupportedInstruction

from .exact import check, operate, samples

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "sqrt": 1}


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def run(mnemonic: str, *operands: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return arith.resolve(mnemonic)(*operands)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", list(ARITY))
def test_f32(op: str, mode: str) -> None:
    operands = [samples("f32", 800, seed) for seed in range(ARITY[op])]
    check(arith.resolve(f"{op}.{mode}.f32"), op, operands, "f32", mode)


@pytest.mark.parametrize("mode", ["rn", "rm", "rz", "rp"])
@pytest.mark.parametrize("op", list(ARITY))
def test_f64(op: str, mode: str) -> None:
    operands = [samples("f64", 100, 10 + seed) for seed in range(ARITY[op])]
    check(arith.resolve(f"{op}.{mode}.f64"), op, operands, "f64", mode)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_16_bit(op: str, fmt: str) -> None:
    operands = [samples(fmt, 1500, 20 + seed) for seed in range(ARITY[op])]
    check(arith.resolve(f"{op}.rn.{fmt}"), op, operands, fmt, "rn")


def test_fma_double_rounding() -> None:
    """Sums that float64 rounds onto a float32 tie: the plain double rounding is wrong in all of these."""
    rng = np.random.default_rng(3)
    n = 400
    # a b = 1 + 2^-24 exactly is a tie; c pushes it off by less than float64 can see.
    a = np.full(n, 1.0 + 2.0**-12, np.float32)
    b = np.full(n, 1.0 - 2.0**-12 + 2.0**-23, np.float32)
    c = (rng.choice([-1, 1], n) * 2.0 ** rng.integers(-80, -50, n)).astype(np.float32)
    operands = [a.view(np.uint32), b.view(np.uint32), c.view(np.uint32)]
    check(arith.resolve("fma.rn.f32"), "fma", operands, "f32", "rn")
    # 1.5 * 2^-149: a tie between subnormals, and a tail.
    a = np.full(n, 1.5 * 2.0**-75, np.float32)
    b = np.full(n, 2.0**-74, np.float32)
    c = np.zeros(n, np.float32)
    c[::2] = 2.0**-149
    operands = [a.view(np.uint32), b.view(np.uint32), c.view(np.uint32)]
    check(arith.resolve("fma.rn.f32"), "fma", operands, "f32", "rn")
    # A tie made of a large c and a product below its last float64 bit.
    c = np.full(n, 1.0, np.float32)
    a = np.full(n, 2.0**-12, np.float32)
    b = (2.0**-12 * (1 + rng.integers(1, 3, n) * 2.0**-23)).astype(np.float32)
    operands = [a.view(np.uint32), b.view(np.uint32), c.view(np.uint32)]
    check(arith.resolve("fma.rn.f32"), "fma", operands, "f32", "rn")


@pytest.mark.parametrize(
    "mnemonic", ["add.rn.f32x2", "sub.rz.f32x2", "mul.rm.f32x2", "fma.rn.f32x2", "fma.rm.f32x2"]
)
def test_f32x2_is_two_f32(mnemonic: str) -> None:
    count = ARITY[mnemonic.split(".")[0]]
    parts = [samples("f32", 512, 40 + i) for i in range(count)]
    packed = run(mnemonic, *[p.view(np.uint64) for p in parts])
    assert packed.dtype == np.uint64
    np.testing.assert_array_equal(packed.view(np.uint32), run(mnemonic[:-2], *parts))


@pytest.mark.parametrize(
    "mnemonic", ["add.f16x2", "fma.rn.bf16x2", "max.f16x2", "neg.bf16x2", "fma.rn.relu.f16x2"]
)
def test_16_bit_pairs(mnemonic: str) -> None:
    fmt = "bf16" if "bf16" in mnemonic else "f16"
    count = {"add": 2, "fma": 3, "max": 2, "neg": 1}[mnemonic.split(".")[0]]
    parts = [samples(fmt, 512, 50 + i) for i in range(count)]
    packed = run(mnemonic, *[p.view(np.uint32) for p in parts])
    np.testing.assert_array_equal(packed.view(np.uint16), run(mnemonic[:-2], *parts))


def test_packed_broadcasts_an_immediate() -> None:
    a = f32(1, 2, 3, 4).view(np.uint64)
    got = run("add.rn.f32x2", a, np.uint64(0x3F8000003F800000))
    np.testing.assert_array_equal(got.view(np.uint32), f32(2, 3, 4, 5))


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
@pytest.mark.parametrize("mode", ["rn", "rm"])
def test_ftz(op: str, mode: str) -> None:
    """Subnormal operands count as zero, subnormal results become zero, both with their sign."""
    operands = [samples("f32", 800, 60 + seed) for seed in range(ARITY[op])]

    def flush(bits: int) -> int:
        return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits

    got = run(f"{op}.{mode}.ftz.f32", *operands)
    for lane in range(800):
        raw = tuple(flush(int(o[lane])) for o in operands)
        want = operate(op, raw, "f32", mode)
        want = 0x7FFFFFFF if isinstance(want, str) else flush(want)
        assert int(got[lane]) == want, (op, mode, [hex(r) for r in raw])


def test_exp2_range_reduction() -> None:
    """Adding 2^23 + 2^22 rounded down leaves floor(x) in the low bits: how the polynomial exp2 splits its
    argument."""
    x = np.linspace(-127, 127, 2001).astype(np.float32)
    r = run("add.rm.ftz.f32", x.view(np.uint32), f32(12582912.0)).view(np.int32) - 0x4B400000
    np.testing.assert_array_equal(r, np.floor(x).astype(np.int32))


def test_saturate() -> None:
    got = run("add.sat.f32", f32(0.25, 2, -3, np.nan, -0.0), f32(0.25, 2, 1, 0, -0.0))
    np.testing.assert_array_equal(got, f32(0.5, 1, 0, 0, 0))
    got = run("mul.sat.f16", np.array([0x4000, 0xC000, 0x7E00], np.uint16), np.array([0x4000] * 3, np.uint16))
    np.testing.assert_array_equal(got, [0x3C00, 0, 0])


def test_mixed_precision() -> None:
    a = np.array([0x3F80, 0x4000], np.uint16)  # bf16 1, 2
    np.testing.assert_array_equal(run("add.f32.bf16", a, f32(0.1, 0.2)), f32(1.1, 2.2))
    np.testing.assert_array_equal(run("fma.rn.f32.bf16", a, a, f32(1, 1)), f32(2, 5))
    np.testing.assert_array_equal(run("sub.f32.f16", np.array([0x3C00], np.uint16), f32(3)), f32(-2))


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("mnemonic", "a", "b", "want"),
    [
        ("max.f32", 1, NAN, 1),
        ("max.f32", NAN, 1, 1),
        ("max.NaN.f32", 1, NAN, NAN),
        ("max.f32", NAN, NAN, NAN),
        ("max.f32", -0.0, 0.0, 0.0),
        ("max.f32", 0.0, -0.0, 0.0),
        ("min.f32", -0.0, 0.0, -0.0),
        ("min.f32", 0.0, -0.0, -0.0),
        ("max.f32", -INF, -1, -1),
        ("min.NaN.f32", -INF, NAN, NAN),
        ("max.xorsign.abs.f32", -3, 2, -3),
        ("min.xorsign.abs.f32", -3, -2, 2),
        ("max.ftz.f32", 1e-40, -1e-40, 0.0),
        ("min.ftz.f32", 1e-40, -1e-40, -0.0),
    ],
)
def test_min_max(mnemonic: str, a: float, b: float, want: float) -> None:
    got = run(mnemonic, f32(a, 5), f32(b, 5))
    expected = 0x7FFFFFFF if np.isnan(want) else int(f32(want)[0])
    assert int(got[0]) == expected
    assert int(got[1]) == int(f32(5)[0])


def test_min_max_of_three() -> None:
    a, b, c = (samples("f32", 300, 70 + i) for i in range(3))
    want = run("max.f32", run("max.f32", a, b), c)
    np.testing.assert_array_equal(run("max.f32", a, b, c), want)


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f64"])
def test_min_max_other_types(fmt: str) -> None:
    a, b = samples(fmt, 500, 80), samples(fmt, 500, 81)
    from .exact import decode

    got = run(f"max.{fmt}", a, b)
    for x, y, r in zip(a, b, got, strict=True):
        u, v = decode(int(x), fmt), decode(int(y), fmt)
        if u != u and v != v:
            assert decode(int(r), fmt) != decode(int(r), fmt)
        elif u != u or v != v:
            assert r == (y if u != u else x)
        elif u == v == 0:
            assert r == min(x, y)  # +0 has the smaller bits
        else:
            assert r == (x if u >= v else y)


@pytest.mark.parametrize(
    ("op", "less", "equal", "greater", "unordered"),
    [
        ("eq", 0, 1, 0, 0),
        ("ne", 1, 0, 1, 0),
        ("lt", 1, 0, 0, 0),
        ("le", 1, 1, 0, 0),
        ("gt", 0, 0, 1, 0),
        ("ge", 0, 1, 1, 0),
        ("equ", 0, 1, 0, 1),
        ("neu", 1, 0, 1, 1),
        ("ltu", 1, 0, 0, 1),
        ("leu", 1, 1, 0, 1),
        ("gtu", 0, 0, 1, 1),
        ("geu", 0, 1, 1, 1),
        ("num", 1, 1, 1, 0),
        ("nan", 0, 0, 0, 1),
    ],
)
def test_setp_truth_table(op: str, less: int, equal: int, greater: int, unordered: int) -> None:
    a, b = f32(1, 2, 3, NAN, 1, -0.0), f32(2, 2, 2, 1, NAN, 0.0)
    want = np.array([less, equal, greater, unordered, unordered, equal], bool)
    np.testing.assert_array_equal(run(f"setp.{op}.f32", a, b), want)
    p, q = arith.resolve(f"setp.{op}.f32", dual=True)(a, b)
    np.testing.assert_array_equal(p, want)
    np.testing.assert_array_equal(q, ~want)
    c = np.array([1, 0, 1, 0, 1, 0], bool)
    np.testing.assert_array_equal(run(f"setp.{op}.and.f32", a, b, c), want & c)
    p, q = arith.resolve(f"setp.{op}.xor.f32", dual=True)(a, b, c)
    np.testing.assert_array_equal(p, want ^ c)
    np.testing.assert_array_equal(q, ~want ^ c)


def test_setp_ftz_and_pairs() -> None:
    assert run("setp.eq.ftz.f32", f32(1e-40), f32(0))[0]
    assert not run("setp.eq.f32", f32(1e-40), f32(0))[0]
    a, b = np.array([0x3C004000], np.uint32), np.array([0x3C003C00], np.uint32)
    low, high = run("setp.gt.f16x2", a, b)
    assert low[0] and not high[0]


def test_set_selp_slct() -> None:
    a, b = f32(1, 2), f32(2, 1)
    np.testing.assert_array_equal(run("set.lt.u32.f32", a, b), [0xFFFFFFFF, 0])
    np.testing.assert_array_equal(run("set.lt.f32.f32", a, b), f32(1, 0))
    np.testing.assert_array_equal(run("selp.f32", a, b, np.array([True, False])), f32(1, 1))
    np.testing.assert_array_equal(run("slct.b32.s32", a, b, np.array([0, 0x80000000], np.uint32)), f32(1, 1))
    np.testing.assert_array_equal(run("slct.b32.f32", a, b, f32(-0.0, -1)), f32(1, 1))


def test_sign_operations() -> None:
    x = f32(-1.5, 0.0, -INF)
    np.testing.assert_array_equal(run("abs.f32", x), x & 0x7FFFFFFF)
    np.testing.assert_array_equal(run("neg.f32", x), x ^ 0x80000000)
    np.testing.assert_array_equal(run("neg.f32", f32(NAN)), [0x7FFFFFFF])
    np.testing.assert_array_equal(run("abs.bf16", np.array([0xFF81, 0x8001], np.uint16)), [0x7FFF, 0x0001])
    np.testing.assert_array_equal(run("neg.ftz.f32", f32(1e-40)), f32(-0.0))
    np.testing.assert_array_equal(run("copysign.f32", f32(-2, 2), f32(3, -3)), f32(-3, 3))


@pytest.mark.parametrize(
    ("what", "want"),
    [
        ("finite", [1, 1, 1, 0, 0]),
        ("infinite", [0, 0, 0, 1, 0]),
        ("number", [1, 1, 1, 1, 0]),
        ("notanumber", [0, 0, 0, 0, 1]),
        ("normal", [1, 0, 1, 0, 0]),
        ("subnormal", [0, 1, 0, 0, 0]),
    ],
)
def test_testp(what: str, want: list[int]) -> None:
    np.testing.assert_array_equal(run(f"testp.{what}.f32", f32(1, 1e-40, 0, INF, NAN)), np.array(want, bool))


def test_division_by_huge_numbers() -> None:
    """div.approx gives 0 for a divisor above 2^126 (NaN for an infinite dividend); div.full does not."""
    a, b = f32(2.0**100, INF, 6), f32(2.0**127, 2.0**127, 3)
    np.testing.assert_array_equal(run("div.approx.f32", a, b), [0, 0x7FFFFFFF, int(f32(2)[0])])
    np.testing.assert_array_equal(run("div.full.f32", a, b), f32(2.0**-27, INF, 2))


@pytest.mark.parametrize(
    "mnemonic",
    [
        "add.rn.f8",
        "fma.f32",
        "add.rn.rz.f32",
        "frobnicate.f32",
        "add",
        "add.wrong.f32",
        "max.f32.f32",
        "mul.rn.f32.f16",
        "add.rz.f16",
        "setp.f32",
        "setp.lt.b32",
        "ex2.f32",
    ],
)
def test_unknown_forms_are_refused(mnemonic: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="f32|f8|f16|add|b32"):
        arith.resolve(mnemonic)
