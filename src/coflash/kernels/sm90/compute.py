"""The compute warpgroups of the Hopper forward: scores, softmax, output."""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from coflash.kernels.parts import ptx, softmax, vectors
from coflash.kernels.parts.control import Branch, when
from coflash.kernels.parts.fixture import Fixture, Registers
from coflash.kernels.parts.ring import Ring
from coflash.kernels.parts.softmax import RowState
from coflash.kernels.parts.store import store_rows
from coflash.kernels.sm90.config import ROWS, WARPGROUP, ForwardConfig
from coflash.kernels.sm90.products import make_mma, multiply
from coflash.kernels.sm90.shared import (
    BATCH,
    DTYPES,
    END,
    EXACT,
    FIRST_Q,
    HEAD,
    HIGH,
    KIND,
    LOW,
    M_BLOCK,
    OWN_HIGH,
    OWN_LOW,
    SEQLEN_K,
    SEQLEN_Q,
    TILE,
    Operands,
    Shared,
    q_layout,
)


class Warpgroup(Fixture):
    """One compute warpgroup: works on its own 64 rows of every tile, at its own pace."""

    def __init__(self, shared: Shared, operands: Operands) -> None:
        c = self.config = shared.config
        self.shared, self.operands, self.dtype = shared, operands, shared.dtype
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread % WARPGROUP
        self.group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        self.lane = cute.arch.lane_idx()

        self.scores_mma = make_mma(
            self.dtype, (ROWS, c.tile_n), OperandMajorMode.K, warpgroup.OperandSource.SMEM
        )
        self.out_mma = make_mma(
            self.dtype, (ROWS, c.tile_d_v), OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        )
        a, b = self.scores_mma.get_slice(self.thread), self.out_mma.get_slice(self.thread)
        self.scores_slice = a
        self.q = a.make_fragment_A(a.partition_A(shared.q))
        self.k = a.make_fragment_B(a.partition_B(shared.k))
        self.v = b.make_fragment_B(b.partition_B(shared.v))
        self.out = b.make_fragment_C(b.partition_shape_C((ROWS, c.tile_d_v)))
        self.words, self.probabilities = make_operand(c, c.tile_n // 16)
        if c.q_registers:  # columns of Q that stay in registers, and their product with K
            self.kept_words, self.kept = make_operand(c, c.q_registers)
            shape = ROWS, c.tile_n
            self.kept_mma = make_mma(self.dtype, shape, OperandMajorMode.K, warpgroup.OperandSource.RMEM)
        self.q_ring, self.k_ring, self.v_ring = shared.rings(producer=False, group=self.group)
        self.slots = shared.slots(producer=False)
        self.work, self.failed = shared.work(), shared.verdicts()
        scale = Float32(ptx.LOG2_E) if c.softcap else operands.softmax_scale * ptx.LOG2_E
        self.state = RowState(scale, self.dtype, c.softmax == "held")
        self.narrow = Narrow(shared, self.thread, b) if c.softmax == "held" else None
        self.after = After(c.tile_d_v)

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
            multiply(self.kept_mma, scores, self.kept, k, fresh=False, steps=range(c.q_registers))
        warpgroup.commit_group()
        return scores

    def keep_q(self) -> None:
        """The first columns of Q to registers: the products need not read them from shared memory again."""
        c = self.config
        row = self.thread // 32 * 16 + self.lane % 16
        stage = self.group * c.q_stages + self.q_ring.stage
        plain = q_layout(c).outer
        for i in range(c.q_registers):
            at = 2 * cute.crd2idx((row, 16 * i + self.lane // 16 * 8, stage), plain)
            at = at ^ (at >> 3 & 0x70)  # the swizzle of 128-byte rows
            for n, word in enumerate(ptx.load_matrices(Int32(self.shared.storage.q.data_ptr().toint()) + at)):
                self.kept_words[4 * i + n] = word

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
    def tiles(self):
        """Every tile the block is given, until the end is announced."""
        c = self.config
        kind = Int32(TILE)
        while kind != END:
            self.slots.wait_full()
            slot = self.slots.stage
            kind = self.work[KIND, slot]
            if (kind == TILE) | (kind == EXACT):
                info = self.work[None, slot]  # read where needed: registers are dear in between
                quick = self.tile(info, kind == EXACT)
                if cutlass.const_expr(c.softmax == "held"):
                    bad = (self.after.failed[0] | self.after.failed[1]) != 0
                    if cute.arch.vote_any_sync(bad & quick):
                        self.failed[self.group * 4 + self.thread // 32, slot] = Int32(1)
            cute.arch.sync_warp()
            self.release(self.slots)
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
            if self.config.q_registers:
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
            self.state.exponentials(scores, held=True)
            self.state.settle_reference()
        else:
            self.state.raise_reference(scores)
            self.state.exponentials(scores)
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
        words = vectors.pack(vectors.load(self.out), self.dtype)
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


class Narrow(Fixture):
    """Operands of the exact way: a block's K and V in parts of a few keys."""

    def __init__(self, shared: Shared, thread, out_slice) -> None:
        c = shared.config
        self.mma = make_mma(shared.dtype, (ROWS, c.exact_n), OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        self.slice = self.mma.get_slice(thread)
        k = cute.local_tile(shared.k, (c.exact_n, c.tile_d), (None, 0, None))
        v = cute.local_tile(shared.v, (c.tile_d_v, c.exact_n), (0, None, None))
        self.k = self.slice.make_fragment_B(self.slice.partition_B(k))
        self.v = out_slice.make_fragment_B(out_slice.partition_B(v))
        self.words, self.probabilities = make_operand(c, c.exact_n // 16)


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


def make_operand(config: ForwardConfig, steps: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers of a product's A operand of that many steps of 16, as words and as the operand."""
    words = cute.make_rmem_tensor((4 * steps,), Int32)
    operand = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=DTYPES[config.dtype]),
        cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, 8)),
    )
    return words, operand
