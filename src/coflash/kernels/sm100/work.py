"""Work items: how the scheduler finds them, and what a role reads of them."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.experimental import primitives as prims

from coflash.kernels.parts.fixture import Fixture
from coflash.kernels.parts.ptx import choose as select
from coflash.kernels.parts.ptx import least, most
from coflash.kernels.sm100 import instructions as op
from coflash.kernels.sm100.config import BLOCK, ROWS, WORK_SLOTS, WORK_WORDS, ForwardConfig
from coflash.kernels.sm100.shared import Ring

L2_BYTES = 60 * 2**20  # of K and V that a section may hold: half of a B200's cache
END, ITEM, SKIP = 0, 1, 2  # what the last word of an item says


class Call(Fixture):
    """The dynamic arguments of one call, by name."""

    def __init__(self, config: ForwardConfig, given: dict, numbers: list) -> None:
        self.config = config
        self.given = given
        self.length_q, self.length_k, self.heads, self.batch, self.group, self.section = numbers

    def __getattr__(self, name: str):
        try:
            return self.given[name]
        except KeyError:
            raise AttributeError(name) from None

    def sequence(self, batch: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Lengths of q (in rows) and k, and where they start in a packed tensor."""
        c = self.config
        offset_q, length_q = Int32(0), self.length_q
        if cutlass.const_expr(c.packed_q):
            offset_q = self.cu_seqlens_q[batch]
            length_q = self.cu_seqlens_q[batch + 1] - offset_q
        if cutlass.const_expr(c.seqused_q):
            length_q = self.seqused_q[batch]
        offset_k, length_k = Int32(0), self.length_k
        if cutlass.const_expr(c.packed_k):
            offset_k = self.cu_seqlens_k[batch]
            length_k = self.cu_seqlens_k[batch + 1] - offset_k
        if cutlass.const_expr(c.seqused_k):
            length_k = self.seqused_k[batch]
        return length_q * c.pack_heads, length_k, offset_q, offset_k


def section_heads(length_k: Int32, columns: int, heads: Int32) -> Int32:
    """Heads in a section: those whose K and V, of `columns` together, fit into half the cache."""
    kv_bytes = 2 * columns * most(least(length_k, Int32(2**20)), Int32(1))
    return most(least(L2_BYTES // kv_bytes, heads), Int32(1))


def place(index: Int32, m_blocks: Int32, heads: Int32, section: Int32) -> tuple[Int32, Int32]:
    """Item `index` of `m_blocks * heads` as (m_block, head).

    Section after section, so that what runs at one time shares K and V in the cache; in a section the longest tiles
    of all its heads first, so that what is left for its end is short."""
    items = section * m_blocks
    number = index // items
    within = index - number * items
    width = least(section, heads - number * section)
    row = within // width
    return m_blocks - 1 - row, number * section + within - row * width


class TileOrder(Fixture):
    """Item number `index` of the whole call, found by a warp; rising numbers are found fastest."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.passed = cute.make_rmem_tensor((2,), Int32)  # sequences passed, and the items they had
        self.passed[0] = Int32(0)
        self.passed[1] = Int32(0)

    @cute.jit
    def locate(self, index, words):
        """Write the item's words to `words`; the last one says whether there is anything to do."""
        c = self.call.config
        if cutlass.const_expr(c.packed_q):
            self.locate_packed(index, words)
        else:
            m_blocks = (self.call.length_q * c.pack_heads + c.rows - 1) // c.rows
            columns = self.call.heads * self.call.batch
            words[7] = Int32(END)
            if index < m_blocks * columns:
                block, column = place(index, m_blocks, columns, self.call.section)
                batch = column // self.call.heads
                self.describe(words, block * c.rows, column - batch * self.call.heads, batch)

    @cute.jit
    def locate_packed(self, index, words):
        """Find the sequence by prefix sums over 32 sequences at a time."""
        c = self.call.config
        lane = cute.arch.lane_idx()
        words[7] = Int32(END)
        if index < self.passed[1]:
            self.passed[0] = Int32(0)
            self.passed[1] = Int32(0)
        searching = self.passed[0] < self.call.batch
        while searching:
            mine = self.passed[0] + lane
            items = Int32(0)
            if mine < self.call.batch:
                rows, _, _, _ = self.call.sequence(mine)
                items = (rows + c.rows - 1) // c.rows * self.call.heads
            until = items
            for step in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(until, offset=1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    until = until + below
            until = until + self.passed[1]
            reached = cute.arch.popc(cute.arch.vote_ballot_sync(until <= index))
            if reached < 32:
                batch = self.passed[0] + reached
                items = cute.arch.shuffle_sync(items, reached)
                within = index - (cute.arch.shuffle_sync(until, reached) - items)
                row = within // self.call.heads
                block = items // self.call.heads - 1 - row
                self.describe(words, block * c.rows, within - row * self.call.heads, batch)
                searching = cutlass.Boolean(False)
            else:
                self.passed[1] = cute.arch.shuffle_sync(until, 31)
                self.passed[0] = self.passed[0] + 32
                searching = self.passed[0] < self.call.batch

    @cute.jit
    def describe(self, words, row, head, batch):
        length_q, length_k, offset_q, offset_k = self.call.sequence(batch)
        values = (row, head, batch, length_q, length_k, offset_q, offset_k)
        for i, value in enumerate(values):
            words[i] = value
        words[7] = select(row < length_q, Int32(ITEM), Int32(SKIP))


class Work(Fixture):
    """The item a role works on: taken from the scheduler's slots, kept in registers."""

    def __init__(self, call: Call, sh, rank: Int32) -> None:
        self.call, self.config, self.sh, self.rank = call, call.config, sh, rank
        self.words = cute.make_rmem_tensor((WORK_WORDS,), Int32)
        self.ring = Ring(sh.work_full, sh.work_free, WORK_SLOTS, producer=False)

    def take_alone(self) -> None:
        """By a role that is one thread."""
        self._read()
        op.arrive(self.ring.empty_at(self.ring.stage))
        self.ring.advance()

    @cute.jit
    def take(self):
        """By a whole warp."""
        self._read()
        cute.arch.sync_warp()
        if prims.elect_sync():
            op.arrive(self.ring.empty_at(self.ring.stage))
        self.ring.advance()

    def _read(self) -> None:
        self.ring.wait_full()
        slot = self.sh.work + self.ring.stage * (4 * WORK_WORDS)
        for half in range(WORK_WORDS // 4):
            for i, word in enumerate(op.load_shared(slot + 16 * half, 4)):
                self.words[4 * half + i] = word

    row = property(lambda self: self.words[0])
    head = property(lambda self: self.words[1])
    batch = property(lambda self: self.words[2])
    length_q = property(lambda self: self.words[3])  # in rows: positions times packed heads
    length_k = property(lambda self: self.words[4])
    offset_q = property(lambda self: self.words[5])
    offset_k = property(lambda self: self.words[6])
    exists = property(lambda self: self.words[7] == ITEM)

    @property
    def batch_q(self) -> Int32:
        return Int32(0) if self.config.packed_q else self.batch

    @property
    def batch_k(self) -> Int32:
        return Int32(0) if self.config.packed_k else self.batch

    @property
    def head_kv(self) -> Int32:
        return self.head if self.config.pack_heads > 1 else self.head // self.call.group

    # ---- which keys ----

    def keys(self, row: Int32) -> tuple[Int32, Int32]:
        """First key that the query of this row sees, and the first beyond those it sees."""
        c = self.config
        position = row // c.pack_heads + self.length_k - self.length_q // c.pack_heads
        low, high = Int32(0), self.length_k
        if c.bounded_left:
            low = most(position - self.call.window_left, low)
        if c.bounded_right:
            high = least(position + self.call.window_right + 1, high)
        return low, high

    def blocks_of(self, tile: int) -> tuple[Int32, Int32]:
        """Blocks [low, high) that tile `tile`'s rows see, of all CTAs; (0, 0) for none."""
        span = ROWS * self.config.ctas
        first = self.row + tile * span
        last = least(first + span, self.length_q) - 1
        low = self.keys(first)[0] // BLOCK
        high = (most(self.keys(last)[1], Int32(0)) + BLOCK - 1) // BLOCK
        some = (first < self.length_q) & (low < high)
        nothing = Int32(0)
        return select(some, low, nothing), select(some, high, nothing)

    def blocks(self) -> tuple[Int32, Int32]:
        """Blocks that any tile sees: those that are loaded."""
        low, high = self.blocks_of(0)
        for tile in range(1, self.config.q_tiles):
            other_low, other_high = self.blocks_of(tile)
            low = select(other_low < other_high, least(low, other_low), low)
            low = select(high == 0, other_low, low)
            high = most(high, other_high)
        return low, high
