"""Where a row of O goes: normalised, with its log-sum-exp, straight from registers to global memory.

A thread owns a row, so it writes whole 32-byte sectors of it by itself: no staging in shared memory, no barrier, and
every row is predicated on its own, so that short tiles, packed sequences and shared rows need no other way.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from coflash.kernels.parts import exp2 as exponentials
from coflash.kernels.parts.fixture import Fixture
from coflash.kernels.parts.ptx import LN_2, LOG2_E
from coflash.kernels.parts.ptx import choose as select
from coflash.kernels.sm100 import chunks
from coflash.kernels.sm100 import instructions as op
from coflash.kernels.sm100.config import ForwardConfig

INFINITY = Float32.inf


def store_bytes(config: ForwardConfig) -> int:
    """Bytes of one store: a sector, unless rows are only aligned to half of one."""
    return 32 if config.head_dim_v % 16 == 0 else 16


class Target(Fixture):
    """One row of the output. Rows past the end of the sequence are nobody's."""

    def __init__(self, call, work, row: Int32, total: Float32, reference: Float32) -> None:
        c = call.config
        self.config = c
        self.chunk = 32 if c.tile_d_v % 32 == 0 else 16
        self.there = row < work.length_q
        position = work.offset_q + row // c.pack_heads
        head = work.head
        if c.pack_heads > 1:
            head = head * c.pack_heads + row % c.pack_heads
        self.factor, lse = self._normalise(call, total, reference, head)
        out = call.out
        strides = out.stride if not c.packed_q else (0, *out.stride)
        place = Int64(position) * strides[1] + Int64(head) * strides[2] + Int64(work.batch_q) * strides[0]
        self.address = out.iterator.toint() + 2 * place
        if c.lse:
            self._store_lse(call, work, position, head, lse)

    def _normalise(self, call, total: Float32, reference: Float32, head: Int32) -> tuple[Float32, Float32]:
        """What O is multiplied by, and the log-sum-exp. A row that saw nothing has sum 0 and gives 0 and -inf."""
        if self.config.sink:
            sink = Float32(0.0)
            sink = self._sink(call, head) * LOG2_E
            top = cute.arch.fmax(reference, sink)
            top = select(top == -INFINITY, Float32(0.0), top)
            shrink = exponentials.exp2(reference - top)
            total = total * shrink + exponentials.exp2(sink - top)
        else:
            top, shrink = reference, Float32(1.0)
        factor = select(total > 0.0, op.rcp(total) * shrink, Float32(0.0))
        lse = select(total > 0.0, (top + op.log2(total)) * LN_2, Float32(-INFINITY))
        return factor, lse

    @cute.jit
    def _sink(self, call, head):
        sink = Float32(0.0)
        if self.there:
            sink = call.sink[head]
        return sink

    @cute.jit
    def _store_lse(self, call, work, position, head, lse):
        if self.there:
            if cutlass.const_expr(self.config.packed_q):
                call.lse[head, position] = lse
            else:
                call.lse[work.batch, head, position] = lse

    def store(self, first: int, values: list) -> None:
        """O's columns from `first` on, divided by the row's sum."""
        self._store(first, chunks.rounded(values, op.twice(self.factor), self.config.dtype))

    def store_nothing(self, first: int) -> None:
        """Zeros, for a row that sees no key."""
        self._store(first, [Int32(0)] * (self.chunk // 2))

    @cute.jit
    def _store(self, first: cutlass.Constexpr[int], words):
        if self.there:
            size = store_bytes(self.config) // 4
            for i in cutlass.range_constexpr(0, self.chunk // 2, size):
                if cutlass.const_expr(first + 2 * i < self.config.head_dim_v):
                    op.store_global(self.address + (2 * first + 4 * i), words[i : i + size])
