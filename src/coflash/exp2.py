"""2**f on [0, 1] by polynomial: the one home of the coefficients, for the portable path and for kernels.

Minimax in relative error among polynomials with p(0) = 1; ascending powers; every value is exactly a float32.
`tools/exp2_minimax.py` derives them and measures them over every float32 in [-127, 0]; `docs/numerics.md`
has the figures.  This module imports nothing, so that device code can take the table without PyTorch.
"""

from __future__ import annotations

__all__ = ["COEFFICIENTS"]

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (1.0, 0.6951167583465576, 0.22764506936073303, 0.07706699520349503),
    4: (1.0, 0.6930448412895203, 0.2412802278995514, 0.05224244296550751, 0.013426685705780983),
    5: (
        1.0,
        0.6931512951850891,
        0.2401645928621292,
        0.055799514055252075,
        0.009017480537295341,
        0.0018669526325538754,
    ),
}
