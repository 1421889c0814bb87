"""Softmax of one warpgroup's accumulator, two rows a thread.

A wgmma accumulator of 64 x N puts row `16 * warp + lane / 4` (+ 8) and columns `8 i + 2 (lane % 4)` (+ 1) into a
thread's registers in the order `4 i + 2 half + column`, half being which of the two rows.

Scores are kept unscaled; `scale` carries log2(e), so that a probability is `exp2(score * scale - reference)`.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from coflash.kernels.parts import ptx
from coflash.kernels.parts.fixture import Fixture

INFINITY = Float32.inf
# Held maximum: a row sum inside these bounds proves that no probability overflowed bfloat16 or float32 and that
# none worth keeping vanished.
SUM_MOST = 2.0**100
SUM_LEAST = 2.0**-32
HEAVY = 2.0  # a block's sum over the sum before it, above which P counts as rounded


class RowState(Fixture):
    """What a row carries from block to block: its reference, and its sum so far (this thread's columns only)."""

    def __init__(self, scale: Float32, dtype: type[cutlass.Numeric], rounded_sum: bool) -> None:
        self.scale = scale
        self.dtype = dtype
        self.rounded_sum = rounded_sum
        self.reference = cute.make_rmem_tensor((2,), Float32)
        self.sum = cute.make_rmem_tensor((2,), Float32)
        self.rounding = cute.make_rmem_tensor(
            (2,), Float32
        )  # what rounding P added to it, where that matters

    # ---- the first block ----

    def start(self) -> None:
        for half in range(2):
            self.reference[half] = Float32(-INFINITY)
            self.sum[half] = Float32(0.0)
            self.rounding[half] = Float32(0.0)

    def hold(self, scores: cute.Tensor) -> None:
        """Take the block's row maxima as the reference; a row that sees nothing here takes 0."""
        for half, top in enumerate(row_maxima(scores)):
            self.reference[half] = ptx.choose(top == -INFINITY, Float32(0.0), top * self.scale)

    def raise_to(self, scores: cute.Tensor, out: cute.Tensor) -> None:
        """Online: move the reference to the running maximum and bring sum and output down to it."""
        factors, moved = self.raise_reference(scores)
        self.lower(factors)
        self.rescale(out, factors, moved)

    def raise_reference(self, scores: cute.Tensor) -> tuple[list[Float32], Boolean]:
        """The first half of that: the factor of each row, and whether any maximum moved."""
        factors = []
        moved = Boolean(False)
        for half, top in enumerate(row_maxima(scores)):
            before = self.reference[half]
            after = cute.arch.fmax(before, top * self.scale)
            moved = moved | (after > before)
            finite = ptx.choose(after == -INFINITY, Float32(0.0), after)
            factors.append(ptx.exp2(before - finite))
            self.reference[half] = after
        return factors, moved

    def lower(self, factors: list[Float32]) -> None:
        """Bring the sums down to the new reference."""
        for half in range(2):
            self.sum[half] = self.sum[half] * factors[half]
            self.rounding[half] = self.rounding[half] * factors[half]

    @cute.jit
    def rescale(self, out: cute.Tensor, factors, moved: Boolean):
        """Bring the output down; a warp none of whose maxima moved skips the multiplications."""
        if cute.arch.vote_any_sync(moved):
            for half in cutlass.range_constexpr(2):
                scale_row(out, half, factors[half])

    # ---- every block ----

    def exponentials(self, scores: cute.Tensor) -> None:
        """Scores to probabilities, in place."""
        minus = [
            -ptx.choose(self.reference[half] == -INFINITY, Float32(0.0), self.reference[half])
            for half in range(2)
        ]
        for i in range(cute.size(scores)):
            scores[i] = ptx.exp2(scores[i] * self.scale + minus[i // 2 % 2])

    @cute.jit
    def add(self, scores: cute.Tensor, block):
        """A block's probabilities into the row sums: `block` is what `sums` made of them.

        What divides the output should be the sum of what its product used, P rounded to 16 bits: with a held
        maximum a dominating probability is no power of two, and its rounding would not cancel in the quotient.
        Unpacking every element costs, and matters only where one element is most of its row: a warp takes it on
        for blocks that hold more than 2/3 of some thread's sum.  The sum itself stays exact, for the log-sum-exp."""
        if cutlass.const_expr(self.rounded_sum):
            if self.heavy(block):
                for i in cutlass.range_constexpr(0, cute.size(scores), 2):
                    low, high = ptx.unpack_bf16(ptx.pack(scores[i], scores[i + 1], self.dtype))
                    half = i // 2 % 2
                    self.rounding[half] = self.rounding[half] + ((low - scores[i]) + (high - scores[i + 1]))
        for half in cutlass.range_constexpr(2):
            self.sum[half] = self.sum[half] + block[half]

    @cute.jit
    def add_packed(self, words: cute.Tensor, block, first: cutlass.Constexpr[bool] = False):
        """The same from packed probabilities, off the way from the exponentials to the next product.  The first
        block's largest probability is 1: it has no need of the rounding."""
        if cutlass.const_expr(self.rounded_sum and not first):
            if self.heavy(block):
                rounded = [Float32(0.0), Float32(0.0)]
                for i in cutlass.range_constexpr(cute.size(words)):
                    low, high = ptx.unpack_bf16(words[i])
                    rounded[i % 2] = rounded[i % 2] + (low + high)
                for half in cutlass.range_constexpr(2):
                    self.rounding[half] = self.rounding[half] + (rounded[half] - block[half])
        for half in cutlass.range_constexpr(2):
            self.sum[half] = self.sum[half] + block[half]

    def heavy(self, block) -> Boolean:
        """Whether the block is most of some row in this warp."""
        mine = (block[0] > self.sum[0] * HEAVY) | (block[1] > self.sum[1] * HEAVY)
        return cute.arch.vote_any_sync(mine)

    def sums(self, scores: cute.Tensor) -> list[Float32]:
        """Of a block's probabilities, for each of the thread's rows."""
        block = [Float32(0.0), Float32(0.0)]
        for i in range(cute.size(scores)):
            block[i // 2 % 2] = block[i // 2 % 2] + scores[i]
        return block

    def pack(self, scores: cute.Tensor, words: cute.Tensor) -> None:
        """Probabilities to the A operand of the second product."""
        for i in range(cute.size(words)):
            words[i] = ptx.pack(scores[2 * i], scores[2 * i + 1], self.dtype)

    # ---- the end ----

    def finish(self) -> None:
        """The sum over the whole row."""
        for half in range(2):
            self.sum[half] = ptx.quad_sum(self.sum[half])
            if self.rounded_sum:
                self.rounding[half] = ptx.quad_sum(self.rounding[half])

    def add_sink(self, half: int, sink: Float32) -> Float32:
        """Let a score that has no value join the sum; the answer is what it scales the output by."""
        before = self.reference[half]
        after = cute.arch.fmax(before, sink)
        factor = ptx.exp2(before - after)
        self.sum[half] = self.sum[half] * factor + ptx.exp2(sink - after)
        self.rounding[half] = self.rounding[half] * factor
        self.reference[half] = after
        return factor

    def in_bounds(self, half: int) -> Boolean:
        """False also for NaN."""
        return (self.sum[half] < SUM_MOST) & (self.sum[half] > SUM_LEAST)


def scale_row(out: cute.Tensor, half: int, factor: Float32) -> None:
    """Multiply one of a thread's rows."""
    for i in range(cute.size(out)):
        if i // 2 % 2 == half:
            out[i] = out[i] * factor


def row_maxima(scores: cute.Tensor) -> list[Float32]:
    """Largest score of each of a thread's two rows, over the whole row."""
    tops = []
    for half in range(2):
        mine = [scores[i] for i in range(cute.size(scores)) if i // 2 % 2 == half]
        chains = mine[:2]
        for n, score in enumerate(mine[2:]):
            chains[n % 2] = cute.arch.fmax(chains[n % 2], score)
        tops.append(ptx.quad_max(cute.arch.fmax(*chains)))
    return tops


def cap(scores: cute.Tensor, scale: Float32, softcap: Float32) -> None:
    """`softcap * tanh(score * scale / softcap)`, in place, by 1 - 2 / (1 + exp(2 x))."""
    inner = 2.0 * ptx.LOG2_E * scale / softcap
    for i in range(cute.size(scores)):
        grown = ptx.exp2(scores[i] * inner)
        scores[i] = softcap - 2.0 * softcap * cute.arch.rcp_approx(1.0 + grown)


def mask(scores: cute.Tensor, first_column: Int32, low, high) -> None:
    """Scores outside `low[half] <= column < high[half]` to -inf; `low` None: no left bound.

    `first_column` is the key position of the thread's first register."""
    for half in range(2):
        until = high[half] - first_column
        since = None if low is None else low[half] - first_column
        for i in range(cute.size(scores)):
            if i // 2 % 2 != half:
                continue
            column = i // 4 * 8 + i % 2
            hidden = until <= column
            if since is not None:
                hidden = hidden | (since > column)
            scores[i] = ptx.choose(hidden, Float32(-INFINITY), scores[i])
