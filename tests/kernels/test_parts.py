"""What the kernels' parts rely on."""

from __future__ import annotations

import numpy as np

SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 3.4e38, 1.0], np.float32)


def test_adding_minus_zero_to_two_numbers_as_one_changes_neither() -> None:
    """`ptx.adjacent` moves two float32 by an addition of -0.0 to the float64 that their bits spell."""
    words = np.random.default_rng().integers(0, 2**32, (200_000, 2), np.uint32)
    words = words[~np.isnan(words.view(np.float32)).any(axis=1)]
    special = np.stack(np.meshgrid(SPECIAL, SPECIAL), -1).reshape(-1, 2).view(np.uint32)
    for pairs in (words, special):
        moved = pairs.view(np.float64) + np.float64(-0.0)
        np.testing.assert_array_equal(np.ascontiguousarray(moved).view(np.uint32), pairs)
