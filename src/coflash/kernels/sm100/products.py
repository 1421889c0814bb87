"""The products of the forward: descriptors of the operands, and the order of a product's steps."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from coflash.kernels.parts.fixture import Fixture
from coflash.kernels.sm100 import instructions as op
from coflash.kernels.sm100.config import BLOCK, ROWS, ForwardConfig
from coflash.kernels.sm100.shared import Barrier, Ring

STEP = 16  # the K of a 16-bit tcgen05.mma
SWIZZLES = {64: 2, 32: 4, 16: 6}  # columns of a panel -> swizzle code of a shared-memory descriptor
EVERYONE = 0b11  # both CTAs of a pair


def instruction_descriptor(config: ForwardConfig, n: int, b_major: int) -> int:
    """The 32-bit descriptor of a kind::f16 product with float32 accumulators; b_major 1: B's rows run along N."""
    element = {"fp16": 0, "bf16": 1}[config.dtype]
    m = ROWS * config.ctas
    return 1 << 4 | element << 7 | element << 10 | b_major << 16 | n >> 3 << 17 | m >> 4 << 24


class Operand(Fixture):
    """Descriptors of an operand tile that lies in shared memory as panels of swizzled rows."""

    def __init__(self, panel: int, rows: int, leading_bytes: int) -> None:
        self.panel_bytes = 2 * panel * rows
        self.panel = panel
        eight_rows = 16 * panel
        self.high = SWIZZLES[panel] << 29 | 1 << 14 | eight_rows >> 4  # descriptor version 1
        self.leading = leading_bytes >> 4 << 16

    def at(self, buffer: Int32) -> Int32:
        """The low half for the tile at `buffer`; offsets (in 16 bytes) are added to it."""
        return (buffer >> 4) | self.leading

    def descriptor(self, low: Int32, offset: int) -> Int64:
        return op.join(low + (offset >> 4), self.high)

    def along_rows(self, k: int) -> int:
        """Bytes to step k when the product sums along a row (Q and K)."""
        return k * STEP // self.panel * self.panel_bytes + 2 * (k * STEP % self.panel)

    def across_rows(self, k: int) -> int:
        """Bytes to step k when it sums from row to row (V)."""
        return k * STEP * 2 * self.panel


class Products(Fixture):
    """Issues products and the commits behind them; one thread."""

    def __init__(self, forward, sh, columns: Int32) -> None:
        c = forward.config
        self.config, self.group, self.sh, self.columns = c, forward.group, sh, columns
        self.q = Operand(c.panel, ROWS, 16)
        self.k = Operand(c.panel, c.keys, 16)
        self.v = Operand(c.panel_v, BLOCK, 2 * c.panel_v * BLOCK)
        self.scores_form = instruction_descriptor(c, BLOCK, 0)
        self.values_form = instruction_descriptor(c, c.tile_d_v, 1)
        self.q_rings = [
            Ring(sh.q_full + 8 * t * c.q_stages, sh.q_empty + 8 * t * c.q_stages, c.q_stages, producer=False)
            for t in range(c.q_tiles)
        ]
        if c.q_tiles == 1:
            self.p_ring = Ring(sh.p_late, sh.p_late, 2, producer=False)
            self.blocks = cute.make_rmem_tensor((1,), Int32)  # products with V so far
            self.blocks[0] = Int32(0)
        self.p_early = [Barrier(sh.p_early + 8 * t) for t in range(c.q_tiles)]
        self.p_late = [Barrier(sh.p_late + 8 * t) for t in range(c.q_tiles)]
        self.o_free = [Barrier(sh.o_free + 8 * t, first=1) for t in range(c.q_tiles)]

    def commit(self, barrier: Int32) -> None:
        """Arrive, in all CTAs, when everything issued so far is done."""
        op.commit(barrier, EVERYONE if self.config.ctas == 2 else None)

    def issue(self, d: Int32, a, b: Int64, form: int, accumulate) -> None:
        kind, group = prims.Tcgen05MMAKind.F16, prims.CTAGroup(self.group)
        prims.tcgen05_mma(kind, group, op.tensor(d), a, b, form, accumulate)

    @cute.jit
    def scores(self, t: cutlass.Constexpr[int], buffer, k_stage, first, last):
        """S = Q K^T of tile t, into a buffer of S; `first` and `last` say which block of the item this is."""
        c, sh = self.config, self.sh
        ring = self.q_rings[t]
        if first:
            ring.wait_full()
        q = self.q.at(sh.q + (t * c.q_stages + ring.stage) * c.q_bytes)
        k = self.k.at(sh.kv + k_stage * c.kv_bytes)
        for step in cutlass.range_constexpr(c.tile_d // STEP):
            self.issue(
                self.columns + c.s_columns + buffer * BLOCK,
                self.q.descriptor(q, self.q.along_rows(step)),
                self.k.descriptor(k, self.k.along_rows(step)),
                self.scores_form,
                step > 0,
            )
        self.commit(sh.s_full + 8 * buffer)
        if last:
            self.commit(ring.empty_at(ring.stage))
            ring.advance()

    @cute.jit
    def values(self, t: cutlass.Constexpr[int], buffer, v_stage, first, last):
        """O of tile t (+)= P V, as far as P is there."""
        c, sh = self.config, self.sh
        # What is handed over lies in tensor memory, and tcgen05 fences stand on either side of the barrier.
        order = "relaxed.cluster" if c.ctas == 2 else "acquire.cta"
        if first:
            self.o_free[t].wait(order=order)
        if cutlass.const_expr(c.q_tiles == 1):
            self.p_ring.wait_full(order=order)
            self.p_ring.advance()
        else:
            (self.p_early if c.early else self.p_late)[t].wait(order=order)
        prims.tcgen05_fence("after_thread_sync")
        v = self.v.at(sh.kv + v_stage * c.kv_bytes)
        for step in cutlass.range_constexpr(BLOCK // STEP):
            if cutlass.const_expr(c.early and step * STEP == c.early_keys):
                # Lest the assembler move the steps so far below the wait, which is relaxed.
                prims.tcgen05_fence("before_thread_sync")
                self.p_late[t].wait(order=order)
                prims.tcgen05_fence("after_thread_sync")
            accumulate = Boolean(True)
            if cutlass.const_expr(step == 0):
                accumulate = first == Boolean(False)
            self.issue(
                self.columns + c.o_columns + t * c.tile_d_v,
                op.tensor(self.columns + c.s_columns + buffer * BLOCK + step * (STEP // 2)),
                self.v.descriptor(v, self.v.across_rows(step)),
                self.values_form,
                accumulate,
            )
        if cutlass.const_expr(c.q_tiles == 1):
            self.commit(sh.o_done)
        if last:
            self.commit(sh.o_full + 8 * t)
