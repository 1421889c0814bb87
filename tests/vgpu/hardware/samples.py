"""The inputs on which the hardware's approximate functions were recorded; made by integer arithmetic
alone."""

from __future__ import annotations

import numpy as np

COUNT = 1 << 15

# PTX operation -> interval of its second sample (bit patterns every 2^32 / COUNT of all float32 are the
# first).
FLOAT32 = {
    "ex2.approx.f32": (-2.0, 2.0),
    "ex2.approx.ftz.f32": (-2.0, 2.0),
    "lg2.approx.f32": (0.5, 4.0),
    "lg2.approx.ftz.f32": (0.5, 4.0),
    "rcp.approx.f32": (1.0, 4.0),
    "rcp.approx.ftz.f32": (1.0, 4.0),
    "rsqrt.approx.f32": (1.0, 4.0),
    "rsqrt.approx.ftz.f32": (1.0, 4.0),
    "sqrt.approx.f32": (1.0, 4.0),
    "sqrt.approx.ftz.f32": (1.0, 4.0),
    "sin.approx.f32": (-3.15, 3.15),
    "sin.approx.ftz.f32": (-3.15, 3.15),
    "cos.approx.f32": (-3.15, 3.15),
    "cos.approx.ftz.f32": (-3.15, 3.15),
    "tanh.approx.f32": (-6.0, 6.0),
}

# All 65536 inputs.
FLOAT16 = ("ex2.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.f16", "tanh.approx.bf16")


def float32_inputs(operation: str) -> np.ndarray:
    """Raw bits (uint32): a comb over every exponent, then an even grid over the interval that kernels
    use."""
    low, high = FLOAT32[operation]
    comb = (np.arange(COUNT, dtype=np.uint64) * 131071 % (1 << 32)).astype(np.uint32)
    grid = (low + (high - low) / COUNT * (np.arange(COUNT, dtype=np.float64) + 0.5)).astype(np.float32)
    return np.concatenate([comb, grid.view(np.uint32)])


def float16_inputs() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
