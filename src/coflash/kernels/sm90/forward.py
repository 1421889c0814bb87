"""Attention forward for Hopper (sm_90a)."""

from typing import Any, NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from coflash.kernels.parts import ptx, ring, softmax, tiles, vectors
from coflash.kernels.parts.control import Branch, when
from coflash.kernels.parts.fixture import Fixture, Registers, View
from coflash.kernels.parts.ring import Ring
from coflash.kernels.parts.softmax import RowState
from coflash.kernels.parts.store import store_rows
from coflash.kernels.sm90.config import ROWS, WARPGROUP, WORK_SLOTS, ForwardConfig
from coflash.kernels.sm90.products import make_mma, multiply

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}

# What a work slot asks for.
END, TILE, EXACT, NOTHING = range(4)
KIND, M_BLOCK, HEAD, BATCH, SEQLEN_Q, SEQLEN_K, FIRST_Q, FIRST_K = range(8)  # words of a work slot
LOW, HIGH, OWN_LOW, OWN_HIGH = (
    8,
    9,
    10,
    14,
)  # blocks of keys of the tile, and of each of up to four warpgroups
WORDS = 18


class Operands(NamedTuple):
    """Tensors and numbers of one launch, device side; None where the config has no use for one."""

    out: Any
    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    sink: Any
    softmax_scale: Any
    window_left: Any
    window_right: Any
    softcap: Any
    tile_counter: Any
    shape: Any  # batch, query heads, KV heads, seqlen_q, seqlen_k


class Given(Fixture):
    """The operands inside the kernel, where nothing changes them."""

    def __init__(self, operands: Operands) -> None:
        for name, value in operands._asdict().items():
            setattr(self, name, value)


class Forward:
    """out = softmax(scale * q k^T, masked) v, a tile of query rows of one head at a time.

    One block a multiprocessor stays there and takes tiles until there are none:

        load warpgroup (one warp works)      compute warpgroups, 64 rows each
        find tile, publish it  --work slot-->  S = Q K^T      64 x tile_n   float32, registers
        copy Q                 --Q ring----->  P = exp2(S * scale - reference), rounded to 16 bits
        copy K, one ahead of V --K ring----->  O += P V       64 x d_v      float32, registers
        copy V                 --V ring----->  O / row sums, to global memory straight from registers,
                                               beside the next tile's first product

    Keys go from the last block to the first: the cut blocks of a causal tile come first.

    Budget of a 128 x 128 tile at head_dim 128 (bf16, two warpgroups, two stages of each of Q, K, V):
    shared memory 64 + 64 + 64 KB of 227; registers of a computing thread S 64 + O 64 + P 32 of 240; clocks of a
    block of keys: tensor cores 2048, exponentials 1024, issue about 900, shared memory 1792.

    Barriers (full: the copy engine's bytes have landed; empty: every reader is done):
      q_full, q_empty   one pair for each warpgroup and Q stage; emptied by the warpgroup's 4 warps
      k_full, k_empty   for each K stage; emptied by every compute warp; so v_full, v_empty
      v_landed          a V block that ends early has landed and may be cleared behind its last key; load warp alone
      work_full         a tile is published; by the load warp, for every compute warp
      work_empty        the tile is done and its verdict written; by every compute warp, for the load warp
    """

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit(preprocess=False)
    def __call__(self, *arguments):
        config = self.config
        given = dict(zip(argument_names(config), arguments, strict=True))
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        heads_q, heads_kv = q.shape[q_head_mode(config)], k.shape[k_head_mode(config)]
        batch = given["cu_seqlens_q"].shape[0] - 1 if config.packed_q else q.shape[0]
        seqlen_q = given["max_seqlen_q"] if config.packed_q else q.shape[1]
        seqlen_k = given["max_seqlen_k"] if config.packed_k else k.shape[1]

        q_atom, q_tensor = self.make_q_copy(q, heads_kv)
        k_atom, k_tensor = self.make_kv_copy(k, config.packed_k, self.k_layout(), transposed=False)
        v_atom, v_tensor = self.make_kv_copy(v, config.packed_k, self.v_layout(), transposed=True)

        operands = Operands(
            shape=(batch, heads_q, heads_kv, seqlen_q, seqlen_k),
            **{name: given.get(name) for name in Operands._fields if name != "shape"},
        )
        tile_heads = heads_kv if config.pack_heads > 1 else heads_q
        m_blocks = cute.ceil_div(seqlen_q, config.positions * config.warpgroups)
        grid = ptx.least(m_blocks * tile_heads * batch, given["num_blocks"])
        self.kernel(q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, operands).launch(
            grid=[grid, 1, 1],
            block=[config.threads, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=config.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    # ---- layouts ----

    def q_layout(self):
        c = self.config
        return hopper.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (ROWS, c.tile_n, c.tile_d), self.dtype, c.warpgroups * c.q_stages
        )

    def k_layout(self):
        c = self.config
        return hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (ROWS, c.tile_n, c.tile_d), self.dtype, c.k_stages
        )

    def v_layout(self):
        c = self.config
        return hopper.make_smem_layout_b(
            LayoutEnum.COL_MAJOR, (ROWS, c.tile_d_v, c.tile_n), self.dtype, c.v_stages
        )

    def make_q_copy(self, q, heads_kv):
        """Q as ((heads in a tile, positions), dim, heads, batch), 64 rows of one warpgroup at a time."""
        c = self.config
        packed, group = c.packed_q, c.pack_heads
        s, h = (0, 1) if packed else (1, 2)
        shape, stride = q.shape, q.stride
        rows, row_stride = shape[s], stride[s]
        heads, head_stride = shape[h], stride[h]
        if group > 1:
            rows, row_stride = (group, rows), (head_stride, row_stride)
            heads, head_stride = heads_kv, head_stride * group
        modes = [(rows, row_stride), (shape[h + 1], 1), (heads, head_stride)]
        if not packed:
            modes.append((shape[0], stride[0]))
        tensor = cute.make_tensor(
            q.iterator, cute.make_layout(tuple(m[0] for m in modes), stride=tuple(m[1] for m in modes))
        )
        layout = cute.slice_(self.q_layout(), (None, None, 0))
        tile = (ROWS, c.tile_d)
        if group > 1:
            tile = ((group, c.positions), c.tile_d)
            if group * c.positions < ROWS:
                some = cute.make_layout((group * c.positions, c.tile_d), stride=(1, ROWS))
                layout = cute.composition(layout, some)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tile)

    def make_kv_copy(self, x, packed: bool, layout, transposed: bool):
        """K as (seqlen, dim, heads[, batch]); V as (dim, seqlen, heads[, batch]), the way its product reads it."""
        c = self.config
        s = 0 if packed else 1
        order = [s + 2, s] if transposed else [s, s + 2]
        order += [s + 1] if packed else [s + 1, 0]
        tensor = cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))
        tile = (c.tile_d_v, c.tile_n) if transposed else (c.tile_n, c.tile_d)
        layout = cute.slice_(layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tile)

    def shared_storage(self):
        c = self.config

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.warpgroups * c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.warpgroups * c.q_stages]
            k_full: cute.struct.MemRange[Int64, c.k_stages]
            k_empty: cute.struct.MemRange[Int64, c.k_stages]
            v_full: cute.struct.MemRange[Int64, c.v_stages]
            v_empty: cute.struct.MemRange[Int64, c.v_stages]
            v_landed: cute.struct.MemRange[Int64, 1]
            work_full: cute.struct.MemRange[Int64, WORK_SLOTS]
            work_empty: cute.struct.MemRange[Int64, WORK_SLOTS]
            work: cute.struct.MemRange[Int32, WORDS * WORK_SLOTS]
            failed: cute.struct.MemRange[Int32, 16 * WORK_SLOTS]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.q_layout())], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.k_layout())], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.v_layout())], 1024]

        return Storage

    # ---- the kernel ----

    @cute.kernel(preprocess=False)
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tensor: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tensor: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tensor: cute.Tensor,
        operands: Operands,
    ):
        c = self.config
        given = Given(operands)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.shared_storage())
        q_layout, k_layout, v_layout = self.q_layout(), self.k_layout(), self.v_layout()
        shared_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        shared_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        shared_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)

        if c.pack_heads * c.positions < ROWS:
            self.clear_q(storage)
        with when(warp == 0):
            for atom in (q_atom, k_atom, v_atom):
                cpasync.prefetch_descriptor(atom)
            self.start_barriers(storage)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        side = Branch(warp < 4)
        with side.then():
            cute.arch.setmaxregister_decrease(c.registers[0])
            with when(warp == 0):
                self.load(
                    storage,
                    (q_atom, k_atom, v_atom),
                    (q_tensor, k_tensor, v_tensor),
                    (shared_q, shared_k, shared_v),
                    given,
                )
        with side.otherwise():
            cute.arch.setmaxregister_increase(c.registers[1])
            self.compute(storage, shared_q, shared_k, shared_v, given)

    def start_barriers(self, storage) -> None:
        """Barriers, and verdicts that nothing failed yet: one warp."""
        c = self.config
        with cute.arch.elect_one():
            for w in range(c.warpgroups):
                at = w * c.q_stages
                ring.init(storage.q_full.data_ptr() + at, storage.q_empty.data_ptr() + at, c.q_stages, 4)
            warps = 4 * c.warpgroups
            ring.init(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), c.k_stages, warps)
            ring.init(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), c.v_stages, warps)
            ring.init(storage.work_full.data_ptr(), storage.work_empty.data_ptr(), WORK_SLOTS, warps)
            cute.arch.mbarrier_init(storage.v_landed.data_ptr(), 1)
        verdicts = storage.failed.get_tensor(cute.make_layout(16 * WORK_SLOTS))
        verdicts[cute.arch.lane_idx()] = Int32(0)  # as many as lanes

    @cute.jit
    def clear_q(self, storage):
        """Rows of Q that no copy fills take part in its products: their scores are dropped, but are not chance."""
        thread, _, _ = cute.arch.thread_idx()
        base = storage.q.data_ptr()
        i = 8 * thread
        while i < cute.cosize(self.q_layout()):
            ptx.zero_16_shared_bytes(base + i)
            i = i + 8 * self.config.threads
        cute.arch.fence_view_async_shared()

    # ---- what both sides know about a tile ----

    def key_blocks(self, first: Int32, count: int, seqlen_q, seqlen_k, operands) -> tuple[Int32, Int32]:
        """Blocks of keys [low, high) that some of the query positions [first, first + count) see."""
        c = self.config
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

    def tile_blocks(self, info, operands) -> tuple[Int32, Int32]:
        """Those of a tile."""
        rows = self.config.positions * self.config.warpgroups
        return self.key_blocks(info[M_BLOCK] * rows, rows, info[SEQLEN_Q], info[SEQLEN_K], operands)

    def own_blocks(self, info, group, operands) -> tuple[Int32, Int32]:
        """Those of one warpgroup's rows."""
        c = self.config
        first = (info[M_BLOCK] * c.warpgroups + group) * c.positions
        return self.key_blocks(first, c.positions, info[SEQLEN_Q], info[SEQLEN_K], operands)

    # ---- load warp ----

    @cute.jit
    def load(self, storage, atoms, tensors, shared, operands):
        """Hands out tiles and feeds the rings: one warp.

        A tile is published in a work slot, then its Q, K and V are copied, as far ahead of the warpgroups as
        slots and stages allow.  A slot that comes back with a failed verdict is published again, to be done the
        exact way; the last slots are awaited for their verdicts before the end is announced."""
        c = self.config
        batch, heads_q, heads_kv, max_q, max_k = operands.shape
        lane = cute.arch.lane_idx()
        work = View(storage.work.get_tensor(cute.make_layout((WORDS, WORK_SLOTS))))
        failed = View(storage.failed.get_tensor(cute.make_layout((16, WORK_SLOTS))))  # a word for each warp
        slots = Ring(storage.work_full.data_ptr(), storage.work_empty.data_ptr(), WORK_SLOTS, True)
        # One for all warpgroups: their Q rings move in step.
        q_ring = Ring(storage.q_full.data_ptr(), storage.q_empty.data_ptr(), c.q_stages, True)
        k_ring = Ring(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), c.k_stages, True)
        v_ring = Ring(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), c.v_stages, True)

        tile_heads = heads_kv if cutlass.const_expr(c.pack_heads > 1) else heads_q
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        info = Registers(Int32, 8)  # the tile in hand, in the words of a work slot
        short_v_phase = Registers(Int32, 1)
        short_v_phase[0] = Int32(0)
        drawn = Registers(Int32, 1)  # lane 0: what the counter gave for the next tile
        drawn[0] = Int32(0)
        verdicts = WORK_SLOTS if cutlass.const_expr(c.softmax == "held") else 1
        tile = block  # the first tile is the block's own, the rest come from the counter
        settled = Int32(0)  # slots in a row that came back with nothing left to do
        kind = Int32(TILE)
        while kind != END:
            slots.wait_empty()
            slot = slots.stage
            again = Boolean(False)
            if cutlass.const_expr(c.softmax == "held"):
                again = cute.arch.vote_any_sync(failed[lane % 16, slot] != 0)
            if again:
                for i in cutlass.range_constexpr(8):
                    info[i] = work[i, slot]
                kind = Int32(EXACT)
                settled = Int32(0)
            else:
                kind, tiles_in_all = self.find_tile(tile, blocks, tile_heads, operands, info, lane)
                if kind != TILE:
                    if cutlass.const_expr(c.dynamic):
                        # As many tiles are asked for as there are: the block told the last number cleans up.
                        if tile - blocks == tiles_in_all - 1:
                            operands.tile_counter[0] = Int32(0)
                    settled = settled + 1
                    if settled == verdicts:
                        kind = Int32(END)
            low, high = self.tile_blocks(info, operands)
            own_low, own_high = self.own_blocks(info, lane, operands)
            if lane < c.warpgroups:
                work[OWN_LOW + lane, slot] = own_low
                work[OWN_HIGH + lane, slot] = own_high
            cute.arch.sync_warp()
            if lane == 0:
                work[KIND, slot] = kind
                for i in cutlass.range_constexpr(1, 8):
                    work[i, slot] = info[i]
                work[LOW, slot] = low
                work[HIGH, slot] = high
                for warp in cutlass.range_constexpr(4 * c.warpgroups):
                    failed[warp, slot] = Int32(0)
                cute.arch.mbarrier_arrive(slots.full + slot)
            cute.arch.sync_warp()
            slots.advance()
            if (kind == TILE) | (kind == EXACT):
                self.load_tile(
                    info,
                    low,
                    high,
                    q_ring,
                    k_ring,
                    v_ring,
                    atoms,
                    tensors,
                    shared,
                    storage,
                    operands,
                    lane,
                    short_v_phase,
                    drawn,
                    kind == TILE,
                )
                if kind == TILE:
                    tile = tile + blocks
                    if cutlass.const_expr(c.dynamic):
                        tile = blocks + cute.arch.shuffle_sync(drawn[0], 0)

    def find_tile(self, tile, blocks, heads, operands, info, lane):
        """Where tile number `tile` lies, into `info`.  The answer is TILE, or NOTHING behind the last one and
        then the number of tiles there are."""
        if self.config.packed_q or self.config.seqused_q:
            return self.find_uneven_tile(tile, blocks, heads, operands, info, lane)
        batch, _, _, max_q, _ = operands.shape
        m_blocks = cute.ceil_div(max_q, self.config.positions * self.config.warpgroups)
        tiles_in_all = m_blocks * heads * batch
        there = tile < tiles_in_all
        with when(there):
            m_block, head = tiles.place(
                tile, m_blocks, heads * batch, self.beside(m_blocks, heads * batch, blocks)
            )
            b = head // heads
            info[M_BLOCK] = m_block
            info[HEAD] = head - b * heads
            info[BATCH] = b
            info[SEQLEN_Q] = max_q
            info[FIRST_Q] = Int32(0)
            self.find_keys(info, operands)
        return ptx.choose(there, Int32(TILE), Int32(NOTHING)), tiles_in_all

    def beside(self, m_blocks, heads, blocks) -> Int32:
        """Heads at the end whose tiles go longest first: where tiles differ in length."""
        return tiles.heads_beside(m_blocks, heads, blocks) if self.config.bounded_right else Int32(0)

    @cute.jit
    def find_uneven_tile(self, tile, blocks, heads, operands, info, lane):
        """The same where sequences differ: 32 of them at a time, lane i counts the tiles of `first + i`."""
        c = self.config
        batch, _, _, _, _ = operands.shape
        kind, before, first = Int32(NOTHING), Int32(0), Int32(0)
        while (kind == NOTHING) & (first < batch):
            length, begin = self.query_span(first + lane, operands)
            m_blocks = cute.ceil_div(length, c.positions * c.warpgroups)
            count = m_blocks * heads
            through = count
            for step in cutlass.range_constexpr(5):
                lower = cute.arch.shuffle_sync_up(through, offset=1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    through = through + lower
            total = cute.arch.shuffle_sync(through, 31)
            if tile < before + total:
                kind = Int32(TILE)
                ahead = cute.arch.vote_ballot_sync(before + through <= tile)
                owner = cute.arch.popc(ahead)
                start = before + cute.arch.shuffle_sync(through - count, owner)
                info[BATCH] = first + owner
                info[SEQLEN_Q] = cute.arch.shuffle_sync(length, owner)
                info[FIRST_Q] = cute.arch.shuffle_sync(begin, owner)
                self.find_keys(info, operands)
                own_blocks = cute.arch.shuffle_sync(m_blocks, owner)
                beside = self.beside(own_blocks, heads, blocks)
                m_block, head = tiles.place(tile - start, own_blocks, heads, beside)
                info[M_BLOCK] = m_block
                info[HEAD] = head
            first = first + 32
            before = before + total
        return kind, before

    @cute.jit
    def query_span(self, b, operands):
        """Length and first row of sequence b's queries; 0 behind the last sequence."""
        c = self.config
        batch, _, _, max_q, _ = operands.shape
        length, begin = Int32(0), Int32(0)
        if b < batch:
            length = Int32(max_q)
            if cutlass.const_expr(c.packed_q):
                begin = operands.cu_seqlens_q[b]
                length = operands.cu_seqlens_q[b + 1] - begin
            if cutlass.const_expr(c.seqused_q):
                length = operands.seqused_q[b]
        return length, begin

    def find_keys(self, info, operands) -> None:
        """Length and first row of the keys of the sequence in `info`."""
        c = self.config
        b = info[BATCH]
        info[SEQLEN_K] = Int32(operands.shape[4])
        info[FIRST_K] = Int32(0)
        if c.packed_k:
            info[FIRST_K] = operands.cu_seqlens_k[b]
            info[SEQLEN_K] = operands.cu_seqlens_k[b + 1] - info[FIRST_K]
        if c.seqused_k:
            info[SEQLEN_K] = operands.seqused_k[b]

    def draw(self, drawn, fresh: Boolean, operands, lane) -> None:
        """Ask for the block's next tile: from the counter, which hands out what lies behind the blocks' first tiles.
        As late as the answer can be awaited, for a tile promised early to one block is missed by another at the end."""
        if self.config.dynamic:
            with when(fresh & (lane == 0)):
                drawn[0] = cute.arch.atomic_add(operands.tile_counter.iterator, Int32(1))

    def load_tile(
        self,
        words,
        low,
        high,
        q_ring,
        k_ring,
        v_ring,
        atoms,
        tensors,
        shared,
        storage,
        operands,
        lane,
        short_v_phase,
        drawn,
        fresh,
    ) -> None:
        """Q, then K one block ahead of V, from the last block to the first."""
        c = self.config
        _, heads_q, heads_kv, _, _ = operands.shape
        m_block, head, b = words[M_BLOCK], words[HEAD], words[BATCH]
        seqlen_k = words[SEQLEN_K]
        head_kv = head if c.pack_heads > 1 else head // (heads_q // heads_kv)

        q, k, v = tensors
        q = q[None, None, head] if c.packed_q else q[None, None, head, b]
        if c.packed_q:
            at = (0, words[FIRST_Q]) if c.pack_heads > 1 else words[FIRST_Q]
            q = cute.domain_offset((at, 0), q)
        if c.packed_k:
            k = cute.domain_offset((words[FIRST_K], 0), k[None, None, head_kv])
            v = cute.domain_offset((0, words[FIRST_K]), v[None, None, head_kv])
        else:
            k, v = k[None, None, head_kv, b], v[None, None, head_kv, b]
        shared_q, shared_k, shared_v = shared
        rows: Any = ROWS
        if c.pack_heads > 1:
            rows = (c.pack_heads, c.positions)
            if c.pack_heads * c.positions < ROWS:
                some = cute.make_layout(
                    (c.pack_heads * c.positions, c.tile_d, c.warpgroups * c.q_stages),
                    stride=(1, ROWS, ROWS * c.tile_d),
                )
                shared_q = cute.make_tensor(shared_q.iterator, cute.composition(shared_q.layout, some))
        q_tile = ((0, None), 0) if c.pack_heads > 1 else (None, 0)
        q_to, q_from = partition(atoms[0], shared_q, cute.local_tile(q, (rows, c.tile_d), q_tile))
        k_to, k_from = partition(atoms[1], shared_k, cute.local_tile(k, (c.tile_n, c.tile_d), (None, 0)))
        v_to, v_from = partition(atoms[2], shared_v, cute.local_tile(v, (c.tile_d_v, c.tile_n), (0, None)))

        def load_q(w: int | Int32) -> None:
            at = w * c.q_stages + q_ring.stage
            cute.arch.mbarrier_wait(q_ring.empty + at, q_ring.phase)
            size = 2 * c.pack_heads * c.positions * c.tile_d
            source = q_from[None, m_block * c.warpgroups + w]
            fill(atoms[0], source, q_to[None, at], q_ring.full + at, size)

        def load_k(j: Int32) -> None:
            self.load_block(atoms[1], k_from, k_to, k_ring, j, 2 * c.tile_n * c.tile_d)

        def load_v(j: Int32) -> None:
            self.load_block(atoms[2], v_from, v_to, v_ring, j, 2 * c.tile_n * c.tile_d_v)

        some = Branch(high > low)
        with some.then():
            j = high - 1
            load_q(0)
            load_k(j)
            self.load_others(load_q)
            q_ring.advance()
            if c.packed_k or c.seqused_k:
                # What lies behind the last key is another sequence's or nobody's: it must not reach P V as
                # 0 * NaN.  Zeros go there before the stage is called full.
                with when(j > low):
                    load_k(j - 1)
                short = Branch((j + 1) * c.tile_n > seqlen_k)
                with short.then():
                    self.load_short_v(
                        atoms[2], v_from, v_to, v_ring, j, seqlen_k, storage, lane, short_v_phase
                    )
                with short.otherwise():
                    load_v(j)
                j = j - 1
            self.load_blocks(j, low, load_k, load_v)
            self.draw(drawn, fresh, operands, lane)
            with when(j >= low):
                load_v(low)
        with some.otherwise():
            self.draw(drawn, fresh, operands, lane)

    @cute.jit
    def load_others(self, load_q: cutlass.Constexpr[Any]):
        """Q of all warpgroups but the first."""
        for w in cutlass.range(1, self.config.warpgroups, unroll=1):
            load_q(w)

    @cute.jit
    def load_blocks(self, j, low, load_k: cutlass.Constexpr[Any], load_v: cutlass.Constexpr[Any]):
        """V of blocks j to low but the last, each after the next one's K."""
        for i in cutlass.range(j - low, unroll=1):
            load_k(j - i - 1)
            load_v(j - i)

    def load_block(self, atom, source, target, into: Ring, j: Int32, size: int) -> None:
        into.wait_empty()
        fill(atom, source[None, j], target[None, into.stage], into.full + into.stage, size)
        into.advance()

    @cute.jit
    def load_short_v(self, atom, source, target, v_ring, j, seqlen_k, storage, lane, short_v_phase):
        """A V block that ends before its stage does: copied, then cleared behind the last key."""
        c = self.config
        v_ring.wait_empty()
        stage = v_ring.stage
        landed = storage.v_landed.data_ptr()
        fill(atom, source[None, j], target[None, stage], landed, 2 * c.tile_n * c.tile_d_v)
        phase = short_v_phase[0]
        cute.arch.mbarrier_wait(landed, phase)
        short_v_phase[0] = phase ^ 1
        plain = self.v_layout().outer
        base = storage.v.data_ptr()
        chunks = c.tile_d_v // 8
        i = (seqlen_k - j * c.tile_n) * chunks + lane
        while i < c.tile_n * chunks:
            at = cute.crd2idx((8 * (i % chunks), i // chunks, stage), plain)
            ptx.zero_16_shared_bytes(base + at)
            i = i + 32
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(v_ring.full + stage)
        v_ring.advance()

    # ---- compute warpgroups ----

    def make_probabilities(self, keys: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers of P for that many keys, as words and as the A operand of the product with V."""
        words = cute.make_rmem_tensor((keys // 4,), Int32)
        operand = cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=self.dtype),
            cute.make_layout(((2, 2, 2), 1, keys // 16), stride=((1, 2, 4), 0, 8)),
        )
        return words, operand

    def make_kept(self) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """Registers for the first columns of Q, as words and as the A operand of their product with K."""
        c = self.config
        words = cute.make_rmem_tensor((4 * c.q_registers,), Int32)
        layout = cute.make_layout(((2, 2, 2), 1, c.q_registers), stride=((1, 2, 4), 0, 8))
        operand = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), layout)
        shape, source = (ROWS, c.tile_n), warpgroup.OperandSource.RMEM
        return words, operand, make_mma(self.dtype, shape, OperandMajorMode.K, source)

    def compute(self, storage, shared_q, shared_k, shared_v, operands):
        """Scores, softmax, output: each warpgroup works on its own 64 rows of the tile, at its own pace."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        lane = cute.arch.lane_idx()

        scores_mma = make_mma(self.dtype, (ROWS, c.tile_n), OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        out_mma = make_mma(self.dtype, (ROWS, c.tile_d_v), OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        a, b = scores_mma.get_slice(thread), out_mma.get_slice(thread)
        q = a.make_fragment_A(a.partition_A(shared_q))
        k = a.make_fragment_B(a.partition_B(shared_k))
        v = b.make_fragment_B(b.partition_B(shared_v))
        out = b.make_fragment_C(b.partition_shape_C((ROWS, c.tile_d_v)))
        words, probabilities = self.make_probabilities(c.tile_n)
        kept = self.make_kept() if c.q_registers else None
        q_ring = Ring(
            storage.q_full.data_ptr() + group * c.q_stages,
            storage.q_empty.data_ptr() + group * c.q_stages,
            c.q_stages,
            False,
        )
        k_ring = Ring(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), c.k_stages, False)
        v_ring = Ring(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), c.v_stages, False)
        slots = Ring(storage.work_full.data_ptr(), storage.work_empty.data_ptr(), WORK_SLOTS, False)
        work = View(storage.work.get_tensor(cute.make_layout((WORDS, WORK_SLOTS))))
        failed = View(storage.failed.get_tensor(cute.make_layout((16, WORK_SLOTS))))  # a word for each warp
        scale = Float32(ptx.LOG2_E) if c.softcap else operands.softmax_scale * ptx.LOG2_E
        state = RowState(scale, self.dtype, c.softmax == "held")
        side = Warpgroup(
            self,
            group,
            thread,
            lane,
            (scores_mma, out_mma, a),
            (q, k, v),
            (out, words, probabilities),
            Narrow(self, thread, shared_k, shared_v, b) if c.softmax == "held" else None,
            kept,
            storage.q.data_ptr(),
            (q_ring, k_ring, v_ring),
            state,
            operands,
        )
        side.tiles(slots, work, failed)


class Narrow(Fixture):
    """Operands of the exact way: a block's K and V in parts of a few keys."""

    def __init__(self, kernel: Forward, thread, shared_k, shared_v, out_slice) -> None:
        c = kernel.config
        self.mma = make_mma(kernel.dtype, (ROWS, c.exact_n), OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        self.slice = self.mma.get_slice(thread)
        k = cute.local_tile(shared_k, (c.exact_n, c.tile_d), (None, 0, None))
        v = cute.local_tile(shared_v, (c.tile_d_v, c.exact_n), (0, None, None))
        self.k = self.slice.make_fragment_B(self.slice.partition_B(k))
        self.v = out_slice.make_fragment_B(out_slice.partition_B(v))
        self.words, self.probabilities = kernel.make_probabilities(c.exact_n)


class After(Fixture):
    """A tile that is computed but for its division and its store, for each of the thread's two rows."""

    def __init__(self, columns: int) -> None:
        self.factor = Registers(Float32, 2)
        self.address = Registers(Int64, 2)
        self.valid = Registers(Int32, 2)
        self.failed = Registers(Int32, 2)  # a held maximum failed the row
        self.words = Registers(Int32, columns // 4)
        self.waits = Registers(Int32, 1)
        self.waits[0] = Int32(0)


class Warpgroup(Fixture):
    """The place of one compute warpgroup: its operands, registers and rings."""

    def __init__(
        self,
        kernel,
        group,
        thread,
        lane,
        mmas,
        fragments,
        registers,
        narrow,
        kept,
        shared_q,
        rings,
        state,
        operands,
    ):
        self.kernel, self.config = kernel, kernel.config
        self.group, self.thread, self.lane = group, thread, lane
        self.scores_mma, self.out_mma, self.scores_slice = mmas
        self.q, self.k, self.v = fragments
        self.out, self.words, self.probabilities = registers
        self.narrow, self.kept, self.shared_q = narrow, kept, shared_q
        self.q_ring, self.k_ring, self.v_ring = rings
        self.state = state
        self.operands = operands
        self.after = After(self.config.tile_d_v)

    # ---- products ----

    def multiply_k(self) -> cute.Tensor:
        """Issue S = Q K^T on the next K stage.  S gets registers of its own each time: were they said to be the
        last block's, the assembler would see them written while other products run, and serialise all products."""
        self.k_ring.wait_full()
        scores = self.scores_slice.make_fragment_C(
            self.scores_slice.partition_shape_C((ROWS, self.config.tile_n))
        )
        warpgroup.fence()
        c = self.config
        q = self.q[None, None, None, self.group * c.q_stages + self.q_ring.stage]
        k = self.k[None, None, None, self.k_ring.stage]
        multiply(
            self.scores_mma,
            scores,
            q,
            k,
            fresh=True,
            steps=range(c.q_registers, c.tile_d // 16),
            in_place=c.in_place,
        )
        if c.q_registers:
            _, kept_q, kept_mma = self.kept
            multiply(kept_mma, scores, kept_q, k, fresh=False, steps=range(c.q_registers))
        warpgroup.commit_group()
        return scores

    def keep_q(self) -> None:
        """The first columns of Q to registers: the products need not read them from shared memory again."""
        c = self.config
        words, _, _ = self.kept
        row = self.thread // 32 * 16 + self.lane % 16
        stage = self.group * c.q_stages + self.q_ring.stage
        plain = self.kernel.q_layout().outer
        for i in range(c.q_registers):
            at = 2 * cute.crd2idx((row, 16 * i + self.lane // 16 * 8, stage), plain)
            at = at ^ (at >> 3 & 0x70)  # the swizzle of 128-byte rows
            for n, word in enumerate(ptx.load_matrices(Int32(self.shared_q.toint()) + at)):
                words[4 * i + n] = word

    def multiply_v(self, steps: int = 0) -> None:
        """Issue O += P V on the next V stage; of all keys, or of the first `steps` times 16."""
        self.v_ring.wait_full()
        self.issue_v(range(steps or self.config.tile_n // 16))

    def multiply_rest(self, steps: int) -> None:
        """Issue what `multiply_v(steps)` left."""
        self.issue_v(range(steps, self.config.tile_n // 16))

    def issue_v(self, steps: range) -> None:
        warpgroup.fence()
        v = self.v[None, None, None, self.v_ring.stage]
        multiply(self.out_mma, self.out, self.probabilities, v, fresh=False, steps=steps)
        warpgroup.commit_group()

    def release(self, of: Ring) -> None:
        """This warp has read the stage."""
        with when(self.lane == 0):
            cute.arch.mbarrier_arrive(of.empty + of.stage)
        of.advance()

    # ---- tiles ----

    @cute.jit
    def tiles(self, slots, work, failed):
        """Every tile the block is given, until the end is announced."""
        c = self.config
        kind = Int32(TILE)
        while kind != END:
            slots.wait_full()
            slot = slots.stage
            kind = work[KIND, slot]
            if (kind == TILE) | (kind == EXACT):
                info = work[None, slot]  # read where needed: registers are dear in between
                quick = self.tile(info, kind == EXACT)
                if cutlass.const_expr(c.softmax == "held"):
                    bad = (self.after.failed[0] | self.after.failed[1]) != 0
                    if cute.arch.vote_any_sync(bad & quick):
                        failed[self.group * 4 + self.thread // 32, slot] = Int32(1)
            cute.arch.sync_warp()
            self.release(slots)
        self.store()

    def tile(self, info, exact: Boolean) -> Boolean:
        """One tile; its output waits in registers, to be stored beside the next tile's first product.  The answer is
        whether it was done the fast way."""
        low, high = info[LOW], info[HIGH]
        own_low, own_high = info[OWN_LOW + self.group], info[OWN_HIGH + self.group]
        sees = own_high > own_low
        self.out.fill(0.0)
        self.state.start()
        with when(high > low):
            self.q_ring.wait_full()
            if self.kept:
                self.keep_q()
            # Blocks that only later rows of the tile see.
            self.pass_blocks(ptx.choose(sees, high - own_high, high - low))
        limits = self.limits(info)
        quick = sees & ~exact
        way = Branch(quick)
        with way.then():
            self.fast(info, own_low, own_high, limits)
        with way.otherwise():
            self.store()
            if self.narrow is not None:
                with when(sees):
                    self.exactly(own_low, own_high, limits)
            with when(high > low):
                self.release(self.q_ring)
            self.settle(info)
        with when(sees):
            self.pass_blocks(own_low - low)  # blocks that only earlier rows see
        self.divide()
        return quick

    def first(self, info) -> Int32:
        """Query position of the warpgroup's first row."""
        return (info[M_BLOCK] * self.config.warpgroups + self.group) * self.config.positions

    def rows(self, info):
        """Query position and head of this thread's two rows, and whether they exist."""
        c = self.config
        first = self.first(info)
        positions, heads, valid = [], [], []
        for half in range(2):
            row = self.thread // 32 * 16 + self.lane // 4 + 8 * half
            position, head = first + row, info[HEAD]
            there = position < info[SEQLEN_Q]
            if c.pack_heads > 1:
                position = first + row // c.pack_heads
                head = info[HEAD] * c.pack_heads + row % c.pack_heads
                there = (position < info[SEQLEN_Q]) & (row < c.pack_heads * c.positions)
            positions.append(position)
            heads.append(head)
            valid.append(there)
        return positions, heads, valid

    def limits(self, info):
        """The keys each row sees: [low, high); low is None without a left bound."""
        c = self.config
        positions, _, _ = self.rows(info)
        seqlen_k = info[SEQLEN_K]
        offset = seqlen_k - info[SEQLEN_Q]
        high = [seqlen_k, seqlen_k]
        low = None
        if c.bounded_right:
            reach = offset + self.operands.window_right + 1
            high = [ptx.least(seqlen_k, p + reach) for p in positions]
        if c.bounded_left:
            low = [p + offset - self.operands.window_left for p in positions]
        return low, high

    @cute.jit
    def pass_blocks(self, count):
        """Blocks that none of this warpgroup's rows sees; K and V in turn, as they are loaded."""
        for _ in cutlass.range(count, unroll=1):
            self.k_ring.wait_full()
            self.release(self.k_ring)
            self.v_ring.wait_full()
            self.release(self.v_ring)

    def cap(self, scores) -> None:
        """Softcap, where there is one."""
        if self.config.softcap:
            softmax.cap(scores, self.operands.softmax_scale, self.operands.softcap)

    def mask(self, scores, first_key, limits) -> None:
        """Hide the keys that a row doesn't see, in a block that starts at `first_key`."""
        low, high = limits
        softmax.mask(scores, first_key + self.lane % 4 * 2, low, high)

    # ---- blocks of a tile, from the last to the first ----

    def fast(self, info, low, high, limits) -> None:
        """The first block, then three loops: blocks cut on the right, whole ones, blocks cut on the left."""
        c = self.config
        first = self.first(info)
        offset = info[SEQLEN_K] - info[SEQLEN_Q]
        until, clear_low = info[SEQLEN_K], low
        if c.bounded_right:
            until = ptx.least(until, first + offset + self.operands.window_right + 1)
        clear_high = ptx.most(until, Int32(0)) // c.tile_n
        if c.bounded_left:
            since = first + c.positions - 1 + offset - self.operands.window_left
            clear_low = (ptx.most(since, Int32(0)) + c.tile_n - 1) // c.tile_n

        j = high - 1
        scores = self.multiply_k()
        self.store()
        warpgroup.wait_group(0)
        self.release(self.k_ring)
        self.cap(scores)
        self.mask(scores, j * c.tile_n, limits)
        if c.softmax == "held":
            self.state.hold(scores)
        else:
            self.state.raise_reference(scores)
        self.state.exponentials(scores, held=c.softmax == "held")
        if c.softmax == "held":
            self.state.settle_reference()
        block = self.state.sums(scores)
        self.state.pack(scores, self.words)
        self.state.add(self.words, block, first=True)
        j = j - 1
        if c.bounded_right:
            j = self.steps(j, ptx.most(clear_high, clear_low), limits, True)
        j = self.steps(j, clear_low, limits, False)
        if c.bounded_left:
            j = self.steps(j, low, limits, True)
        self.release(self.q_ring)
        self.multiply_v()
        self.settle(info)
        warpgroup.wait_group(0)
        self.release(self.v_ring)

    @cute.jit
    def steps(self, j, low, limits, masked: cutlass.Constexpr[bool]):
        """Blocks j to low; the answer is the first block that remains.

        The scores of block j are computed first, then the output of block j + 1, whose probabilities are at hand;
        the softmax of block j runs beside the second product."""
        c = self.config
        while j >= low:
            scores = self.multiply_k()
            self.multiply_v(c.v_ahead)
            warpgroup.wait_group(1)
            self.release(self.k_ring)
            self.cap(scores)
            if cutlass.const_expr(masked):
                self.mask(scores, j * c.tile_n, limits)
            if cutlass.const_expr(c.softmax == "online"):
                factors, moved = self.state.raise_reference(scores)
                self.state.lower(factors)
            if cutlass.const_expr(c.v_ahead):
                # The rest among the exponentials: an instruction waits while the tensor cores' queue is full, and
                # with it all that follows.
                self.state.exponentials(scores, held=True, part=0, parts=2)
                self.multiply_rest(c.v_ahead)
                self.state.exponentials(scores, held=True, part=1, parts=2)
            else:
                self.state.exponentials(scores, held=c.softmax == "held")
            block = self.state.sums(scores)
            warpgroup.wait_group(0)
            self.release(self.v_ring)
            if cutlass.const_expr(c.softmax == "online"):
                self.state.rescale(self.out, factors, moved)
            self.state.pack(scores, self.words)
            self.state.add(self.words, block)
            j = j - 1
        return j

    @cute.jit
    def exactly(self, low, high, limits):
        """A tile that a held maximum failed: a few keys at a time, all cut, a running maximum, nothing overlapped.

        It is rarely taken, so it is kept small: what counts is that it need not be assembled at full width."""
        c = self.config
        j = high - 1
        while j >= low:
            self.k_ring.wait_full()
            self.v_ring.wait_full()
            part = Int32(0)
            while part < c.tile_n // c.exact_n:
                scores = self.narrow.slice.make_fragment_C(
                    self.narrow.slice.partition_shape_C((ROWS, c.exact_n))
                )
                q = self.q[None, None, None, self.group * c.q_stages + self.q_ring.stage]
                warpgroup.fence()
                multiply(
                    self.narrow.mma,
                    scores,
                    q,
                    self.narrow.k[None, None, None, part, self.k_ring.stage],
                    fresh=True,
                )
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                self.cap(scores)
                self.mask(scores, j * c.tile_n + part * c.exact_n, limits)
                self.state.raise_to(scores, self.out)
                self.state.exponentials(scores)
                block = self.state.sums(scores)
                self.state.pack(scores, self.narrow.words)
                self.state.add(self.narrow.words, block)
                warpgroup.fence()
                v = self.narrow.v[None, None, None, part, self.v_ring.stage]
                multiply(self.out_mma, self.out, self.narrow.probabilities, v, fresh=False)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                part = part + 1
            self.release(self.k_ring)
            self.release(self.v_ring)
            j = j - 1

    # ---- the end of a tile ----

    def settle(self, info) -> None:
        """What a row's sum decides, and where its output goes: worked out beside the last product."""
        c = self.config
        state, operands, after = self.state, self.operands, self.after
        positions, heads, valid = self.rows(info)
        state.finish()
        for half in range(2):
            after.valid[half] = Int32(valid[half])
            after.failed[half] = Int32(valid[half] & ~state.in_bounds(half))
            down = Float32(1.0)
            if c.sink:
                down = state.add_sink(half, self.sink_of(heads[half], valid[half]))
            total = state.sum[half]
            used = total + state.rounding[half]
            after.factor[half] = ptx.choose(total == 0.0, Float32(0.0), down * cute.arch.rcp_approx(used))
            if c.packed_q:
                row = operands.out[info[FIRST_Q] + positions[half], heads[half], None]
            else:
                row = operands.out[info[BATCH], positions[half], heads[half], None]
            after.address[half] = row.iterator.toint()
            if c.lse:
                with when(valid[half] & (self.lane % 4 == 0)):
                    value = (state.reference[half] + ptx.log2(total)) * ptx.LN_2
                    if c.packed_q:
                        operands.lse[heads[half], info[FIRST_Q] + positions[half]] = value
                    else:
                        operands.lse[info[BATCH], heads[half], positions[half]] = value

    def divide(self) -> None:
        """The output by its row sums, rounded."""
        after = self.after
        softmax.scale_rows(self.out, [after.factor[half] for half in range(2)])
        words = vectors.pack(vectors.load(self.out), self.kernel.dtype)
        if self.config.softmax == "held":
            for half in range(2):
                finite = softmax.finite(words[half::2])
                after.failed[half] = after.failed[half] | (after.valid[half] & Int32(~finite))
        for i, word in enumerate(words):
            after.words[i] = word
        after.waits[0] = Int32(1)

    def store(self) -> None:
        """The last tile's output, if it waits.  (A branch of its own: the assembler would move it behind the wait for
        the product that it should run beside.)"""
        after = self.after
        with when(after.waits[0] != 0):
            words = [after.words[i] for i in range(self.config.tile_d_v // 4)]
            valid = [after.valid[half] != 0 for half in range(2)]
            store_rows(
                words, [after.address[half] for half in range(2)], valid, self.config.head_dim_v, self.lane
            )
            after.waits[0] = Int32(0)

    @cute.jit
    def sink_of(self, head, valid):
        """The head's sink, in log2 units."""
        sink = Float32(0.0)
        if valid:
            sink = Float32(self.operands.sink[head]) * ptx.LOG2_E
        return sink


def argument_names(config: ForwardConfig) -> list[str]:
    """Arguments of the compiled kernel, in call order."""
    used = {
        "lse": config.lse,
        "cu_seqlens_q": config.packed_q,
        "cu_seqlens_k": config.packed_k,
        "seqused_q": config.seqused_q,
        "seqused_k": config.seqused_k,
        "max_seqlen_q": config.packed_q,
        "max_seqlen_k": config.packed_k,
        "sink": config.sink,
        "window_left": config.bounded_left,
        "window_right": config.bounded_right,
        "softcap": config.softcap,
        "tile_counter": config.dynamic,
    }
    names = ["q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"]
    names += ["max_seqlen_q", "max_seqlen_k", "sink", "softmax_scale", "window_left", "window_right"]
    names += ["softcap", "tile_counter", "num_blocks", "stream"]
    return [name for name in names if used.get(name, True)]


def fake_arguments(config: ForwardConfig) -> dict[str, Any]:
    """What `argument_names` names, in types that a kernel is compiled for.

    q, k, v, out have any strides whose last is 1 and whose others are multiples of 8 elements (16 bytes).
    `tile_counter` begins with an int32 that is 0 at the start and that every launch leaves 0: launches that may run at
    the same time need one each.  `num_blocks` is how many blocks the device runs at once."""
    dtype = DTYPES[config.dtype]
    batch, heads_q, heads_kv = (cute.sym_int() for _ in range(3))
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()

    def rows(length, heads, dim, packed: bool):
        shape = (length, heads, dim) if packed else (batch, length, heads, dim)
        stride = tuple(cute.sym_int64(divisibility=8) for _ in shape[:-1]) + (1,)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    def vector(kind, *shape):
        stride = tuple(cute.sym_int64() for _ in shape[:-1]) + (1,)
        return make_fake_tensor(kind, shape, stride, assumed_align=4)

    all_arguments = {
        "q": rows(seqlen_q, heads_q, config.head_dim, config.packed_q),
        "k": rows(seqlen_k, heads_kv, config.head_dim, config.packed_k),
        "v": rows(seqlen_k, heads_kv, config.head_dim_v, config.packed_k),
        "out": rows(seqlen_q, heads_q, config.head_dim_v, config.packed_q),
        "lse": vector(Float32, *((heads_q, seqlen_q) if config.packed_q else (batch, heads_q, seqlen_q))),
        "cu_seqlens_q": vector(Int32, cute.sym_int()),
        "cu_seqlens_k": vector(Int32, cute.sym_int()),
        "seqused_q": vector(Int32, cute.sym_int()),
        "seqused_k": vector(Int32, cute.sym_int()),
        "max_seqlen_q": Int32(0),
        "max_seqlen_k": Int32(0),
        "sink": vector(Float32, heads_q),
        "softmax_scale": Float32(0.0),
        "window_left": Int32(0),
        "window_right": Int32(0),
        "softcap": Float32(0.0),
        "tile_counter": vector(Int32, cute.sym_int()),
        "num_blocks": Int32(0),
        "stream": make_fake_stream(use_tvm_ffi_env_stream=True),
    }
    return {name: all_arguments[name] for name in argument_names(config)}


# ---- small pieces ----


def q_head_mode(config: ForwardConfig) -> int:
    return 1 if config.packed_q else 2


def k_head_mode(config: ForwardConfig) -> int:
    return 1 if config.packed_k else 2


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
