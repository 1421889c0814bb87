"""2**x for x <= 0 without an exponential unit: split, polynomial, exponent field.

Write x = n + f with n whole and f in [0, 1].  A polynomial gives 2**f in [1, 2]; adding n to the exponent
field of its bit pattern multiplies by 2**n.  On a GPU this moves exponentials from the special-function unit
to the multiply-add pipes; here it exists so that its effect on accuracy can be studied anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coflash.exp2 import COEFFICIENTS

__all__ = ["exp2_polynomial"]

SMALLEST = -126.0  # 2**x below it is subnormal, which the exponent field alone cannot express: flushed to 0


def exp2_polynomial(x: Tensor, degree: int) -> Tensor:
    """2**x of float32 x <= 127 by the polynomial of degree 3, 4 or 5."""
    coefficients = COEFFICIENTS[degree]
    whole = torch.floor(x)
    fraction = x - whole  # rounds to 1 for tiny negative x; the polynomial covers the closed interval
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(fraction).add_(coefficient)
    exponent = whole.clamp_(min=SMALLEST).nan_to_num_(nan=0.0).to(torch.int32)
    value = (value.view(torch.int32) + (exponent << 23)).view(torch.float32)
    return value.masked_fill_(x < SMALLEST, 0.0).masked_fill_(x.isnan(), float("nan"))
