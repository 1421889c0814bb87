"""Approximate functions: inside the manual's bounds, with its special values; and the tensor cores'
arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from coflash.vgpu.units import arith
from coflash.vgpu.units.arith import UnsupportedInstruction

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = np.nan, np.inf
MAX = float(np.finfo(np.float32).max)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def run(mnemonic: str, *operands: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return arith.resolve(mnemonic)(*operands)


# Function, domain, and the manual's bound as (relative, absolute).
BOUNDS = {
    "ex2.approx.f32": (mpmath.power, (-140, 128), 2.0**-22, 0.0),
    "ex2.approx.ftz.f32": (mpmath.power, (-126, 128), 2.0**-22, 0.0),
    "lg2.approx.f32": (lambda x: mpmath.log(x, 2), (0.5, 2), 0.0, 2.0**-22),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, (0.001, 1000), 2.0**-23, 0.0),
    "rsqrt.approx.f32": (lambda x: 1 / mpmath.sqrt(x), (0.001, 1000), 2.0**-22.9, 0.0),
    "sqrt.approx.f32": (mpmath.sqrt, (0.001, 1000), 2.0**-23, 0.0),
    "sin.approx.f32": (mpmath.sin, (-3.14, 3.14), 0.0, 2.0**-20.5),
    "cos.approx.f32": (mpmath.cos, (-3.14, 3.14), 0.0, 2.0**-20.5),
    "tanh.approx.f32": (mpmath.tanh, (-9, 9), 2.0**-11, 0.0),
}


@pytest.mark.parametrize("mnemonic", list(BOUNDS))
def test_bounds(mnemonic: str) -> None:
    function, (low, high), relative, absolute = BOUNDS[mnemonic]
    x = np.random.default_rng(1).uniform(low, high, 300).astype(np.float32)
    got = run(mnemonic, x.view(np.uint32)).view(np.float32)
    for a, r in zip(x.tolist(), got.tolist(), strict=True):
        exact = function(2, a) if function is mpmath.power else function(mpmath.mpf(a))
        error = abs(mpmath.mpf(r) - exact)
        tolerance = max(relative * abs(exact), absolute) + mpmath.mpf(2) ** -150  # a subnormal's half ulp
        assert error <= tolerance, (mnemonic, a)


@pytest.mark.parametrize(
    ("mnemonic", "values", "want"),
    [
        (
            "ex2.approx.ftz.f32",
            [-INF, -1e-40, 0.0, 1e-40, INF, NAN, -130, 128],
            [0, 1, 1, 1, INF, NAN, 0, INF],
        ),
        ("ex2.approx.f32", [-INF, -0.0, -149, INF, NAN], [0, 1, 2.0**-149, INF, NAN]),
        (
            "lg2.approx.ftz.f32",
            [-INF, -1, -0.0, 0.0, 1e-40, INF, NAN],
            [NAN, NAN, -INF, -INF, -INF, INF, NAN],
        ),
        ("rcp.approx.ftz.f32", [-INF, -0.0, 0.0, 1e-40, INF, NAN, MAX], [-0.0, -INF, INF, INF, 0, NAN, 0]),
        ("rsqrt.approx.f32", [-INF, -1, -0.0, 0.0, INF, NAN], [NAN, NAN, -INF, INF, 0, NAN]),
        ("sqrt.approx.f32", [-1, -0.0, 0.0, INF, NAN], [NAN, -0.0, 0, INF, NAN]),
        ("sin.approx.f32", [-INF, -0.0, 0.0, INF, NAN], [NAN, -0.0, 0, NAN, NAN]),
        ("cos.approx.f32", [-INF, 0.0, INF], [NAN, 1, NAN]),
        ("tanh.approx.f32", [-INF, -0.0, 0.0, INF, NAN], [-1, -0.0, 0, 1, NAN]),
    ],
)
def test_special_values(mnemonic: str, values: list[float], want: list[float]) -> None:
    expected = f32(*want)
    expected[np.isnan(want)] = 0x7FFFFFFF
    np.testing.assert_array_equal(run(mnemonic, f32(*values)), expected)


@pytest.mark.parametrize(
    ("mnemonic", "fmt"),
    [("ex2.approx.f16", "f16"), ("ex2.approx.ftz.bf16", "bf16"), ("tanh.approx.bf16", "bf16")],
)
def test_16_bit_forms(mnemonic: str, fmt: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    x = arith.to_float32(every, fmt).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = np.exp2(x) if mnemonic.startswith("ex2") else np.tanh(x)
    got = arith.to_float32(run(mnemonic, every), fmt)
    finite = np.isfinite(exact) & (np.abs(exact) < 3e38 if fmt == "bf16" else np.abs(exact) < 65000)
    finite &= np.abs(exact) > (2.0**-126 if fmt == "bf16" else 2.0**-14)
    bound = 2.0**-8 if fmt == "bf16" else 2.0**-9.9
    assert (np.abs(got - exact)[finite] <= bound * np.abs(exact)[finite]).all()
    pair = run(mnemonic + "x2", every.view(np.uint32))
    np.testing.assert_array_equal(pair.view(np.uint16), run(mnemonic, every))


def test_coarse_doubles() -> None:
    """rcp and rsqrt.approx.ftz.f64 look at, and give, the upper 32 bits only."""
    x = np.array([3.0, 0.0, INF]).view(np.uint64)
    got = run("rcp.approx.ftz.f64", x | np.array([0xFFFF, 0, 0], np.uint64))
    assert (got & np.uint64(0xFFFFFFFF) == 0).all()
    np.testing.assert_allclose(got.view(np.float64)[0], 1 / 3, rtol=2.0**-20)
    np.testing.assert_array_equal(got.view(np.float64)[1:], [INF, 0])


def test_rounded_reciprocal() -> None:
    x = np.random.default_rng(2).uniform(-9, 9, 200).astype(np.float32)
    np.testing.assert_array_equal(run("rcp.rn.f32", x.view(np.uint32)).view(np.float32), np.float32(1) / x)


@pytest.mark.parametrize(
    "mnemonic",
    [
        "ex2.f32",
        "sin.approx.f64",
        "tanh.approx.ftz.f32",
        "ex2.approx.bf16",
        "rcp.approx.f64",
        "lg2.approx.f16",
    ],
)
def test_invalid_forms_are_refused(mnemonic: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=mnemonic.split(".")[0]):
        arith.resolve(mnemonic)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "f8f6f4"])
def test_exact_products(kind: str) -> None:
    """Small integers: every partial sum is exact, so the order cannot matter."""
    rng = np.random.default_rng(3)
    a = rng.integers(-2, 3, (64, 32)).astype(np.float32)
    b = rng.integers(-2, 3, (24, 32)).astype(np.float32)
    c = rng.integers(-99, 99, (64, 24)).astype(np.float32)
    want = a.astype(int) @ b.astype(int).T + c.astype(int)
    np.testing.assert_array_equal(arith.mma(a, b, c, kind), want)
    np.testing.assert_array_equal(arith.mma(a, b, None, kind), want - c.astype(int))


def test_nan_of_a_product_is_canonical() -> None:
    a, b = np.zeros((8, 16), np.float32), np.ones((8, 16), np.float32)
    a[3, 2] = np.inf
    b[5, 2] = 0
    d = arith.mma(a, b, None, "bf16").view(np.uint32)
    assert d[3, 5] == 0x7FFFFFFF and d[3, 0] == 0x7F800000 and not d[0].any()


def test_accumulating_in_f16() -> None:
    a, b = np.ones((8, 16), np.float32), np.ones((8, 16), np.float32)
    c = np.full((8, 8), 2048, np.float32)
    d = arith.mma(a, b, c, "f16", "f16")
    np.testing.assert_array_equal(d, 2064)
    np.testing.assert_array_equal(arith.mma(a[:, :1], b[:, :1], c, "f16", "f16"), 2048)


def test_integer_products_wrap_or_saturate() -> None:
    a, b = np.full((8, 32), 127, np.float32), np.full((8, 32), 127, np.float32)
    c = np.full((8, 8), 2**31 - 1, np.int32)
    np.testing.assert_array_equal(arith.mma(a, b, c, "i8"), np.int64(2**31 - 1 + 32 * 127**2 - 2**32))
    np.testing.assert_array_equal(arith.mma_i8_saturating(a, b, c), 2**31 - 1)


def test_tf32_ignores_the_low_bits() -> None:
    raw = np.array([0x3F801FFF], np.uint32)
    np.testing.assert_array_equal(arith.to_float32(raw, "tf32"), [1.0])


def test_accumulator_types() -> None:
    x = np.array([1.0, 65504.0, 1e9, NAN], np.float32)
    np.testing.assert_array_equal(arith.from_float32(x, "f16"), [0x3C00, 0x7BFF, 0x7C00, 0x7FFF])
    np.testing.assert_array_equal(
        arith.from_float32(x, "f32"), [0x3F800000, 0x477FE000, 0x4E6E6B28, 0x7FFFFFFF]
    )
    np.testing.assert_array_equal(arith.from_float32(x, "bf16"), [0x3F80, 0x4780, 0x4E6E, 0x7FFF])
