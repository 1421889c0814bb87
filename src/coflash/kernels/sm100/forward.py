"""The Blackwell forward: attention with both products on tcgen05, the scores in tensor memory.

`docs/kernels/sm100-forward.md` draws the tile, the budgets and the barriers.  Sixteen warps, seven roles:

    warps 0-3    softmax of Q tile 0        warp 12   MMA: one thread issues every product
    warps 4-7    softmax of Q tile 1        warp 13   load: one thread feeds the copy engine
    warps 8-11   epilogue                   warp 14   scheduler
                                            warp 15   idle

A thread of a softmax warpgroup owns one row of S: no shuffles.  What a separate correction warpgroup does in other
kernels, the softmax threads do themselves, under a warp vote, when a row's maximum grew too far: a block's S is
computed after the product with V of the block before it, so at that moment nobody else touches O.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from coflash.kernels.parts.ptx import least, most
from coflash.kernels.sm100 import chunks
from coflash.kernels.sm100 import instructions as op
from coflash.kernels.sm100.config import BLOCK, ROWS, WORK_SLOTS, WORK_WORDS, ForwardConfig
from coflash.kernels.sm100.output import Target, store_bytes
from coflash.kernels.sm100.products import Products
from coflash.kernels.sm100.shared import Barrier, Ring, Shared
from coflash.kernels.sm100.softmax import HalfRows, HeldRows, Rows
from coflash.kernels.sm100.work import END, ITEM, SKIP, Call, TileOrder, Work, section_heads

ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
INFINITY = Float32.inf
EPILOGUE, MMA, LOAD, SCHEDULER = 8, 12, 13, 14  # first warps


class Forward:
    """One forward kernel; see `ForwardConfig` for what is static."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.names = tuple(fake_arguments(config))

    # ---- host ----

    @cute.jit
    def __call__(self, *arguments):
        c = self.config
        given = dict(zip(self.names, arguments, strict=True))
        q, k, v = given["q"], given["k"], given["v"]
        length_q, heads_q, batch_q, stride_q = _layout(q, c.packed_q)
        length_k, heads_k, batch_k, stride_k = _layout(k, c.packed_k)
        _, _, _, stride_v = _layout(v, c.packed_k)
        batch = batch_q
        if cutlass.const_expr(c.packed_q):
            batch = given["cu_seqlens_q"].shape[0] - 1
        group = heads_q // heads_k
        heads = heads_k if c.pack_heads > 1 else heads_q

        q_map = _tensor_map(
            q,
            (c.head_dim, c.pack_heads, length_q, heads, batch_q),
            (stride_q[1], stride_q[0], stride_q[1] * c.pack_heads, stride_q[2]),
            (c.panel, c.pack_heads, ROWS // c.pack_heads, 1, 1),
        )
        k_map = _tensor_map(
            k,
            (c.head_dim, length_k, heads_k, batch_k),
            (stride_k[0], stride_k[1], stride_k[2]),
            (c.panel, c.keys, 1, 1),
        )
        if cutlass.const_expr(self.clipped):
            # Rows past a sequence's end must read as zero although the tensor goes on: two dimensions walk the
            # same rows, the first counts up to the end of a block and is the one that is checked.
            v_map = _tensor_map(
                v,
                (c.head_dim_v, BLOCK, length_k + 1, heads_k, batch_k),
                (stride_v[0], stride_v[0], stride_v[1], stride_v[2]),
                (c.panel_v, BLOCK, 1, 1, 1),
                shift=-BLOCK * Int64(stride_v[0]),
            )
        else:
            v_map = _tensor_map(
                v,
                (c.head_dim_v, length_k, heads_k, batch_k),
                (stride_v[0], stride_v[1], stride_v[2]),
                (c.panel_v, BLOCK, 1, 1),
            )

        m_blocks = (length_q * c.pack_heads + c.rows - 1) // c.rows
        items = m_blocks * heads * batch
        if cutlass.const_expr(c.packed_q):
            # What all sequences together can need: every one wastes less than one item.
            items = (length_q * c.pack_heads // c.rows + batch) * heads
        at_once = given["num_blocks"] // c.ctas
        clusters = items
        if cutlass.const_expr(not c.dynamic):
            clusters = least(at_once, items)
        section = section_heads(length_k, c.head_dim + c.head_dim_v, heads_k * batch) * (heads // heads_k)
        numbers = [length_q, length_k, heads, batch, group, section]
        self.kernel(q_map, k_map, v_map, numbers, [given[name] for name in self.names[3:-1]]).launch(
            grid=[most(clusters, Int32(1)) * c.ctas, 1, 1],
            block=[512, 1, 1],
            cluster=[c.ctas, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )

    @property
    def clipped(self) -> bool:
        """Whether keys past the end of a sequence exist in memory."""
        return self.config.packed_k or self.config.seqused_k

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        q_map: cutlass.GridConstant[cuda.TensorMap],
        k_map: cutlass.GridConstant[cuda.TensorMap],
        v_map: cutlass.GridConstant[cuda.TensorMap],
        numbers,
        arguments,
    ):
        c = self.config
        call = Call(c, dict(zip(self.names[3:-1], arguments, strict=True)), numbers)
        memory = cutlass.Array(cutlass.Int8, c.shared_bytes, space=cutlass.AddressSpace.smem, alignment=1024)
        sh = Shared(op.address_of(memory), c.shared_offsets)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if cutlass.const_expr(c.ctas == 2):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        self.start(sh, warp, rank)
        columns = op.load_shared(sh.tensor_base, 1)[0]

        if warp < EPILOGUE:
            prims.setmaxregister(c.registers[0], "increase")
            self.softmax(call, sh, warp // 4, rank, columns)
        elif warp < MMA:
            prims.setmaxregister(c.registers[1], "decrease")
            self.epilogue(call, sh, warp - EPILOGUE, rank, columns)
        else:
            prims.setmaxregister(c.registers[2], "decrease")
            if warp == MMA:
                if rank == 0:
                    if prims.elect_sync():
                        if cutlass.const_expr(c.q_tiles == 2):
                            self.mma(call, sh, columns)
                        else:
                            self.mma_single(call, sh, columns)
            elif warp == LOAD:
                if prims.elect_sync():
                    self.load(call, sh, rank, q_map.get_ptr(), k_map.get_ptr(), v_map.get_ptr())
            elif warp == SCHEDULER:
                self.schedule(call, sh, rank)

        self.finish(warp, columns)

    @cute.jit
    def start(self, sh, warp, rank):
        """Barriers and tensor memory, before any role starts."""
        if warp == 0:
            if prims.elect_sync():
                self.init_barriers(sh, rank)
                prims.fence_mbarrier_init()
        if warp == EPILOGUE:
            prims.tcgen05_alloc(op.shared(sh.tensor_base, Int32), 512, group=self.group)
            prims.tcgen05_relinquish_alloc_permit(group=self.group)
        prims.tcgen05_fence("before_thread_sync")
        self.everybody()
        prims.tcgen05_fence("after_thread_sync")

    def init_barriers(self, sh: Shared, rank: Int32) -> None:
        for name, copies in self.config.barriers.items():
            count: Any = self.arrivals[name]
            if name == "work_free" and self.config.ctas == 2:
                count = count - rank  # only the leader has an MMA thread
            for copy in range(copies):
                op.init(getattr(sh, name) + 8 * copy, count)

    @cute.jit
    def finish(self, warp, columns):
        prims.tcgen05_fence("before_thread_sync")
        self.everybody()
        prims.tcgen05_fence("after_thread_sync")
        if warp == EPILOGUE:
            prims.tcgen05_dealloc(op.tensor(columns), 512, group=self.group)

    def everybody(self) -> None:
        """All threads meet, in pair mode of both CTAs: nobody leaves while the other may still arrive here."""
        if self.config.ctas == 2:
            prims.barrier_cluster_arrive()
            prims.barrier_cluster_wait()
        else:
            prims.barrier_cta_sync(0)

    @property
    def group(self) -> str:
        return f"cta_{self.config.ctas}"

    @property
    def arrivals(self) -> dict[str, int]:
        """How many arrivals complete a phase of each barrier."""
        warps = 4 * self.config.ctas  # of a warpgroup, in all CTAs
        return {
            "q_full": 1,  # the load thread (of the leader) expects the bytes
            "q_empty": 1,  # a commit of the MMA thread
            "kv_full": 1,
            "kv_empty": 1,
            "s_full": 1,  # a commit
            "p_early": warps,  # softmax warps
            "p_late": warps if self.config.q_tiles == 2 else 2 * warps,
            "o_full": 1,  # a commit
            "o_done": 1,  # a commit
            "o_free": warps,  # epilogue warps
            "stats_full": 4 if self.config.q_tiles == 2 else 8,  # softmax warps of this CTA
            "stats_free": 4,  # epilogue warps of this CTA
            "work_full": 1,  # the scheduler
            "work_free": 8 + 4 + 2,  # softmax and epilogue warps, load thread, MMA thread
            "launch_answer": 1,  # the scheduler expects the bytes
            "launch_read": 1,  # the other CTA's scheduler
        }

    # ---- scheduler ----

    @cute.jit
    def schedule(self, call, sh, rank):
        """Decide which item comes next and tell all roles, up to WORK_SLOTS items ahead."""
        c = self.config
        cluster, clusters = cute.arch.block_idx()[0] // c.ctas, cute.arch.grid_dim()[0] // c.ctas
        ring = Ring(sh.work_full, sh.work_free, WORK_SLOTS, producer=True)
        order = TileOrder(call)
        words = cute.make_rmem_tensor((WORK_WORDS,), Int32)
        words.fill(0)
        index = Int32(cluster)
        more = cutlass.Boolean(True)
        if cutlass.const_expr(c.dynamic):
            # A launched cluster is an item; this one takes over those that have not started.
            answer = Barrier(sh.launch_answer)
            read = Barrier(sh.launch_read, first=1)
            while more:
                self.ask(sh, rank, read)
                order.locate(index, words)
                if words[7] == ITEM:
                    self.publish(sh, ring, words)
                answer.wait()
                taken, first = op.launch_answer(sh.launch)
                prims.fence_proxy("async_shared", space="cta")
                cute.arch.sync_warp()
                if cutlass.const_expr(c.ctas == 2):
                    if rank == 1:
                        if prims.elect_sync():
                            op.arrive_at(sh.launch_read, 0)
                index = first // c.ctas
                more = taken != 0
            words[7] = Int32(END)
            self.publish(sh, ring, words)
        else:
            while more:
                order.locate(index, words)
                if words[7] != SKIP:
                    self.publish(sh, ring, words)
                more = words[7] != END
                index = index + clusters

    @cute.jit
    def ask(self, sh, rank, read):
        """For the next cluster; in a pair the leader asks for both, when the other has read the last answer."""
        pair = self.config.ctas == 2
        if cutlass.const_expr(pair):
            if rank == 0:
                read.wait(order="acquire.cluster")
        if prims.elect_sync():
            prims.mbarrier_arrive_expect_tx(op.shared(sh.launch_answer), 16)
            if rank == 0:
                op.ask_for_launch(sh.launch, sh.launch_answer, pair=pair)

    @cute.jit
    def publish(self, sh, ring, words):
        ring.wait_empty()
        if prims.elect_sync():
            slot = sh.work + ring.stage * (4 * WORK_WORDS)
            for half in cutlass.range_constexpr(WORK_WORDS // 4):
                op.store_shared(slot + 16 * half, [words[4 * half + i] for i in range(4)])
            op.arrive(ring.full_at(ring.stage))
        ring.advance()

    # ---- load ----

    @cute.jit
    def load(self, call, sh, rank, q_map, k_map, v_map):
        """Feed the copy engine: Q when its buffer is free, and all blocks of K and V in the order of their use."""
        c = self.config
        work = Work(call, sh, rank)
        kv = Ring(sh.kv_full, sh.kv_empty, c.kv_stages, producer=True)
        q_rings = [
            Ring(sh.q_full + 8 * t * c.q_stages, sh.q_empty + 8 * t * c.q_stages, c.q_stages, producer=True)
            for t in range(c.q_tiles)
        ]
        work.take_alone()
        while work.exists:
            lo, hi = work.blocks()
            if lo < hi:
                self.load_k(call, sh, rank, work, kv, k_map, hi - 1)
                for t in cutlass.range_constexpr(c.q_tiles):
                    lo_t, hi_t = work.blocks_of(t)
                    if lo_t < hi_t:
                        self.load_q(call, sh, rank, work, q_rings[t], q_map, t)
                for back in cutlass.range(hi - lo, unroll=1):
                    j = hi - 1 - back
                    if cutlass.const_expr(c.q_tiles == 2):
                        self.load_v(call, sh, rank, work, kv, v_map, j)
                    if j > lo:
                        self.load_k(call, sh, rank, work, kv, k_map, j - 1)
                    if cutlass.const_expr(c.q_tiles == 1):
                        self.load_v(call, sh, rank, work, kv, v_map, j)
            work.take_alone()
        for ring in [kv, *q_rings]:
            ring.drain()

    @cute.jit
    def load_q(self, call, sh, rank, work, ring, q_map, t):
        c = self.config
        ring.wait_empty()
        full = ring.full_at(ring.stage)
        self.expect(full, rank, c.q_bytes)
        row = work.row + t * (ROWS * c.ctas) + rank * ROWS
        buffer = sh.q + (t * c.q_stages + ring.stage) * c.q_bytes
        for panel in cutlass.range_constexpr(c.tile_d // c.panel):
            at = [panel * c.panel, 0, work.offset_q + row // c.pack_heads, work.head, work.batch_q]
            op.load_tile(buffer + panel * (2 * c.panel * ROWS), q_map, at, full, pair=c.ctas == 2)
        ring.advance()

    @cute.jit
    def load_k(self, call, sh, rank, work, ring, k_map, j):
        c = self.config
        ring.wait_empty()
        full = ring.full_at(ring.stage)
        self.expect(full, rank, c.k_bytes)
        buffer = sh.kv + ring.stage * c.kv_bytes
        first = work.offset_k + j * BLOCK + rank * c.keys
        for panel in cutlass.range_constexpr(c.tile_d // c.panel):
            at = [panel * c.panel, first, work.head_kv, work.batch_k]
            op.load_tile(buffer + panel * (2 * c.panel * c.keys), k_map, at, full, pair=c.ctas == 2)
        ring.advance()

    @cute.jit
    def load_v(self, call, sh, rank, work, ring, v_map, j):
        c = self.config
        ring.wait_empty()
        full = ring.full_at(ring.stage)
        self.expect(full, rank, c.v_bytes)
        buffer = sh.kv + ring.stage * c.kv_bytes
        first = j * BLOCK
        rows = [work.offset_k + first]
        if cutlass.const_expr(self.clipped):
            there = least(work.length_k - first, Int32(BLOCK))
            rows = [BLOCK - there, rows[0] + there]
        for panel in cutlass.range_constexpr(c.columns_v // c.panel_v):
            column = panel * c.panel_v + rank * c.columns_v
            at = [column, *rows, work.head_kv, work.batch_k]
            op.load_tile(buffer + panel * (2 * c.panel_v * BLOCK), v_map, at, full, pair=c.ctas == 2)
        ring.advance()

    @cute.jit
    def expect(self, full, rank, size):
        """The leader announces the bytes of all CTAs: the pair's copies all count at its barrier."""
        if rank == 0:
            prims.mbarrier_arrive_expect_tx(op.shared(full), size * self.config.ctas)

    # ---- MMA ----

    @cute.jit
    def mma(self, call, sh, columns):
        """Issue every product of the CTA (or pair), in the order

            Q0 K(n), Q1 K(n), then for every block j: P0 V(j), Q0 K(j-1), P1 V(j), Q1 K(j-1)

        where the last block of an item is followed by the first K of the next item, so that softmax has scores to
        work on while the last products with V run."""
        c = self.config
        work = Work(call, sh, Int32(0))
        kv = Ring(sh.kv_full, sh.kv_empty, c.kv_stages, producer=False)
        products = Products(self, sh, columns)
        started = cutlass.Boolean(False)  # whether the item's first scores are under way
        work.take_alone()
        while work.exists:
            lo, hi = work.blocks()
            ranges = [work.blocks_of(t) for t in range(c.q_tiles)]
            if (lo < hi) & (started == cutlass.Boolean(False)):
                kv.wait_full()
                for t in cutlass.range_constexpr(c.q_tiles):
                    self.scores(work, products, t, hi - 1, kv.stage)
                products.commit(kv.empty_at(kv.stage))
                kv.advance()
            started = cutlass.Boolean(False)
            if lo == hi:
                work.take_alone()
            for back in cutlass.range(hi - lo, unroll=1):
                j = hi - 1 - back
                kv.wait_full()
                v_stage = Int32(kv.stage)
                kv.advance()
                following = j - 1
                more = j > lo
                if j == lo:
                    # One item ahead, not more: the others free the slots of later items after this one.
                    work.take_alone()
                    following = work.blocks()[1] - 1
                    more = work.exists & (following >= 0)
                    started = more
                for t in cutlass.range_constexpr(c.q_tiles):
                    if (ranges[t][0] <= j) & (j < ranges[t][1]):
                        products.values(t, t, v_stage, j == ranges[t][1] - 1, j == ranges[t][0])
                    if cutlass.const_expr(t == c.q_tiles - 1):
                        products.commit(kv.empty_at(v_stage))
                    if more:
                        if cutlass.const_expr(t == 0):
                            kv.wait_full()
                        self.scores(work, products, t, following, kv.stage)
                if more:
                    products.commit(kv.empty_at(kv.stage))
                    kv.advance()

    @cute.jit
    def mma_single(self, call, sh, columns):
        """The same with one Q tile and two buffers of S:

        Q K(n), then for every block j: Q K(j-1), P V(j)
        """
        c = self.config
        work = Work(call, sh, Int32(0))
        kv = Ring(sh.kv_full, sh.kv_empty, c.kv_stages, producer=False)
        products = Products(self, sh, columns)
        buffer = Int32(0)
        work.take_alone()
        while work.exists:
            lo, hi = work.blocks()
            for back in cutlass.range(hi - lo + 1, unroll=1):
                j = hi - back
                if j > lo:
                    kv.wait_full()
                    products.scores(0, buffer, kv.stage, j == hi, j - 1 == lo)
                    products.commit(kv.empty_at(kv.stage))
                    kv.advance()
                buffer = buffer ^ 1
                if j < hi:
                    kv.wait_full()
                    products.values(0, buffer, kv.stage, j == hi - 1, j == lo)
                    products.commit(kv.empty_at(kv.stage))
                    kv.advance()
            buffer = buffer ^ 1
            products.blocks[0] = products.blocks[0] + (hi - lo)
            work.take_alone()
        if products.blocks[0] > 0:
            op.wait(sh.o_done, (products.blocks[0] - 1) & 1)

    @cute.jit
    def scores(self, work, products, t, j, k_stage):
        lo, hi = work.blocks_of(t)
        if (lo <= j) & (j < hi):
            products.scores(t, t, k_stage, j == hi - 1, j == lo)

    # ---- softmax ----

    @cute.jit
    def softmax(self, call, sh, group, rank, columns):
        """Turn S into P, block by block, and keep each row's reference and sum.

        Warpgroup `group` has its own Q tile, or with one Q tile its half of every block's columns."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % ROWS
        work = Work(call, sh, rank)
        lanes = columns + ((thread // 32) << 21)  # this warp's 32 lanes of tensor memory
        t, shift = group, Int32(0)
        if cutlass.const_expr(c.q_tiles == 1):
            t, shift = Int32(0), group * HalfRows.width
        kind = HeldRows if c.softmax == "held" else Rows if c.q_tiles == 2 else HalfRows
        rows = kind(self, call, sh, group, lanes)
        stats_free = Barrier(sh.stats_free + 8 * t, first=1)
        work.take()
        while work.exists:
            lo, hi = work.blocks_of(t)
            if lo < hi:
                first = work.row + t * (ROWS * c.ctas) + rank * ROWS
                low, high = work.keys(first + thread)
                # Blocks that every row of the warpgroup sees whole lie between the masked ones.
                whole_hi = most(least(work.keys(first)[1] // BLOCK, hi), lo)
                whole_lo = lo
                if cutlass.const_expr(c.bounded_left):
                    whole_lo = (work.keys(first + ROWS - 1)[0] + BLOCK - 1) // BLOCK
                    whole_lo = least(most(whole_lo, lo), whole_hi)
                rows.start()
                for back in cutlass.range(hi - lo, unroll=1):
                    j = hi - 1 - back
                    at = j * BLOCK + shift
                    rows.block(low - at, high - at, (whole_lo <= j) & (j < whole_hi))
                stats_free.wait()
                op.store_shared(sh.stats + (group * ROWS + thread) * 8, [rows.total(), rows.reference()])
                self.arrive_from_warp(sh.stats_full + 8 * t)
            work.take()

    @cute.jit
    def arrive_from_warp(self, barrier):
        """One arrival for all 32 lanes."""
        cute.arch.sync_warp()
        if prims.elect_sync():
            op.arrive(barrier)

    @cute.jit
    def arrive_at_leader(self, barrier):
        """One arrival for all 32 lanes, after a tcgen05 fence: what is handed over lies in tensor memory."""
        cute.arch.sync_warp()
        if prims.elect_sync():
            if cutlass.const_expr(self.config.ctas == 2):
                op.arrive_at(barrier, 0, order="relaxed")
            else:
                op.arrive(barrier)

    # ---- epilogue ----

    @cute.jit
    def epilogue(self, call, sh, warp, rank, columns):
        """Divide O by the row sums, write it and the log-sum-exp, while the next item's products run."""
        c = self.config
        thread = cute.arch.thread_idx()[0] % ROWS
        lanes = columns + (warp << 21)
        work = Work(call, sh, rank)
        stats_full = [Barrier(sh.stats_full + 8 * t) for t in range(c.q_tiles)]
        o_full = [Barrier(sh.o_full + 8 * t) for t in range(c.q_tiles)]
        work.take()
        while work.exists:
            for t in cutlass.range_constexpr(c.q_tiles):
                lo, hi = work.blocks_of(t)
                row = work.row + t * (ROWS * c.ctas) + rank * ROWS + thread
                if lo < hi:
                    stats_full[t].wait()
                    total, reference = op.load_shared(sh.stats + (t * ROWS + thread) * 8, 2, Float32)
                    if cutlass.const_expr(c.q_tiles == 1):
                        total = total + op.load_shared(sh.stats + (ROWS + thread) * 8, 1, Float32)[0]
                    self.arrive_from_warp(sh.stats_free + 8 * t)
                    target = Target(call, work, row, total, reference)
                    o_full[t].wait()
                    prims.tcgen05_fence("after_thread_sync")
                    for first in cutlass.range_constexpr(0, c.tile_d_v, target.chunk):
                        column = lanes + c.o_columns + t * c.tile_d_v + first
                        values, _ = chunks.settle(chunks.load(column, target.chunk))
                        if cutlass.const_expr(first + target.chunk == c.tile_d_v):
                            prims.tcgen05_fence("before_thread_sync")
                            self.arrive_at_leader(sh.o_free + 8 * t)
                        target.store(first, values)
                else:
                    target = Target(call, work, row, Float32(0.0), Float32(-INFINITY))
                    for first in cutlass.range_constexpr(0, c.tile_d_v, target.chunk):
                        target.store_nothing(first)
            work.take()


def _layout(tensor: cute.Tensor, packed: bool) -> tuple[Int32, Int32, Int32, tuple]:
    """Length, heads, batch and the strides (row, head, batch) of q, k, v or out; packed: one long sequence."""
    if packed:
        length, heads, _ = tensor.shape
        return length, heads, Int32(1), (tensor.stride[0], tensor.stride[1], tensor.stride[0])
    batch, length, heads, _ = tensor.shape
    return length, heads, batch, (tensor.stride[1], tensor.stride[2], tensor.stride[0])


def _tensor_map(
    tensor: cute.Tensor, extents: tuple, strides: tuple, box: tuple, shift: Any = 0
) -> cuda.TensorMap:
    """A tensor map over `extents` (columns first), strides of all but the first in elements, read in panels of
    box[0] columns whose rows are swizzled."""
    swizzle = {64: "s128b", 32: "s64b", 16: "s32b"}[box[0]]
    return cuda.create_tensor_map_tiled(
        global_address=tensor.iterator.toint() + shift * 2,
        dtype=tensor.element_type,
        global_dims=list(extents),
        global_strides=[Int64(stride) // 8 for stride in strides],
        box_dims=list(box),
        swizzle=cuda.TensorMapSwizzle[swizzle],
        l2_promotion=cuda.TensorMapL2Promotion.l2_256b,
    )


def fake_arguments(config: ForwardConfig) -> dict[str, Any]:
    """Name -> fake argument, in call order; what the config does not use is absent."""
    c = config
    element = ELEMENTS[c.dtype]

    def operand(heads: Any, length: Any, dim: int, packed: bool, align: int = 16) -> Any:
        shape = (length, heads, dim) if packed else (cute.sym_int(), length, heads, dim)
        stride = tuple(cute.sym_int64(divisibility=align // 2) for _ in shape[:-1]) + (1,)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=align)

    def vector(of: Any) -> Any:
        return make_fake_compact_tensor(of, (cute.sym_int(),), assumed_align=4)

    length_q, length_k, heads_q, heads_k = (cute.sym_int() for _ in range(4))
    arguments = {
        "q": operand(heads_q, length_q, c.head_dim, c.packed_q),
        "k": operand(heads_k, length_k, c.head_dim, c.packed_k),
        "v": operand(heads_k, length_k, c.head_dim_v, c.packed_k),
        "out": operand(heads_q, length_q, c.head_dim_v, c.packed_q, align=store_bytes(c)),
    }
    if c.lse:
        shape = (heads_q, length_q) if c.packed_q else (cute.sym_int(), heads_q, length_q)
        stride = tuple(cute.sym_int64() for _ in shape[:-1]) + (1,)
        arguments["lse"] = make_fake_tensor(Float32, shape, stride=stride, assumed_align=4)
    for name, used in (
        ("cu_seqlens_q", c.packed_q),
        ("cu_seqlens_k", c.packed_k),
        ("seqused_q", c.seqused_q),
        ("seqused_k", c.seqused_k),
    ):
        if used:
            arguments[name] = vector(Int32)
    if c.sink:
        arguments["sink"] = vector(Float32)
    arguments["softmax_scale"] = Float32(0.0)
    if c.bounded_left:
        arguments["window_left"] = Int32(0)
    if c.bounded_right:
        arguments["window_right"] = Int32(0)
    if c.softcap:
        arguments["softcap"] = Float32(0.0)
    arguments["num_blocks"] = Int32(0)
    arguments["stream"] = make_fake_stream(use_tvm_ffi_env_stream=True)
    return arguments
