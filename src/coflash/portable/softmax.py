"""The online softmax with conditional rescaling.

Scores come tile by tile.  The state of a row is a reference m, the sum l of exp(s - m) over the keys seen so
far, and elsewhere an accumulator of exp(s - m) times values.  The classic form moves m to the running maximum
at every tile and rescales l and the accumulator each time.  Any m gives the same result in exact arithmetic,
since l divides the accumulator at the end; so m moves only where the maximum has grown by more than tau (in
log2 units).  Weights are then at most 2**tau, which float32 sums and a 16-bit second product bear without
loss, and almost every rescale is skipped.

The exponential is one of base 2.  Its argument is taken as `(s - m) * unit`, difference first: that is exact
for the scores that matter, whatever their magnitude, and the softmax scale costs no product of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from coflash.portable.exp2 import exp2_polynomial

__all__ = ["LOG2E", "Numerics", "OnlineSoftmax", "chosen", "using"]

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Numerics:
    """Choices that change rounding, not meaning."""

    rescale_threshold: float = 8.0  # tau, in log2 units; 0 rescales whenever the maximum grows
    exp2_degree: int | None = None  # degree of the exp2 polynomial (3, 4, 5); None: the library's exp2

    def exp2_(self, x: Tensor) -> Tensor:
        """2**x, in x's own memory where that is possible."""
        if self.exp2_degree is None or x.dtype != torch.float32:
            return x.exp2_()
        return exp2_polynomial(x, self.exp2_degree)


_chosen = Numerics()


def chosen() -> Numerics:
    """The numerics of calls through the public functions."""
    return _chosen


@contextmanager
def using(numerics: Numerics) -> Iterator[None]:
    """Calls within, forward and backward, take these numerics: for studying what they do to accuracy."""
    global _chosen
    before, _chosen = _chosen, numerics
    try:
        yield
    finally:
        _chosen = before


class OnlineSoftmax:
    """Reference and sum of every row in a block; rows are `(batch, rows, 1)`."""

    def __init__(
        self, shape: torch.Size, like: Tensor, scale: float, sink: Tensor | None, numerics: Numerics
    ) -> None:
        """Scores times `scale` are in natural units, in which `sink` is: every row's score of a key seen first,
        whose value is zero."""
        self.numerics = numerics
        self.scale = scale
        self.threshold = numerics.rescale_threshold / (scale * LOG2E)
        self.reference = like.new_full((*shape, 1), -math.inf)
        self.sum = like.new_zeros((*shape, 1))
        if sink is not None:
            self.reference.copy_(sink / scale)
            # The reference is rounded; the sum is not always 1, and makes up for it.
            rest = sink - self.reference.to(sink.dtype) * scale
            self.sum.copy_(torch.where(sink.isfinite(), torch.exp(rest), 0.0))
        # A CPU asks whether any row must rescale before it does; a GPU would have to wait for the answer.
        self.ask_first = like.device.type == "cpu"

    def update(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take in a tile of scores (overwritten): its weights, and what the accumulator must be scaled by.

        A tile may cover only the first sequences of the block; the state of the others stays.
        """
        count = scores.shape[0]
        reference, total = self.reference[:count], self.sum[:count]
        maximum = scores.amax(-1, keepdim=True)
        grown = maximum > reference + self.threshold
        factor = None
        if not self.ask_first or bool(grown.any()):
            moved = torch.where(grown, maximum, reference)
            factor = torch.exp2(torch.where(grown, reference - moved, 0.0).mul_(self.scale * LOG2E))
            reference.copy_(moved)
            total.mul_(factor)
        # A row that has seen nothing has reference -inf; any finite one leaves its weights at 2**-inf = 0.
        safe = reference.masked_fill(reference == -math.inf, 0.0)
        weights = self.numerics.exp2_(scores.sub_(safe).mul_(self.scale * LOG2E))
        total.add_(weights.sum(-1, keepdim=True))
        return weights, factor

    def divisor(self) -> Tensor:
        """What the accumulator is divided by at the end; 1 for a row that has seen nothing, which is 0."""
        return torch.where(self.sum == 0, 1.0, self.sum)

    def lse(self, dtype: torch.dtype) -> Tensor:
        """Natural log-sum-exp of every row."""
        reference = self.reference.to(dtype)
        lse = reference * self.scale + torch.log(self.sum.to(dtype))
        return torch.where(reference == math.inf, reference, lse)
