"""Softmax of one warpgroup's accumulator, two rows a thread.

A wgmma accumulator of 64 x N puts row `16 * warp + lane / 4` (+ 8) and columns `8 i + 2 (lane % 4)` (+ 1) into a
thread's registers in the order `4 i + 2 half + column`, half being which of the two rows.

Scores are kept unscaled; `scale` carries log2(e), so that a probability is `exp2(score * scale - reference)`.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from coflash.kernels.parts import ptx, vectors
from coflash.kernels.parts.control import when
from coflash.kernels.parts.fixture import Fixture, Registers

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
        self.reference = Registers(Float32, 2)
        self.sum = Registers(Float32, 2)
        self.rounding = Registers(Float32, 2)  # what rounding P added to it, where that matters

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

    def settle_reference(self) -> None:
        """Both rows' references to adjacent registers, for the loops: these lie in different banks, and the assembler
        lets multiply-adds that take them in turn re-use both.  Two of one bank are read each time, which costs up to
        7 %."""
        self.reference[0], self.reference[1] = ptx.adjacent(self.reference[0], self.reference[1])

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

    def rescale(self, out: cute.Tensor, factors: list[Float32], moved: Boolean) -> None:
        """Bring the output down; a warp none of whose maxima moved skips the multiplications."""
        with when(cute.arch.vote_any_sync(moved)):
            scale_rows(out, factors)

    # ---- every block ----

    def exponentials(self, scores: cute.Tensor, held: bool = False, part: int = 0, parts: int = 1) -> None:
        """Scores to probabilities, in place, or one of several parts of them; a held reference is never -inf."""
        minus = [
            -self.reference[half]
            if held
            else -ptx.choose(self.reference[half] == -INFINITY, Float32(0.0), self.reference[half])
            for half in range(2)
        ]
        size = cute.size(scores) // parts
        if parts > 1:
            scores = cute.make_tensor(scores.iterator + part * size, cute.make_layout(size))
        scores_now = vectors.load(scores)
        shifted = scores_now * self.scale + vectors.by_row(minus, size)
        vectors.store(scores, vectors.exp2(shifted))

    def add(self, words: cute.Tensor, block: list[Float32], first: bool = False) -> None:
        """A block into the row sums: `words` are its packed probabilities, `block` is what `sums` made of them.

        What divides the output should be the sum of what its product used, P rounded to 16 bits: with a held
        maximum a dominating probability is no power of two, and its rounding would not cancel in the quotient.
        (The first block's largest is 1.)  Unpacking every element costs, and matters only where one element is most
        of its row: a warp takes it on for blocks that hold more than 2/3 of some thread's sum.  The sum itself stays
        exact, for the log-sum-exp."""
        if self.rounded_sum and not first:
            with when(self.heavy(block)):
                self.add_rounding(vectors.load(words), block)
        for half in range(2):
            self.sum[half] = self.sum[half] + block[half]

    def add_rounding(self, words: vectors.Vector, block) -> None:
        """What rounding to 16 bits made of a block's sums."""
        low, high = vectors.unpack_bf16(words)
        both = low + high
        for half in range(2):
            rounded = vectors.total(both.take(list(range(half, both.size, 2))))
            self.rounding[half] = self.rounding[half] + (rounded - block[half])

    def heavy(self, block) -> Boolean:
        """Whether the block is most of some row in this warp."""
        mine = (block[0] > self.sum[0] * HEAVY) | (block[1] > self.sum[1] * HEAVY)
        return cute.arch.vote_any_sync(mine)

    def sums(self, scores: cute.Tensor) -> list[Float32]:
        """Of a block's probabilities, for each of the thread's rows."""
        return vectors.row_sums(vectors.load(scores))

    def pack(self, scores: cute.Tensor, words: cute.Tensor) -> None:
        """Probabilities to the A operand of the second product."""
        vectors.store(words, vectors.words(vectors.pack(vectors.load(scores), self.dtype)))

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


def scale_rows(out: cute.Tensor, factors: list[Float32]) -> None:
    """Multiply a thread's two rows."""
    halves = vectors.rows(vectors.load(out))
    vectors.store(out, vectors.join([row * factor for row, factor in zip(halves, factors, strict=True)]))


def finite(words: list[Int32]) -> Boolean:
    """Whether packed bfloat16 hold no infinity and no NaN: 0 times any of them is not 0."""
    probes = [Int32(0), Int32(0)]
    for n, word in enumerate(words):
        probes[n % 2] = ptx.times_zero_plus(word, probes[n % 2])
    return ((probes[0] | probes[1]) & Int32(0x7FFF7FFF)) == 0


def row_maxima(scores: cute.Tensor) -> list[Float32]:
    """Largest score of each of a thread's two rows, over the whole row."""
    return [ptx.quad_max(vectors.largest(row)) for row in vectors.rows(vectors.load(scores))]


def cap(scores: cute.Tensor, scale: Float32, softcap: Float32) -> None:
    """`softcap * tanh(score * scale / softcap)`, in place, by 1 - 2 / (1 + exp(2 x))."""
    inner = 2.0 * ptx.LOG2_E * scale / softcap
    for i in range(cute.size(scores)):
        grown = ptx.exp2(scores[i] * inner)
        scores[i] = softcap - 2.0 * softcap * cute.arch.rcp_approx(1.0 + grown)


def mask(scores: cute.Tensor, first_column: Int32, low, high) -> None:
    """Scores outside `low[half] <= column < high[half]` to -inf; `low` None: no left bound.

    `first_column` is the key position of the thread's first register."""
    halves = vectors.rows(vectors.load(scores))
    columns = [i // 2 * 8 + i % 2 for i in range(halves[0].size)]
    for half in range(2):
        since = None if low is None else low[half] - first_column
        hidden = vectors.outside(columns, since, high[half] - first_column)
        halves[half] = vectors.choose(hidden, Float32(-INFINITY), halves[half])
    vectors.store(scores, vectors.join(halves))
