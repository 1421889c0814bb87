"""2**f on [0, 1] by polynomial: the one home of the coefficients, for the portable path and for kernels.

Minimax in relative error among polynomials with p(0) = 1; ascending powers; every value is exactly a float32.
`tools/exp2_minimax.py` derives them and measures them over every float32 in [-127, 0]; `docs/numerics.md`
has the figures.  This module imports nothing, so that device code can take the table without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COEFFICIENTS", "DEPRESSED", "Depressed"]

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


@dataclass(frozen=True)
class Depressed:
    """A cubic for kernels, without its quadratic term, together with the step that splits x.

    For x between `lowest` and `lowest + span`, all of it float32 multiply-adds:

        y = (x - lowest) / span
        t = span * y + magic, rounded down        the low bits of t: floor(x) - lowest
        s = q * span * y + (shift - q * t)        that is q * (x - floor(x) + a)
        2**(x - floor(x)) = (s * s + square) * s + constant

    `q * (magic + a) = shift` must hold to 1e-6 although `shift` has seven digits.  `magic` may be any whole number from
    2**23 on whose lowest nine bits are those of `lowest`; there is one with which `shift` is a float32.
    """

    lowest: float
    span: float
    magic: float
    q: float
    shift: float
    square: float
    constant: float


#: COEFFICIENTS[3] in that form.
DEPRESSED = Depressed(
    lowest=-100.0,
    span=128.0,
    magic=10919836.0,
    q=0.4255548417568207,
    shift=4646989.5,
    square=1.10672926902771,
    constant=0.46270471811294556,
)
