"""Softmax of one Q tile, a row a thread, over a block of 128 keys in tensor memory."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from coflash.kernels.parts import exp2 as exponentials
from coflash.kernels.parts.fixture import Fixture
from coflash.kernels.parts.ptx import LOG2_E
from coflash.kernels.parts.ptx import choose as select
from coflash.kernels.sm100 import chunks
from coflash.kernels.sm100 import instructions as op
from coflash.kernels.sm100.config import BLOCK, ROWS
from coflash.kernels.sm100.shared import Barrier, Ring

INFINITY = Float32.inf
EVERY_LANE = 0xFFFFFFFF
TOLERANCE = (
    8.0  # log2 units that a row's maximum may exceed its reference by before sum and O are brought down
)
HEAVY = 2.0  # a block's sum over the sum before it, above which a held reference is looked at again
SUM_MOST = 2.0**26  # of a block with a held reference: below what the polynomial gives where its range ends
CHUNK = 32  # columns of S and P moved between tensor memory and registers at a time
RESCALED = 16  # columns of O


class Rows(Fixture):
    """One row a thread: its reference (in log2 units), its sum so far, and what happens to it block by block.

    A probability is `exp2(score * scale - reference)`.  The reference is the row's maximum at some earlier block;
    the final division by the sum makes the result the same for any reference.
    """

    width = BLOCK  # columns of a block that a thread computes

    def __init__(self, forward, call, sh, tile: Int32, lanes: Int32) -> None:
        self.forward, self.config, self.lanes = forward, forward.config, lanes
        c = self.config
        self.s = lanes + c.s_columns + tile * BLOCK
        self.o, self.o_width = lanes + c.o_columns + tile * c.tile_d_v, c.tile_d_v
        self.s_full = Barrier(sh.s_full + 8 * tile)
        self.p_early, self.p_late = sh.p_early + 8 * tile, sh.p_late + 8 * tile
        self.scale = call.softmax_scale * LOG2_E
        self.cap = None
        if c.softcap:
            self.cap = (self.scale * 2.0 / call.softcap, call.softcap * -2.0, call.softcap)
            self.scale = Float32(LOG2_E)
        self.state = cute.make_rmem_tensor((2,), Float32)  # the reference, and the sum so far
        self.fresh = cute.make_rmem_tensor((1,), Int32)  # whether O holds nothing of this row yet

    def start(self) -> None:
        self.state[0] = Float32(-INFINITY)
        self.state[1] = Float32(0.0)
        self.fresh[0] = Int32(1)

    def reference(self) -> Float32:
        return self.state[0]

    def total(self) -> Float32:
        return self.state[1]

    # ---- one block ----

    @cute.jit
    def block(self, low, high, whole):
        """S of a block to P. Unless it is `whole`, some row does not see all of it: columns outside [low, high) are
        invisible to this thread's."""
        self.wait_for_scores()
        prims.tcgen05_fence("after_thread_sync")
        if whole:
            self.online(low, high, False)
        else:
            self.online(low, high, True)
        self.fresh[0] = Int32(0)

    @cute.jit
    def online(self, low, high, masked: cutlass.Constexpr[bool]):
        """Find the block's maximum first, and move the reference if it has to be."""
        scores, top = self.read(low, high, masked)
        top = self.agree(top * self.scale)
        if prims.vote_sync(EVERY_LANE, top - self.state[0] > TOLERANCE, "any"):
            self.raise_reference(top)
        minus = -self.state[0]
        if cutlass.const_expr(masked):
            minus = select(self.state[0] == -INFINITY, Float32(0.0), minus)
        self.write(scores, minus, masked)

    def wait_for_scores(self) -> None:
        self.s_full.wait()

    def agree(self, top: Float32) -> Float32:
        """The row's maximum, from this thread's."""
        return top

    def wait_for_o(self) -> None:
        """Until the product of the last block is in O: it came before this block's scores."""

    def announce(self, done: int) -> None:
        """Tell the MMA thread that P of the first `done` keys is there."""
        early = self.config.early and done == self.config.early_keys
        if early or done == BLOCK:
            op.tmem_stored()
            prims.tcgen05_fence("before_thread_sync")
            self.forward.arrive_at_leader(self.p_early if early else self.p_late)

    def read(self, low: Int32, high: Int32, masked: bool) -> tuple[list, Float32]:
        """The row's scores, and the largest. The maximum of a chunk is taken while the next one is on its way."""
        bounds = {}
        if masked:
            bounds = {"high": high} | ({"low": low} if self.config.bounded_left else {})
        scores, tops = [], [Float32(-INFINITY), Float32(-INFINITY)]
        following = chunks.load(self.s, CHUNK)
        for first in range(0, self.width, CHUNK):
            chunk, tops = chunks.settle(following, tops, first, cap=self.cap, **bounds)
            if first + CHUNK < self.width:
                following = chunks.load(self.s + first + CHUNK, CHUNK)
            scores.append(chunk)
        return scores, cute.arch.fmax(Float32(tops[0]), Float32(tops[1]))

    @cute.jit
    def raise_reference(self, top):
        """Some row of the warp grew too far: bring its sum and its O down to its new maximum."""
        before = self.state[0]
        after = cute.arch.fmax(before, top)
        finite = select(after == -INFINITY, Float32(0.0), after)
        factor = exponentials.exp2(before - finite)
        self.state[0] = after
        self.state[1] = self.state[1] * factor
        factors = op.twice(factor)
        if self.fresh[0] == 0:
            self.wait_for_o()
            if cutlass.const_expr(self.config.softmax == "held"):
                # In two places of the kernel: a loop, for the compiler's time.
                for i in cutlass.range(self.o_width // RESCALED, unroll=1):
                    self.lower(self.o + i * RESCALED, factors)
            else:
                for first in cutlass.range_constexpr(0, self.o_width, RESCALED):
                    self.lower(self.o + first, factors)
            # The products that read O wait for P, which this warp stores and announces later.

    def lower(self, columns: Int32, factors: Int64) -> None:
        """RESCALED columns of O."""
        chunk, _ = chunks.settle(chunks.load(columns, RESCALED))
        chunks.store(columns, chunks.scaled(chunk, factors))

    def write(self, scores: list, minus: Float32, masked: bool) -> None:
        """Probabilities to tensor memory over S, the first part announced early, and their sum."""
        c = self.config
        sums = None
        factors = chunks.factors(self.scale, minus)
        for i, chunk in enumerate(scores):
            share = 0 if masked else c.polynomial
            words, sums = chunks.probabilities(chunk, factors, sums, c.dtype, share)
            chunks.store(self.p + i * (CHUNK // 2), words)
            self.announce((i + 1) * CHUNK)
        self.add(op.total(sums))

    def add(self, block: Float32) -> None:
        """A block's sum to the row's."""
        self.state[1] = self.state[1] + block

    @property
    def p(self) -> Int32:
        """First column of this thread's part of P, which overlays S."""
        return self.s


class HeldRows(Rows):
    """The reference is held: blocks that every row sees whole compute no maximum.

    Their probabilities are computed with the reference at hand, and their sum tells whether that will do. It will not
    where a block's sum is more than twice all before it: there a probability may dominate its row, and would not be
    a power of two, whose rounding cancels in the quotient; and not where the sum is out of bounds, for then one may
    have overflowed, or have met the end of the polynomial's range. S is still in place, and the block is done again,
    online, before P of it was written. After such a block the next ones are done online at once, until one would have
    passed: rows of few large scores cost one attempt, not one a block.
    """

    def __init__(self, forward, call, sh, tile: Int32, lanes: Int32) -> None:
        super().__init__(forward, call, sh, tile, lanes)
        self.bound = cute.make_rmem_tensor((1,), Float32)  # what the next block's sum may be
        self.calm = cute.make_rmem_tensor((1,), Int32)  # whether to try the next block without a maximum
        self.look = cute.make_rmem_tensor((1,), Int32)  # whether to look at its maximum first all the same

    def start(self) -> None:
        super().start()
        self.calm[0] = Int32(1)
        self.look[0] = Int32(1)

    @cute.jit
    def block(self, low, high, whole):
        self.wait_for_scores()
        prims.tcgen05_fence("after_thread_sync")
        again = Int32(1)
        if whole & (self.calm[0] == 1):
            if self.look[0] == 1:
                self.hold()
            again = self.held()
        self.look[0] = Int32(0)
        if again == 1:
            self.online(low, high, True)
            if whole == cutlass.Boolean(False):
                # A block in part says nothing of whole ones: some rows may have seen few of its keys.
                self.calm[0] = Int32(1)
                self.look[0] = Int32(1)
        self.fresh[0] = Int32(0)

    @cute.jit
    def hold(self):
        """Have a reference that is good for this block: nothing came before it, or too little to tell."""
        tops = [Float32(-INFINITY), Float32(-INFINITY)]
        for first in range(0, BLOCK, CHUNK):
            _, tops = chunks.settle(chunks.load(self.s + first, CHUNK), tops, cap=self.cap)
        top = cute.arch.fmax(Float32(tops[0]), Float32(tops[1])) * self.scale
        if prims.vote_sync(EVERY_LANE, top - self.state[0] > TOLERANCE, "any"):
            self.raise_reference(top)
        self.bound[0] = Float32(SUM_MOST)

    @cute.jit
    def held(self):
        """Without a maximum. Answers 1 if the block has to be done again, for all rows of the warp."""
        words, block = self.compute()
        again = Int32(1)
        if prims.vote_sync(EVERY_LANE, block <= self.bound[0], "all"):  # not for NaN
            self.keep(words, block)
            again = Int32(0)
        return again

    def compute(self) -> tuple[list, Float32]:
        c = self.config
        factors = chunks.factors(self.scale, -self.state[0])
        words, sums = [], None
        following = chunks.load(self.s, CHUNK)
        for first in range(0, BLOCK, CHUNK):
            chunk, _ = chunks.settle(following, cap=self.cap)
            if first + CHUNK < BLOCK:
                following = chunks.load(self.s + first + CHUNK, CHUNK)
            more, sums = chunks.probabilities(chunk, factors, sums, c.dtype, c.polynomial)
            words.append(more)
        return words, op.total(sums)

    def keep(self, words: list, block: Float32) -> None:
        for i, chunk in enumerate(words):
            chunks.store(self.p + i * (CHUNK // 2), chunk)
        self.announce(BLOCK)
        self.count(block)

    def add(self, block: Float32) -> None:
        fits = block <= cute.arch.fmin(self.state[1] * HEAVY, Float32(SUM_MOST))
        self.calm[0] = Int32(prims.vote_sync(EVERY_LANE, fits, "all"))
        self.count(block)

    def count(self, block: Float32) -> None:
        super().add(block)
        self.bound[0] = cute.arch.fmin(self.state[1] * HEAVY, Float32(SUM_MOST))


class HalfRows(Rows):
    """Half a row a thread, where one Q tile is all a CTA has room for: both warpgroups work on every block.

    S has two buffers, so the scores of the next block are computed before the product with V of this one."""

    width = BLOCK // 2

    def __init__(self, forward, call, sh, half: Int32, lanes: Int32) -> None:
        super().__init__(forward, call, sh, Int32(0), lanes)
        c = self.config
        self.half = half
        self.o, self.o_width = self.o + half * (c.tile_d_v // 2), c.tile_d_v // 2
        self.ring = Ring(sh.s_full, sh.s_full, 2, producer=False)
        self.p_ready = sh.p_late
        self.o_done = sh.o_done
        self.blocks = cute.make_rmem_tensor((1,), Int32)  # so far, of all items
        self.blocks[0] = Int32(0)
        self.place = cute.make_rmem_tensor((2,), Int32)  # columns of this thread's part of S and P
        thread = cute.arch.thread_idx()[0] % ROWS
        self.mine = sh.tops + 4 * (half * ROWS + thread)
        self.other = sh.tops + 4 * ((1 - half) * ROWS + thread)

    @property
    def s(self) -> Int32:
        return self.place[0]

    @s.setter
    def s(self, value: Int32) -> None:
        """Chosen block by block."""

    @property
    def p(self) -> Int32:
        return self.place[1]

    def wait_for_scores(self) -> None:
        self.ring.wait_full()
        buffer = self.lanes + self.config.s_columns + self.ring.stage * BLOCK
        self.place[0] = buffer + self.half * self.width
        self.place[1] = buffer + self.half * (self.width // 2)

    def agree(self, top: Float32) -> Float32:
        """Largest of both halves. Two slots take turns, so that one barrier a block is enough.

        The barrier also lets the second half's P overlay the first half's S: both have read theirs."""
        slot = self.ring.stage * (8 * ROWS)
        op.store_shared(self.mine + slot, [top])
        prims.tcgen05_fence("before_thread_sync")
        prims.barrier_cta_sync(1, thread_count=2 * ROWS)
        prims.tcgen05_fence("after_thread_sync")
        return cute.arch.fmax(top, op.load_shared(self.other + slot, 1, Float32)[0])

    def wait_for_o(self) -> None:
        op.wait(self.o_done, (self.blocks[0] - 1) & 1)
        prims.tcgen05_fence("after_thread_sync")

    def announce(self, done: int) -> None:
        if done == self.width:
            op.tmem_stored()
            prims.tcgen05_fence("before_thread_sync")
            self.forward.arrive_at_leader(self.p_ready + 8 * self.ring.stage)
            self.ring.advance()
            self.blocks[0] = self.blocks[0] + 1
