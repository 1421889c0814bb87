"""Attention forward for Hopper (sm_90a)."""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from coflash.kernels.parts import ptx, tiles
from coflash.kernels.parts.control import Branch, when
from coflash.kernels.parts.fixture import Registers
from coflash.kernels.parts.ring import Ring
from coflash.kernels.sm90.compute import Warpgroup
from coflash.kernels.sm90.config import ROWS, WORK_SLOTS, ForwardConfig
from coflash.kernels.sm90.shared import (
    BATCH,
    DTYPES,
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
    Given,
    Operands,
    Shared,
    k_layout,
    q_layout,
    v_layout,
)


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
        k_atom, k_tensor = self.make_kv_copy(k, config.packed_k, k_layout(config), transposed=False)
        v_atom, v_tensor = self.make_kv_copy(v, config.packed_k, v_layout(config), transposed=True)

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

    # ---- copies ----

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
        layout = cute.slice_(q_layout(c), (None, None, 0))
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
        shared = Shared(c)

        if c.pack_heads * c.positions < ROWS:
            shared.clear_q()
        with when(warp == 0):
            for atom in (q_atom, k_atom, v_atom):
                cpasync.prefetch_descriptor(atom)
            shared.start_barriers()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        side = Branch(warp < 4)
        with side.then():
            cute.arch.setmaxregister_decrease(c.registers[0])
            with when(warp == 0):
                self.load(shared, (q_atom, k_atom, v_atom), (q_tensor, k_tensor, v_tensor), given)
        with side.otherwise():
            cute.arch.setmaxregister_increase(c.registers[1])
            Warpgroup(shared, given).tiles()

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
    def load(self, shared, atoms, tensors, operands):
        """Hands out tiles and feeds the rings: one warp.

        A tile is published in a work slot, then its Q, K and V are copied, as far ahead of the warpgroups as
        slots and stages allow.  A slot that comes back with a failed verdict is published again, to be done the
        exact way; the last slots are awaited for their verdicts before the end is announced."""
        c = self.config
        batch, heads_q, heads_kv, max_q, max_k = operands.shape
        lane = cute.arch.lane_idx()
        work, failed = shared.work(), shared.verdicts()
        slots = shared.slots(producer=True)
        # One Q ring for all warpgroups: theirs move in step.
        q_ring, k_ring, v_ring = shared.rings(producer=True)

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
        q_tile = ((0, None), 0) if c.pack_heads > 1 else (None, 0)
        q_to, q_from = partition(atoms[0], shared_q, cute.local_tile(q, (rows, c.tile_d), q_tile))
        k_to, k_from = partition(atoms[1], shared.k, cute.local_tile(k, (c.tile_n, c.tile_d), (None, 0)))
        v_to, v_from = partition(atoms[2], shared.v, cute.local_tile(v, (c.tile_d_v, c.tile_n), (0, None)))

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
                        atoms[2], v_from, v_to, v_ring, j, seqlen_k, shared, lane, short_v_phase
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
    def load_short_v(self, atom, source, target, v_ring, j, seqlen_k, shared, lane, short_v_phase):
        """A V block that ends before its stage does: copied, then cleared behind the last key."""
        c = self.config
        v_ring.wait_empty()
        stage = v_ring.stage
        landed = shared.storage.v_landed.data_ptr()
        fill(atom, source[None, j], target[None, stage], landed, 2 * c.tile_n * c.tile_d_v)
        phase = short_v_phase[0]
        cute.arch.mbarrier_wait(landed, phase)
        short_v_phase[0] = phase ^ 1
        plain = v_layout(c).outer
        base = shared.storage.v.data_ptr()
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
