"""Who knows of what: vector clocks, and the shadow of a memory that is held against them.

Components of a clock are the agents whose accesses can be ordered only by synchronisation: each warp (what its threads
do through the generic proxy), and each stream of asynchronous operations that completes in order or is observed as a
whole: the transactions of one mbarrier (time = number of the phase), the wgmma of a warpgroup, the tcgen05 pipe of a
CTA, the bulk groups of a warp (reads and writes apart), the tcgen05.ld and tcgen05.st of a warp, its cp.async groups.

A warp carries two clocks. `vc[GENERIC]` is everything that happened before; `vc[ASYNC]` is the part of it that the
async proxy sees: a write through the generic proxy gets there when a fence.proxy.async lies between it and the
synchronisation. Generic accesses are held against the first, asynchronous ones against the second (as it was when they
were issued). Barriers join and hand over both.

The third clock, `vc[TENSOR]`, is what tcgen05.fence orders: a thread's own tcgen05.ld and st get into it at a
fence::before_thread_sync (a commit does that by itself), and what barriers bring arrives in it at a
fence::after_thread_sync. tcgen05 operations are held against it too, in kernels that use these fences at all. Between
these two fences a relaxed arrival and a relaxed wait are enough to order tcgen05 operations, and order nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GENERIC, ASYNC, TENSOR = 0, 1, 2
CAPACITY = 4096
Clock = NDArray[np.int32]  # [3, CAPACITY]


class Clocks:
    """The clocks of one cluster's warps. Row r belongs to warp r of the cluster; its own component is r + 1."""

    def __init__(self, warps: int):
        self.warps = warps
        self.names: list[str] = ["the host"] + [""] * warps
        self.asynchronous = np.zeros(CAPACITY, np.bool_)
        self.index: dict[Any, int] = {}
        self.used = warps + 1
        self.vc = np.zeros((3, warps, CAPACITY), np.int32)
        self.unfenced = np.zeros((warps, CAPACITY), np.int32)  # brought by barriers, no fence::after yet
        self.tensor = np.zeros(CAPACITY, np.bool_)
        self.tensor_fences = False
        # What a tcgen05.fence::before_thread_sync made fit for relaxed arrivals: of tcgen05 agents alone.
        self.tensor_fenced = np.zeros((3, warps, CAPACITY), np.int32)
        own = np.arange(warps)
        self.vc[GENERIC, own, own + 1] = 1

    def component(self, key: Any, name: str, tensor: bool = False) -> int:
        """The number of an asynchronous agent; `tensor` for those whose order tcgen05.fence is about."""
        found = self.index.get(key)
        if found is None:
            if self.used >= CAPACITY:
                raise RuntimeError(f"more than {CAPACITY} agents in one cluster: turn the check 'races' off")
            found = self.index[key] = self.used
            self.names.append(name)
            self.asynchronous[found] = True
            self.tensor[found] = tensor
            self.used += 1
        return found

    def fresh(self) -> Clock:
        return np.zeros((3, CAPACITY), np.int32)

    def release(self, rows: list[int] | NDArray[np.intp], into: Clock) -> None:
        """What these warps know goes into a synchronisation object."""
        n = self.used
        target = into[:, :n]
        if len(rows) == 1:
            np.maximum(target, self.vc[:, rows[0], :n], out=target)
            self.vc[GENERIC, rows[0], rows[0] + 1] += 1
        else:
            np.maximum(target, self.vc[:, rows, :n].max(axis=1), out=target)
            for r in rows:
                self.vc[GENERIC, r, r + 1] += 1

    def acquire(self, rows: list[int] | NDArray[np.intp], source: Clock) -> None:
        """What a synchronisation object holds becomes known to these warps."""
        n = self.used
        for r in rows:
            mine = self.vc[:TENSOR, r, :n]
            np.maximum(mine, source[:TENSOR, :n], out=mine)
            if self.tensor_fences:
                np.maximum(self.unfenced[r, :n], source[TENSOR, :n], out=self.unfenced[r, :n])

    def tensor_fence(self, row: int, after: bool, own: list[int]) -> None:
        """tcgen05.fence: before_thread_sync hands over the warp's own accesses, after_thread_sync takes in others'."""
        mine = self.vc[TENSOR, row]
        if after:
            np.maximum(mine, self.unfenced[row], out=mine)
        else:
            mine[own] = self.vc[GENERIC, row, own]
            n = self.used
            np.copyto(self.tensor_fenced[:, row, :n], self.vc[:, row, :n], where=self.tensor[:n])

    def acquire_tensor(self, row: int, source: Clock) -> None:
        """What a relaxed wait brought of tcgen05 agents, at the fence::after_thread_sync behind it."""
        n = self.used
        mine = self.vc[:, row, :n]
        np.maximum(mine, source[:, :n], out=mine, where=self.tensor[:n])

    def proxy_fence(self, rows: list[int] | NDArray[np.intp]) -> None:
        """fence.proxy.async: what the warp knows, the async proxy sees from here on."""
        n = self.used
        for r in rows:
            np.maximum(self.vc[ASYNC, r, :n], self.vc[GENERIC, r, :n], out=self.vc[ASYNC, r, :n])
            self.vc[GENERIC, r, r + 1] += 1

    def observe(self, rows: list[int] | NDArray[np.intp], component: int, time: int) -> None:
        """The warp has waited for an asynchronous agent up to a time."""
        for r in rows:
            column = self.vc[:TENSOR, r, component]
            np.maximum(column, time, out=column)

    def snapshot(self, row: int) -> Clock:
        """The clock of an asynchronous operation that the warp issues now."""
        return self.vc[:, row].copy()


@dataclass(slots=True)
class Conflict:
    """The first of an access's elements that is not ordered after what was there before."""

    element: int  # index into the access's elements
    location: int
    component: int
    time: int
    pc: int
    earlier: str  # "written" or "read"
    fence: bool = False  # ordered but for a tcgen05.fence


class Shadow:
    """For every cell of a memory: who wrote it last, who has read it since, and when."""

    def __init__(self, cells: int, clocks: Clocks, tensor: bool = False):
        self.clocks = clocks
        self.tensor = tensor
        self.writer = np.zeros(cells, np.int32)
        self.write_time = np.zeros(cells, np.int32)
        self.write_pc = np.full(cells, -1, np.int32)
        self.slots: dict[int, int] = {}
        self.slot_component = np.zeros(0, np.intp)
        self.read_time = np.zeros((0, cells), np.int32)
        self.read_pc = np.zeros((0, cells), np.int32)
        self.cells = cells

    def slot(self, component: int) -> int:
        found = self.slots.get(component)
        if found is None:
            found = self.slots[component] = len(self.slots)
            self.slot_component = np.append(self.slot_component, component)
            if found >= len(self.read_time):
                grow = max(4, len(self.read_time))
                more = np.zeros((grow, self.cells), np.int32)
                self.read_time = np.concatenate([self.read_time, more])
                self.read_pc = np.concatenate([self.read_pc, more])
        return found

    def unwritten(self, cells: NDArray) -> NDArray[np.bool_]:
        return self.write_pc[cells] < 0

    # -- by warps: `rows` is the cluster row of each element's warp

    def warp_read(self, cells: NDArray, rows: NDArray, pc: int) -> Conflict | None:
        clocks = self.clocks
        component, time = self.writer[cells], self.write_time[cells]
        bad = time > clocks.vc[GENERIC, rows, component]
        conflict = self._first(bad, cells, component, time) if bad.any() else None
        distinct = rows[:1] if rows[0] == rows[-1] else np.unique(rows)
        for row in distinct:
            slot = self.slot(int(row) + 1)
            mine = cells if len(distinct) == 1 else cells[rows == row]
            self.read_time[slot, mine] = clocks.vc[GENERIC, row, row + 1]
            self.read_pc[slot, mine] = pc
        return conflict

    def warp_write(self, cells: NDArray, rows: NDArray, pc: int) -> Conflict | None:
        clocks = self.clocks
        component, time = self.writer[cells], self.write_time[cells]
        conflict = None
        bad = time > clocks.vc[GENERIC, rows, component]
        if bad.any():
            conflict = self._first(bad, cells, component, time)
        elif self.slots:
            used = len(self.slots)
            seen = self.read_time[:used, cells]
            late = seen > clocks.vc[GENERIC, rows[None, :], self.slot_component[:used, None]]
            if late.any():
                conflict = self._reader(late, seen, cells)
        self.writer[cells] = rows + 1
        self.write_time[cells] = clocks.vc[GENERIC, rows, rows + 1]
        self.write_pc[cells] = pc
        return conflict

    # -- by asynchronous operations, held against the clock of their issue

    def async_read(self, cells: NDArray, clock: Clock, component: int, time: int, pc: int) -> Conflict | None:
        writer, when = self.writer[cells], self.write_time[cells]
        bad = when > clock[ASYNC][writer]
        conflict = None
        if bad.any():
            conflict = self._first(bad, cells, writer, when)
        elif self.tensor and self.clocks.tensor_fences:
            conflict = self._unfenced(cells, clock, writer, when)
        slot = self.slot(component)
        self.read_time[slot, cells] = time
        self.read_pc[slot, cells] = pc
        return conflict

    def async_write(
        self, cells: NDArray, clock: Clock, component: int, time: int, pc: int
    ) -> Conflict | None:
        writer, when = self.writer[cells], self.write_time[cells]
        known = clock[ASYNC]
        conflict = None
        bad = when > known[writer]
        if bad.any():
            conflict = self._first(bad, cells, writer, when)
        elif self.slots:
            used = len(self.slots)
            seen = self.read_time[:used, cells]
            # A read needs no proxy fence before the location is written again: order is enough.
            late = seen > clock[GENERIC][self.slot_component[:used]][:, None]
            if late.any():
                conflict = self._reader(late, seen, cells)
        if conflict is None and self.tensor and self.clocks.tensor_fences:
            conflict = self._unfenced(cells, clock, writer, when)
            if conflict is None and self.slots:
                used = len(self.slots)
                slots = self.slot_component[:used]
                seen = self.read_time[:used, cells]
                late = (seen > clock[TENSOR][slots][:, None]) & self.clocks.tensor[slots][:, None]
                if late.any():
                    conflict = self._reader(late, seen, cells)
                    conflict.fence = True
        self.writer[cells] = component
        self.write_time[cells] = time
        self.write_pc[cells] = pc
        return conflict

    def _unfenced(self, cells: NDArray, clock: Clock, writer: NDArray, when: NDArray) -> Conflict | None:
        bad = (when > clock[TENSOR][writer]) & self.clocks.tensor[writer]
        if not bad.any():
            return None
        conflict = self._first(bad, cells, writer, when)
        conflict.fence = True
        return conflict

    def _first(self, bad: NDArray, cells: NDArray, component: NDArray, time: NDArray) -> Conflict:
        e = int(np.argmax(bad))
        cell = int(cells[e])
        return Conflict(e, cell, int(component[e]), int(time[e]), int(self.write_pc[cell]), "written")

    def _reader(self, late: NDArray, seen: NDArray, cells: NDArray) -> Conflict:
        slot, e = (int(x) for x in np.unravel_index(int(np.argmax(late)), late.shape))
        cell = int(cells[e])
        component = int(self.slot_component[slot])
        return Conflict(e, cell, component, int(seen[slot, e]), int(self.read_pc[slot, cell]), "read")


class _Table:
    """The shadow of one buffer's 4-byte words."""

    __slots__ = ("read_pc", "read_time", "reader", "reduced", "write_pc", "write_time", "writer")

    def __init__(self, words: int):
        self.writer = np.zeros(words, np.int64)
        self.write_time = np.zeros(words, np.int32)
        self.write_pc = np.full(words, -1, np.int32)
        self.reduced = np.zeros(words, np.bool_)
        self.reader = np.zeros(words, np.int64)
        self.read_time = np.zeros(words, np.int32)
        self.read_pc = np.zeros(words, np.int32)


class GlobalShadow:
    """Who wrote and read the words of global memory last.

    Within a cluster its clocks decide. Between clusters nothing but atomics and flags can order, which is not followed:
    accesses of two clusters conflict only in kernels that have no means of synchronising them (`synchronises`).
    Reads are recorded of buffers that the kernel has written to, one reader a word; reductions do not conflict with
    each other; accesses narrower than 4 bytes are not held against each other.
    """

    LIMIT = 1 << 26  # bytes of a buffer beyond which it is not shadowed

    def __init__(self, synchronises: bool):
        self.synchronises = synchronises
        self.tables: dict[int, _Table] = {}

    def table(self, buffer: int, nbytes: int) -> _Table | None:
        found = self.tables.get(buffer)
        if found is None and nbytes <= self.LIMIT:
            found = self.tables[buffer] = _Table(-(-nbytes // 4) + 1)
        return found

    def touch(
        self,
        table: _Table,
        cells: NDArray[Any],
        cluster: int,
        component: Any,
        time: Any,
        known: Any,
        changed: Any,
        pc: int,
        write: bool,
        reduce: bool = False,
    ) -> tuple[Conflict, int] | None:
        """Record an access; the conflict with what was there before, and the cluster that did it.

        component and time: scalars or one a cell; known(components) gives the time known of each,
        changed() which cells a write gives another value.
        """
        base = cluster * CAPACITY
        conflict = None
        writer, when = table.writer[cells], table.write_time[cells]
        if when.any():
            bad = self._unordered(writer, when, cluster, known)
            if reduce:
                bad &= ~table.reduced[cells]
            if write and bad.any():
                bad &= changed()
            if bad.any():
                conflict = self._conflict(bad, cells, writer, when, table.write_pc, "written")
        if write:
            reader, seen = table.reader[cells], table.read_time[cells]
            if conflict is None and seen.any():
                bad = self._unordered(reader, seen, cluster, known)
                if bad.any():
                    conflict = self._conflict(bad, cells, reader, seen, table.read_pc, "read")
            table.writer[cells] = base + component
            table.write_time[cells] = time
            table.write_pc[cells] = pc
            table.reduced[cells] = reduce
        else:
            table.reader[cells] = base + component
            table.read_time[cells] = time
            table.read_pc[cells] = pc
        return conflict

    def _unordered(
        self, agent: NDArray[Any], when: NDArray[Any], cluster: int, known: Any
    ) -> NDArray[np.bool_]:
        mine = agent // CAPACITY == cluster
        late = when > known(agent % CAPACITY)
        return np.where(mine, late, (when > 0) & (not self.synchronises))

    @staticmethod
    def _conflict(
        bad: NDArray[Any],
        cells: NDArray[Any],
        agent: NDArray[Any],
        when: NDArray[Any],
        pcs: NDArray[Any],
        what: str,
    ) -> tuple[Conflict, int]:
        e = int(np.argmax(bad))
        cell = int(cells[e])
        owner, component = divmod(int(agent[e]), CAPACITY)
        return Conflict(e, cell, component, int(when[e]), int(pcs[cell]), what), owner
