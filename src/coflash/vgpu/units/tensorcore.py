"""The arithmetic of the tensor cores."""

from __future__ import annotations

import numpy as np

from .formats import F2, F4, NAN32, Array, has_nan

KINDS = frozenset({"f16", "bf16", "tf32", "f8f6f4", "i8"})


def mma(a: Array, b: Array, c: Array | None, kind: str, d_type: str = "f32") -> Array:
    """D = A Bᵀ + C. a: (M, K), b: (N, K), float32 values from `to_float32`; c: (M, N) or None for zero.

    Returns (M, N) float32, already rounded to float16 where d_type is "f16", every NaN the canonical one; for
    kind "i8" c and the result are int32, and the sum wraps (`mma_i8_saturating` clamps it).

    Products of 16-bit and narrower operands are exact in float32, of tf32 in 22 bits, so also exact. The sum
    here is float32 BLAS's: nearest rounding, in an order BLAS chooses. Hardware differs: it aligns the
    products and the accumulator of a group of k to the largest exponent, drops bits below a fixed number of
    extra ones (it truncates: no rounding to nearest inside), and adds groups one after the other. Both are
    exact whenever all partial sums are representable. The manual leaves the order and the precision
    unspecified; the difference stays within the usual bound K · 2^-23 · Σ|aᵢbᵢ|.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of matrix product {kind!r}")
    if kind == "i8":
        s = a.astype(np.float64) @ b.astype(np.float64).T
        wide = s.astype(np.int64)
        if c is not None:
            wide = wide + c
        return wide.astype(np.int32)
    d = a @ b.T
    if c is not None:
        d += c
    if has_nan(d.reshape(-1)):
        d = np.where(d != d, NAN32.view(F4), d)
    return d.astype(F2).astype(F4) if d_type == "f16" else d


def mma_i8_saturating(a: Array, b: Array, c: Array | None) -> Array:
    """The .satfinite form of integer products: the sum clamps to int32."""
    s = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int64)
    if c is not None:
        s = s + c
    return np.clip(s, -(2**31), 2**31 - 1).astype(np.int32)
