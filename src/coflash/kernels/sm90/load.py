"""The load warp of the Hopper forward: hands out tiles and feeds the rings."""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync

from coflash.kernels.parts import ptx, tiles
from coflash.kernels.parts.control import Branch, when
from coflash.kernels.parts.fixture import Fixture, Registers
from coflash.kernels.parts.ring import Ring
from coflash.kernels.sm90.config import ROWS, WORK_SLOTS
from coflash.kernels.sm90.shared import (
    BATCH,
    END,
    EXACT,
    FIRST_K,
    FIRST_Q,
    HEAD,
    HIGH,
    KIND,
    LOW,
    M_BLOCK,
    NOTHING,
    OWN_HIGH,
    OWN_LOW,
    SEQLEN_K,
    SEQLEN_Q,
    TILE,
    Operands,
    Shared,
    v_layout,
)


class Loader(Fixture):
    """One warp.

    A tile is published in a work slot, then its Q, K and V are copied, as far ahead of the warpgroups as
    slots and stages allow.  A slot that comes back with a failed verdict is published again, to be done the
    exact way; the last slots are awaited for their verdicts before the end is announced."""

    def __init__(self, shared: Shared, atoms, tensors, operands: Operands) -> None:
        c = self.config = shared.config
        self.shared, self.operands = shared, operands
        self.q_atom, self.k_atom, self.v_atom = atoms
        self.q_tensor, self.k_tensor, self.v_tensor = tensors
        self.batch, self.heads_q, self.heads_kv, self.max_q, self.max_k = operands.shape
        self.heads = self.heads_kv if c.pack_heads > 1 else self.heads_q  # that tiles are counted by
        self.lane = cute.arch.lane_idx()
        self.work, self.failed = shared.work(), shared.verdicts()
        self.slots = shared.slots(producer=True)
        # One Q ring for all warpgroups: theirs move in step.
        self.q_ring, self.k_ring, self.v_ring = shared.rings(producer=True)
        self.block, _, _ = cute.arch.block_idx()
        self.blocks, _, _ = cute.arch.grid_dim()
        self.info = Registers(Int32, 8)  # the tile in hand, in the words of a work slot
        self.short_v_phase = Registers(Int32, 1)
        self.short_v_phase[0] = Int32(0)
        self.drawn = Registers(Int32, 1)  # lane 0: what the counter gave for the next tile
        self.drawn[0] = Int32(0)

    @cute.jit
    def tiles(self):
        """Every tile of the block, and the end."""
        c = self.config
        verdicts = WORK_SLOTS if cutlass.const_expr(c.softmax == "held") else 1
        tile = self.block  # the first tile is the block's own, the rest come from the counter
        settled = Int32(0)  # slots in a row that came back with nothing left to do
        kind = Int32(TILE)
        while kind != END:
            self.slots.wait_empty()
            slot = self.slots.stage
            again = Boolean(False)
            if cutlass.const_expr(c.softmax == "held"):
                again = cute.arch.vote_any_sync(self.failed[self.lane % 16, slot] != 0)
            if again:
                for i in cutlass.range_constexpr(8):
                    self.info[i] = self.work[i, slot]
                kind = Int32(EXACT)
                settled = Int32(0)
            else:
                kind, tiles_in_all = self.find_tile(tile)
                if kind != TILE:
                    if cutlass.const_expr(c.dynamic):
                        # As many tiles are asked for as there are: the block told the last number cleans up.
                        if tile - self.blocks == tiles_in_all - 1:
                            self.operands.tile_counter[0] = Int32(0)
                    settled = settled + 1
                    if settled == verdicts:
                        kind = Int32(END)
            low, high = self.tile_blocks()
            own_low, own_high = self.own_blocks(self.lane)
            if self.lane < c.warpgroups:
                self.work[OWN_LOW + self.lane, slot] = own_low
                self.work[OWN_HIGH + self.lane, slot] = own_high
            cute.arch.sync_warp()
            if self.lane == 0:
                self.work[KIND, slot] = kind
                for i in cutlass.range_constexpr(1, 8):
                    self.work[i, slot] = self.info[i]
                self.work[LOW, slot] = low
                self.work[HIGH, slot] = high
                for warp in cutlass.range_constexpr(4 * c.warpgroups):
                    self.failed[warp, slot] = Int32(0)
                cute.arch.mbarrier_arrive(self.slots.full + slot)
            cute.arch.sync_warp()
            self.slots.advance()
            if (kind == TILE) | (kind == EXACT):
                self.load_tile(low, high, kind == TILE)
                if kind == TILE:
                    tile = tile + self.blocks
                    if cutlass.const_expr(c.dynamic):
                        tile = self.blocks + cute.arch.shuffle_sync(self.drawn[0], 0)

    # ---- where a tile lies ----

    def find_tile(self, tile):
        """Where tile number `tile` lies, into `info`.  The answer is TILE, or NOTHING behind the last one and
        then the number of tiles there are."""
        if self.config.packed_q or self.config.seqused_q:
            return self.find_uneven_tile(tile)
        info, heads = self.info, self.heads
        m_blocks = cute.ceil_div(self.max_q, self.config.positions * self.config.warpgroups)
        tiles_in_all = m_blocks * heads * self.batch
        there = tile < tiles_in_all
        with when(there):
            beside = self.beside(m_blocks, heads * self.batch)
            m_block, head = tiles.place(tile, m_blocks, heads * self.batch, beside)
            b = head // heads
            info[M_BLOCK] = m_block
            info[HEAD] = head - b * heads
            info[BATCH] = b
            info[SEQLEN_Q] = self.max_q
            info[FIRST_Q] = Int32(0)
            self.find_keys()
        return ptx.choose(there, Int32(TILE), Int32(NOTHING)), tiles_in_all

    def beside(self, m_blocks, heads) -> Int32:
        """Heads at the end whose tiles go longest first: where tiles differ in length."""
        return tiles.heads_beside(m_blocks, heads, self.blocks) if self.config.bounded_right else Int32(0)

    @cute.jit
    def find_uneven_tile(self, tile):
        """The same where sequences differ: 32 of them at a time, lane i counts the tiles of `first + i`."""
        c = self.config
        kind, before, first = Int32(NOTHING), Int32(0), Int32(0)
        while (kind == NOTHING) & (first < self.batch):
            length, begin = self.query_span(first + self.lane)
            m_blocks = cute.ceil_div(length, c.positions * c.warpgroups)
            count = m_blocks * self.heads
            through = count
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(through, offset=1 << step, mask_and_clamp=0)
                if self.lane >= (1 << step):
                    through = through + lower
            total = cute.arch.shuffle_sync(through, 31)
            if tile < before + total:
                kind = Int32(TILE)
                ahead = cute.arch.vote_ballot_sync(before + through <= tile)
                owner = cute.arch.popc(ahead)
                start = before + cute.arch.shuffle_sync(through - count, owner)
                self.info[BATCH] = first + owner
                self.info[SEQLEN_Q] = cute.arch.shuffle_sync(length, owner)
                self.info[FIRST_Q] = cute.arch.shuffle_sync(begin, owner)
                self.find_keys()
                own_blocks = cute.arch.shuffle_sync(m_blocks, owner)
                beside = self.beside(own_blocks, self.heads)
                m_block, head = tiles.place(tile - start, own_blocks, self.heads, beside)
                self.info[M_BLOCK] = m_block
                self.info[HEAD] = head
            first = first + 32
            before = before + total
        return kind, before

    @cute.jit
    def query_span(self, b):
        """Length and first row of sequence b's queries; 0 behind the last sequence."""
        c = self.config
        length, begin = Int32(0), Int32(0)
        if b < self.batch:
            length = Int32(self.max_q)
            if cutlass.const_expr(c.packed_q):
                begin = self.operands.cu_seqlens_q[b]
                length = self.operands.cu_seqlens_q[b + 1] - begin
            if cutlass.const_expr(c.seqused_q):
                length = self.operands.seqused_q[b]
        return length, begin

    def find_keys(self) -> None:
        """Length and first row of the keys of the sequence in `info`."""
        c, info, operands = self.config, self.info, self.operands
        b = info[BATCH]
        info[SEQLEN_K] = Int32(self.max_k)
        info[FIRST_K] = Int32(0)
        if c.packed_k:
            info[FIRST_K] = operands.cu_seqlens_k[b]
            info[SEQLEN_K] = operands.cu_seqlens_k[b + 1] - info[FIRST_K]
        if c.seqused_k:
            info[SEQLEN_K] = operands.seqused_k[b]

    def draw(self, fresh: Boolean) -> None:
        """Ask for the block's next tile: from the counter, which hands out what lies behind the blocks' first tiles.
        As late as the answer can be awaited, for a tile promised early to one block is missed by another at the end."""
        if self.config.dynamic:
            with when(fresh & (self.lane == 0)):
                self.drawn[0] = cute.arch.atomic_add(self.operands.tile_counter.iterator, Int32(1))

    # ---- the keys it sees ----

    def tile_blocks(self) -> tuple[Int32, Int32]:
        """Blocks of keys [low, high) that some of the tile's queries see."""
        rows = self.config.positions * self.config.warpgroups
        return self.key_blocks(self.info[M_BLOCK] * rows, rows)

    def own_blocks(self, group) -> tuple[Int32, Int32]:
        """Those of one warpgroup's rows."""
        c = self.config
        return self.key_blocks((self.info[M_BLOCK] * c.warpgroups + group) * c.positions, c.positions)

    def key_blocks(self, first: Int32, count: int) -> tuple[Int32, Int32]:
        """Those of the query positions [first, first + count)."""
        c, operands = self.config, self.operands
        seqlen_q, seqlen_k = self.info[SEQLEN_Q], self.info[SEQLEN_K]
        last = ptx.least(first + count, seqlen_q) - 1
        offset = seqlen_k - seqlen_q
        until, since = seqlen_k, Int32(0)
        if c.bounded_right:
            until = ptx.least(until, last + offset + operands.window_right + 1)
        if c.bounded_left:
            since = ptx.most(since, first + offset - operands.window_left)
        until = ptx.most(until, Int32(0))
        high = (until + c.tile_n - 1) // c.tile_n
        low = since // c.tile_n
        visible = (until > since) & (first < seqlen_q)
        return low, ptx.choose(visible, high, low)

    # ---- its copies ----

    def load_tile(self, low, high, fresh: Boolean) -> None:
        """Q, then K one block ahead of V, from the last block to the first."""
        c = self.config
        copies = Copies(self)
        some = Branch(high > low)
        with some.then():
            j = high - 1
            copies.load_q(0)
            copies.load_k(j)
            copies.load_other_q()
            self.q_ring.advance()
            if c.packed_k or c.seqused_k:
                # What lies behind the last key is another sequence's or nobody's: it must not reach P V as
                # 0 * NaN.  Zeros go there before the stage is called full.
                with when(j > low):
                    copies.load_k(j - 1)
                short = Branch((j + 1) * c.tile_n > copies.seqlen_k)
                with short.then():
                    copies.load_short_v(j)
                with short.otherwise():
                    copies.load_v(j)
                j = j - 1
            copies.load_blocks(j, low)
            self.draw(fresh)
            with when(j >= low):
                copies.load_v(low)
        with some.otherwise():
            self.draw(fresh)


class Copies(Fixture):
    """The blocks of the tile in hand: where they lie in global memory, and their stages."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        c, info, shared = loader.config, loader.info, loader.shared
        head, b = info[HEAD], info[BATCH]
        self.m_block, self.seqlen_k = info[M_BLOCK], info[SEQLEN_K]
        head_kv = head if c.pack_heads > 1 else head // (loader.heads_q // loader.heads_kv)

        q, k, v = loader.q_tensor, loader.k_tensor, loader.v_tensor
        q = q[None, None, head] if c.packed_q else q[None, None, head, b]
        if c.packed_q:
            at = (0, info[FIRST_Q]) if c.pack_heads > 1 else info[FIRST_Q]
            q = cute.domain_offset((at, 0), q)
        if c.packed_k:
            k = cute.domain_offset((info[FIRST_K], 0), k[None, None, head_kv])
            v = cute.domain_offset((0, info[FIRST_K]), v[None, None, head_kv])
        else:
            k, v = k[None, None, head_kv, b], v[None, None, head_kv, b]
        shared_q = shared.q
        rows: Any = ROWS
        if c.pack_heads > 1:
            rows = (c.pack_heads, c.positions)
            if c.pack_heads * c.positions < ROWS:
                some = cute.make_layout(
                    (c.pack_heads * c.positions, c.tile_d, c.warpgroups * c.q_stages),
                    stride=(1, ROWS, ROWS * c.tile_d),
                )
                shared_q = cute.make_tensor(shared_q.iterator, cute.composition(shared_q.layout, some))
        q = cute.local_tile(q, (rows, c.tile_d), ((0, None), 0) if c.pack_heads > 1 else (None, 0))
        k = cute.local_tile(k, (c.tile_n, c.tile_d), (None, 0))
        v = cute.local_tile(v, (c.tile_d_v, c.tile_n), (0, None))
        self.q_to, self.q_from = partition(loader.q_atom, shared_q, q)
        self.k_to, self.k_from = partition(loader.k_atom, shared.k, k)
        self.v_to, self.v_from = partition(loader.v_atom, shared.v, v)
        self.q_bytes = 2 * c.pack_heads * c.positions * c.tile_d
        self.k_bytes = 2 * c.tile_n * c.tile_d
        self.v_bytes = 2 * c.tile_n * c.tile_d_v

    def load_q(self, w: int | Int32) -> None:
        """Q of warpgroup w; the ring is to be advanced after the last."""
        loader, c = self.loader, self.loader.config
        into = loader.q_ring
        at = w * c.q_stages + into.stage
        cute.arch.mbarrier_wait(into.empty + at, into.phase)
        source = self.q_from[None, self.m_block * c.warpgroups + w]
        fill(loader.q_atom, source, self.q_to[None, at], into.full + at, self.q_bytes)

    @cute.jit
    def load_other_q(self):
        """Q of all warpgroups but the first."""
        for w in cutlass.range(1, self.loader.config.warpgroups, unroll=1):
            self.load_q(w)

    def load_k(self, j: Int32) -> None:
        fill_next(self.loader.k_ring, self.loader.k_atom, self.k_from, self.k_to, j, self.k_bytes)

    def load_v(self, j: Int32) -> None:
        fill_next(self.loader.v_ring, self.loader.v_atom, self.v_from, self.v_to, j, self.v_bytes)

    @cute.jit
    def load_blocks(self, j, low):
        """V of blocks j to low but the last, each after the next one's K."""
        for i in cutlass.range(j - low, unroll=1):
            self.load_k(j - i - 1)
            self.load_v(j - i)

    @cute.jit
    def load_short_v(self, j):
        """A V block that ends before its stage does: copied, then cleared behind the last key."""
        loader, c = self.loader, self.loader.config
        into = loader.v_ring
        into.wait_empty()
        stage = into.stage
        landed = loader.shared.storage.v_landed.data_ptr()
        fill(loader.v_atom, self.v_from[None, j], self.v_to[None, stage], landed, self.v_bytes)
        phase = loader.short_v_phase[0]
        cute.arch.mbarrier_wait(landed, phase)
        loader.short_v_phase[0] = phase ^ 1
        plain = v_layout(c).outer
        base = loader.shared.storage.v.data_ptr()
        chunks = c.tile_d_v // 8
        i = (self.seqlen_k - j * c.tile_n) * chunks + loader.lane
        while i < c.tile_n * chunks:
            at = cute.crd2idx((8 * (i % chunks), i // chunks, stage), plain)
            ptx.zero_16_shared_bytes(base + at)
            i = i + 32
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if loader.lane == 0:
            cute.arch.mbarrier_arrive(into.full + stage)
        into.advance()


def partition(atom, shared, source):
    """A copy's two sides, by stage and by tile."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(source, 0, 2)
    )


def fill(atom, source, target, full: cute.Pointer, size: int) -> None:
    """Start one copy that completes `full`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(atom, source, target, tma_bar_ptr=full)


def fill_next(into: Ring, atom, source, target, j: Int32, size: int) -> None:
    """Start the copy of block j into the ring's next stage."""
    into.wait_empty()
    fill(atom, source[None, j], target[None, into.stage], into.full + into.stage, size)
    into.advance()
