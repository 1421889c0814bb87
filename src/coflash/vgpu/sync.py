"""Barriers of all kinds, fences, and what a deadlock looks like in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clocks import Clock
from .codegen import SHARED_WINDOW
from .control import gather
from .decode import Program, handles
from .machine import FULL, STOP, Convoy, Cta, Fault, Fragment, Machine, Step, Warp
from .memory import OutOfBounds
from .ptx import Instruction, Mem, PtxError

MAX_TX = (1 << 20) - 1


# ---- Helpers ------------------------------------------------------------------------------------------------------


def rows_of(c: Convoy, where: NDArray | None) -> list[int]:
    """The cluster rows of the warps that take part."""
    if where is None or where is c.mask:
        return c.shape.warp_rows
    return [int(r) for r in np.unique(c.shape.slice_rows[where])]


def shared_place(cta: Cta, address: int, local_only: bool, c: Any) -> tuple[Cta, int]:
    """(CTA, offset) of a 32-bit shared address."""
    rank, offset = address >> 24, address & 0xFFFFFF
    ctas = cta.cluster.ctas
    if rank >= len(ctas):
        raise Fault(
            "bounds", f"shared address {address:#x} names CTA rank {rank} in a cluster of {len(ctas)}."
        )
    if local_only and rank != cta.rank:
        raise Fault("bounds", f"a shared::cta instruction got the address {address:#x} of CTA rank {rank}.")
    return ctas[rank], offset


def start(cta: Cta) -> None:
    """Hand out the registers a CTA starts with."""
    program = cta.machine.program
    limit = program.kernel.directives.get("maxnreg")
    threads = cta.warp_count * 32
    each = limit[0] if limit else min(65536 // threads // 8 * 8, 255)
    minimum = program.kernel.directives.get("minnctapersm")
    if not limit and minimum and minimum[0] > 1:
        each = min(each, 65536 // threads // minimum[0] // 8 * 8)
    for warp in cta.warps:
        warp.registers = each
    cta.registers_left = 0


def remote_access(c: Convoy, target: Cta, rows: list[int], what: str) -> None:
    """A warp touches another CTA's shared memory: that CTA must live, and may end only after this is over."""
    machine = c.machine
    if target.live == 0:
        machine.finding("exit", f"{what} shared memory of {target}, which has ended.", c)
        return
    if machine.races:
        clocks = target.cluster.clocks
        table = target.extra.setdefault("remote", {})
        for row in rows:
            table[row] = (int(clocks.vc[0, row, row + 1]), c.pc, what)


# ---- Named barriers -----------------------------------------------------------------------------------------------


class NamedBarrier:
    __slots__ = ("arrived", "clock", "count", "generation", "lines", "number", "red", "waiters", "warps")

    def __init__(self, number: int):
        self.number = number
        self.generation = 0
        self.reset()

    def reset(self) -> None:
        self.arrived = 0
        self.count = 0
        self.waiters: list[Convoy] = []
        self.clock: Clock | None = None
        self.warps: set[int] = set()
        self.red: list[tuple[Convoy, Any]] = []
        self.lines: set[int] = set()


@handles("bar", "barrier")
def named_barrier(program: Program, i: Instruction) -> Step:
    parts = [p for p in i.parts if p not in ("cta",)]
    what = parts[1]
    if what not in ("sync", "arrive", "red"):
        raise PtxError(f"unknown barrier instruction: {i.text}", i.line)
    operands = list(i.operands)
    reduction = None
    if what == "red":
        operation = parts[2]
        destination = program.destination(operands[0], i)
        predicate = program.reader(operands[-1], "P", i)
        reduction = operation, destination, predicate
        operands = operands[1:-1]
    number_of = program.reader(operands[0], "W", i)
    count_of = program.reader(operands[1], "W", i) if len(operands) > 1 else None
    if what == "arrive" and count_of is None:
        raise PtxError(f"an arrival needs a thread count: {i.text}", i.line)
    aligned = i.parts[0] == "bar" or "aligned" in i.parts
    guard = program.guard(i)
    wait = what != "arrive"

    def step(c: Convoy) -> int | None:
        where = c.active(guard)
        if where is False:
            return None
        cta, machine = c.cta, c.machine
        if aligned and not c.shape.full and any(f.mask != f.warp.alive for f in c.fragments):
            return gather(c, FULL)
        number = _uniform(number_of(c), c)
        if isinstance(number, Convoy):
            return STOP
        if not 0 <= number <= 15:
            raise Fault("barriers", f"named barrier {number} does not exist: there are 16.")
        count = cta.warp_count * 32 if count_of is None else _uniform(count_of(c), c)
        if isinstance(count, Convoy):
            return STOP
        if count % 32 or not 0 < count <= 1024:
            raise Fault(
                "barriers", f"named barrier {number} is told to expect {count} threads, not a multiple of 32."
            )
        barrier = cta.named.get(number)
        if barrier is None:
            barrier = cta.named[number] = NamedBarrier(number)
        if barrier.arrived and barrier.count != count:
            machine.finding(
                "barriers",
                f"named barrier {number} is told to expect {count} threads here, but {barrier.count} by who arrived "
                f"before in the same round.",
                c,
            )
        barrier.count = count
        barrier.arrived += len(c.fragments) * 32 if aligned else c.shape.threads
        barrier.warps |= {w.index for w in c.shape.warps}
        for w in c.shape.warps:
            machine.counters.add(w, "barriers", 1)
        if machine.track:
            if barrier.clock is None:
                barrier.clock = cta.cluster.clocks.fresh()
            cta.cluster.clocks.release(c.shape.warp_rows, barrier.clock)
        if reduction is not None:
            p = np.broadcast_to(reduction[2](c), c.shape.hi - c.shape.lo)
            barrier.red.append((c, p if c.mask is None else p[c.mask]))
        machine.event(c, "barrier", f"{what} {number} ({barrier.arrived}/{count})")
        if wait:
            barrier.waiters.append(c)
        if barrier.arrived > count:
            machine.finding(
                "barriers",
                f"{barrier.arrived} threads arrive at named barrier {number}, which expects {count}.",
                c,
            )
        if barrier.arrived >= count:
            _complete_named(machine, cta, barrier, reduction)
        return STOP if wait else None

    return step


def _uniform(value: Any, c: Convoy) -> int | Convoy:
    """A value that must be the same for all threads of the convoy. Where it is not, the convoy is split by warp and
    the convoy returned instead."""
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return int(value)
    row = value if c.mask is None else value[c.mask]
    first = row[0]
    if (row == first).all():
        return int(first)
    if len(c.fragments) == 1:
        raise Fault("barriers", "threads of one warp name different barriers or counts.")
    c.machine.regroup(c, lambda f: int(value[_first_lane(f) - c.shape.lo]))
    return c


def _first_lane(f: Fragment) -> int:
    return f.warp.index * 32 + (f.mask & -f.mask).bit_length() - 1


def _complete_named(machine: Machine, cta: Cta, barrier: NamedBarrier, reduction: Any) -> None:
    waiters, clock, red = barrier.waiters, barrier.clock, barrier.red
    barrier.reset()
    barrier.generation += 1
    if machine.track and clock is not None:
        for w in waiters:
            cta.cluster.clocks.acquire(w.shape.warp_rows, clock)
    if red and reduction is not None:
        values = np.concatenate([p for _, p in red])
        operation, destination, _ = reduction
        reductions: dict[str, Any] = {"popc": np.count_nonzero, "and": np.all, "or": np.any}
        result = reductions[operation](values)
        for c, _ in red:
            if destination is not None:
                row = c.rows.of(destination[0])[destination[1]]
                np.copyto(row, np.array(result).astype(row.dtype), where=True if c.mask is None else c.mask)
    machine.wake(waiters, 1)


# ---- Cluster barrier ----------------------------------------------------------------------------------------------


class ClusterBarrier:
    __slots__ = ("arrived", "clock", "done", "generation", "waiters")

    def __init__(self, clock: Clock | None):
        self.arrived: dict[int, int] = {}  # row -> threads
        self.generation = 0
        self.waiters: list[Convoy] = []
        self.clock = clock
        self.done = clock.copy() if clock is not None else None


def cluster_barrier_of(cta: Cta) -> ClusterBarrier:
    cluster = cta.cluster
    if cluster.barrier is None:
        cluster.barrier = ClusterBarrier(cluster.clocks.fresh() if cta.machine.track else None)
    return cluster.barrier


@handles("barrier.cluster")
def cluster_barrier(program: Program, i: Instruction) -> Step:
    arrive = "arrive" in i.parts
    if not arrive and "wait" not in i.parts:
        raise PtxError(f"unknown barrier instruction: {i.text}", i.line)
    aligned = "aligned" in i.parts
    relaxed = "relaxed" in i.parts

    def step(c: Convoy) -> int | None:
        machine, cta = c.machine, c.cta
        if aligned and not c.shape.full and any(f.mask != f.warp.alive for f in c.fragments):
            return gather(c, FULL)
        barrier = cluster_barrier_of(cta)
        for w in c.shape.warps:
            machine.counters.add(w, "barriers", 1)
        if arrive:
            for f in c.fragments:
                row = f.warp.row
                if f.warp.extra.get("cluster_arrived") is not None and not f.warp.extra.get(
                    "cluster_partial"
                ):
                    machine.finding(
                        "barriers", "a second arrival at the cluster barrier without a wait between.", c
                    )
                barrier.arrived[row] = barrier.arrived.get(row, 0) + f.mask.bit_count()
                f.warp.extra["cluster_arrived"] = barrier.generation
                f.warp.extra["cluster_partial"] = f.mask != f.warp.alive
            if machine.track:
                release(c.shape.warps, barrier.clock, relaxed)
            machine.event(c, "cluster barrier", "arrive")
            check_cluster_barrier(cta)
            return None
        stay: list[Fragment] = []
        go: list[Fragment] = []
        for f in c.fragments:
            generation = f.warp.extra.get("cluster_arrived")
            if generation is None:
                raise Fault("barriers", f"{f.warp} waits at the cluster barrier without having arrived.")
            (go if barrier.generation > generation else stay).append(f)
        if not stay:
            for f in go:
                f.warp.extra["cluster_arrived"] = None
            if barrier.done is not None:
                cta.cluster.clocks.acquire(c.shape.warp_rows, barrier.done)
            return None
        barrier.waiters.append(Convoy(cta, c.pc, stay))
        if go:
            machine.resume(Convoy(cta, c.pc, go))
        return STOP

    return step


def check_cluster_barrier(cta: Cta) -> None:
    """The round is complete when every thread that still lives has arrived."""
    cluster = cta.cluster
    barrier = cluster.barrier
    if barrier is None or not barrier.arrived:
        return
    for other in cluster.ctas:
        for w in other.warps:
            if w.alive and barrier.arrived.get(w.row, 0) < w.alive.bit_count():
                return
    barrier.generation += 1
    barrier.arrived = {}
    if barrier.clock is not None:
        barrier.done = barrier.clock.copy()
        barrier.clock[...] = 0
    waiters, barrier.waiters = barrier.waiters, []
    cta.machine.wake(waiters)


# ---- mbarriers ----------------------------------------------------------------------------------------------------


class MBarrier:
    __slots__ = (
        "clock", "component", "count", "cta", "done", "init_pc", "init_row", "init_time", "offset", "pending", "phase",
        "tx", "waiters", "arrivers", "fenced", "history",
    )  # fmt: skip

    def __init__(self, cta: Cta, offset: int, count: int):
        self.cta, self.offset, self.count = cta, offset, count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: list[Convoy] = []
        self.arrivers: dict[int, int] = {}  # row -> step, in this phase (-1: the tensor cores)
        self.history: dict[int, str] = {}  # step -> who has ever arrived from there
        self.init_pc = self.init_row = self.init_time = 0
        self.fenced = False  # its initialisation has been made visible to the async proxy
        self.clock: Clock | None = None
        self.done: list[Clock] = []
        self.component = 0
        if cta.machine.track:
            clocks = cta.cluster.clocks
            self.clock = clocks.fresh()
            self.done = [clocks.fresh(), clocks.fresh()]
            self.component = clocks.component(
                ("mbarrier", cta.rank, offset),
                f"copies that complete on the mbarrier at shared+{offset:#x}"
                + (f" of CTA rank {cta.rank}" if len(cta.cluster.ctas) > 1 else ""),
            )

    def __str__(self) -> str:
        return f"mbarrier at shared+{self.offset:#x} of {self.cta}"

    @property
    def state(self) -> str:
        text = f"phase {self.phase}, {self.pending} of {self.count} arrivals missing"
        if self.tx:
            text += (
                f", {self.tx} bytes still expected"
                if self.tx > 0
                else f", {-self.tx} bytes more than expected"
            )
        return text

    def expect(self, bytes_: int, at: Any) -> None:
        self.tx += bytes_
        if abs(self.tx) > MAX_TX:
            self.cta.machine.finding(
                "barriers",
                f"the transaction count of the {self} overflows: {self.tx} bytes (at most {MAX_TX}).",
                at,
            )

    def arrive(self, count: int, at: Any) -> None:
        if count > self.pending:
            self.cta.machine.finding(
                "barriers",
                f"{count} arrivals at the {self}, but its phase {self.phase} waits for {self.pending} more only: "
                "an arrival too many, or a count too small at its initialisation.",
                at,
            )
            count = self.pending
        self.pending -= count
        self.check()

    def complete(self, bytes_: int, at: Any) -> None:
        """A copy has arrived."""
        self.tx -= bytes_
        if self.clock is not None:
            time = self.phase + 1
            np.maximum(self.clock[:, self.component], time, out=self.clock[:, self.component])
        self.cta.machine.idle_polls = 0
        self.check()

    def check(self) -> None:
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.count
        self.arrivers = {}
        if self.clock is not None:
            self.done[(self.phase - 1) & 1] = self.clock
            self.clock = self.cta.cluster.clocks.fresh()
        machine = self.cta.machine
        waiters, self.waiters = self.waiters, []
        if waiters:
            gone = set(map(id, waiters))
            machine.waiting = [c for c in machine.waiting if id(c) not in gone]
            machine.wake(waiters)


def mbarrier_at(c: Convoy, address: int, local_only: bool, pc: int | None = None) -> MBarrier:
    cta, offset = shared_place(c.cta, address, local_only, c)
    return cta_mbarrier(cta, offset, c)


def cta_mbarrier(cta: Cta, offset: int, at: Any) -> MBarrier:
    found = cta.mbarriers.get(offset)
    if found is None:
        near = min(cta.mbarriers, key=lambda o: abs(o - offset), default=None)
        hint = f" (the nearest one is at shared+{near:#x})" if near is not None else ""
        raise Fault("barriers", f"there is no initialised mbarrier at shared+{offset:#x} of {cta}{hint}.")
    return found


def async_mbarrier(cta: Cta, offset: int, at: Any) -> MBarrier:
    """The mbarrier that an asynchronous operation signals: its initialisation must have passed a fence."""
    barrier = cta_mbarrier(cta, offset, at)
    if cta.live == 0 and at.cta is not cta:
        cta.machine.finding(
            "exit", f"an asynchronous operation signals the {barrier}, whose CTA has ended.", at
        )
    if not barrier.fenced and cta.machine.races:
        cta.machine.finding(
            "races",
            f"signals the {barrier} through the async proxy, but no fence.mbarrier_init (or fence.proxy.async) follows "
            f"its initialisation at {cta.machine.program.words(barrier.init_pc)}.",
            at,
            pc=barrier.init_pc,
            key="init fence",
        )
    return barrier


def check_initialised(c: Convoy, barrier: MBarrier, rows: list[int]) -> None:
    """A warp that uses an mbarrier must know of its initialisation."""
    machine = c.machine
    if not machine.races:
        return
    vc = barrier.cta.cluster.clocks.vc
    for row in rows:
        if vc[0, row, barrier.init_row + 1] < barrier.init_time:
            machine.finding(
                "races",
                f"uses the {barrier}, but nothing orders that after its initialisation at "
                f"{machine.program.words(barrier.init_pc)}: a CTA or cluster barrier is missing between.",
                c,
                key=barrier.offset,
            )
            return


def _spaces(i: Instruction) -> tuple[bool, bool]:
    """(the address is a 32-bit shared one, it may name another CTA)"""
    shared = any(p.startswith("shared") for p in i.parts)
    return shared, "shared::cluster" in i.parts or not shared


def address_reader(program: Program, memory: Any, i: Instruction) -> Any:
    """A function of a convoy and a mask: the active threads' 32-bit shared addresses (uint32)."""
    shared, _ = _spaces(i)
    read = program.address(memory, i, shared)

    def addresses(c: Convoy, where: NDArray | None) -> NDArray[np.uint32]:
        value = read(c)
        if not isinstance(value, np.ndarray) or value.ndim == 0:
            number = int(value)
            n = c.shape.hi - c.shape.lo if where is None else int(np.count_nonzero(where))
            if number >= SHARED_WINDOW:
                number -= SHARED_WINDOW
            return np.full(n, number, np.uint32)
        if where is not None:
            value = value[where]
        if value.dtype == np.uint64:
            if not shared and int(value[0]) < SHARED_WINDOW:
                raise Fault(
                    "bounds",
                    f"{i.op} needs a shared address, and got the generic address {int(value[0]):#x}.",
                )
            value = value.astype(np.uint32)
        return value

    return addresses


def groups(addresses: NDArray) -> list[tuple[int, NDArray | None]]:
    """(address, which threads) for each distinct address; None for all."""
    first = addresses[0]
    if addresses.size == 1 or (addresses == first).all():
        return [(int(first), None)]
    return [(int(a), addresses == a) for a in np.unique(addresses)]


@handles("mbarrier.init")
def mbarrier_init(program: Program, i: Instruction) -> Step:
    read = address_reader(program, i.operands[0], i)
    count_of = program.reader(i.operands[1], "W", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        machine = c.machine
        counts = np.broadcast_to(count_of(c), c.shape.hi - c.shape.lo)
        counts = counts if where is None else counts[where]
        for address, which in groups(read(c, where)):
            cta, offset = shared_place(c.cta, address, True, c)
            count = int(counts[0] if which is None else counts[which][0])
            if offset % 8:
                machine.finding("alignment", f"the mbarrier at shared+{offset:#x} is not 8-byte aligned.", c)
            if not 1 <= count <= MAX_TX:
                raise Fault("barriers", f"an mbarrier cannot expect {count} arrivals.")
            cta.shared.check(np.array([offset]), 8)
            old = cta.mbarriers.get(offset)
            if old is not None:
                machine.finding(
                    "barriers",
                    f"initialises the {old} again ({old.state}); its first initialisation was at "
                    f"{machine.program.words(old.init_pc)}, and no mbarrier.inval lies between.",
                    c,
                    key=offset,
                )
                machine.wake(old.waiters)
            barrier = cta.mbarriers[offset] = MBarrier(cta, offset, count)
            barrier.init_pc = c.pc
            row = rows_of(c, where)[0]
            barrier.init_row = row
            if machine.track:
                clocks = cta.cluster.clocks
                barrier.init_time = int(clocks.vc[0, row, row + 1])
                if cta.shadow is not None:
                    cells = np.array([offset // 4, offset // 4 + 1])
                    report_conflict(
                        c, cta.shadow.warp_write(cells, np.array([row, row]), c.pc), "shared", cta, 4
                    )

    return step


@handles("mbarrier.inval")
def mbarrier_inval(program: Program, i: Instruction) -> Step:
    read = address_reader(program, i.operands[0], i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        for address, _ in groups(read(c, where)):
            barrier = mbarrier_at(c, address, True)
            if barrier.waiters:
                c.machine.finding("barriers", f"invalidates the {barrier} while somebody waits at it.", c)
            del barrier.cta.mbarriers[barrier.offset]

    return step


@handles("mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_arrive(program: Program, i: Instruction) -> Step:
    parts = i.parts
    drop = parts[1] == "arrive_drop"
    arrive = parts[1] in ("arrive", "arrive_drop")
    expect = "expect_tx" in parts
    complete = parts[1] == "complete_tx"
    operands = list(i.operands)
    state = None
    if arrive and not isinstance(operands[0], Mem):
        state = program.destination(operands[0], i)
        operands = operands[1:]
    read = address_reader(program, operands[0], i)
    _, remote = _spaces(i)
    amount_of = program.reader(operands[1], "W", i) if len(operands) > 1 else None
    guard = program.guard(i)
    relaxed = "relaxed" in parts

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        machine = c.machine
        amounts = None
        if amount_of is not None:
            amounts = np.broadcast_to(amount_of(c), c.shape.hi - c.shape.lo)
            amounts = amounts if where is None else amounts[where]
        rows = rows_of(c, where)
        addresses = read(c, where)
        if arrive:
            for w in c.shape.warps:
                machine.counters.add(w, "barriers", 1)
        for address, which in groups(addresses):
            barrier = mbarrier_at(c, address, not remote)
            threads = addresses.size if which is None else int(np.count_nonzero(which))
            mine = rows
            if which is not None and len(rows) > 1:
                lanes = c.shape.slice_rows if where is None else c.shape.slice_rows[where]
                mine = [int(r) for r in np.unique(lanes[which])]
            if barrier.cta is not c.cta:
                remote_access(c, barrier.cta, mine, "arrives at an mbarrier in")
            if machine.track:
                check_initialised(c, barrier, mine)
                if arrive and barrier.clock is not None:
                    if relaxed:
                        release([warp_of(c.cta, r) for r in mine], barrier.clock, True)
                    else:
                        barrier.cta.cluster.clocks.release(mine, barrier.clock)
            total = threads
            if amounts is not None:
                total = int((amounts if which is None else amounts[which]).sum())
            if expect:
                barrier.expect(total, c)
                total = threads
            if complete:
                barrier.complete(total, c)
            elif arrive:
                if machine.log_events:
                    machine.event(c, "arrive", f"{barrier}: {total}, {barrier.state}")
                for r in mine:
                    barrier.arrivers[r] = c.pc
                if c.pc not in barrier.history:
                    barrier.history[c.pc] = machine.describe_warps(c.shape.warps)
                if state is not None:
                    row = c.rows.of(64)[state[1]]
                    chosen = np.zeros(row.shape, np.bool_)
                    chosen[:] = True if where is None else where
                    np.copyto(row, np.uint64(barrier.phase), where=chosen)
                if drop:
                    barrier.count -= threads
                barrier.arrive(total, c)
            elif expect:
                barrier.check()
        machine.idle_polls = 0

    return step


@handles("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(program: Program, i: Instruction) -> Step:
    parts = i.parts
    parity = "parity" in parts
    blocking = parts[1] == "try_wait"
    destination = program.destination(i.operands[0], i)
    if destination is None or destination[0] != 1:
        raise PtxError(f"the result of {i.op} is a predicate: {i.text}", i.line)
    read = address_reader(program, i.operands[1], i)
    _, remote = _spaces(i)
    phase_of = program.reader(i.operands[2], "W" if parity else "D", i)
    guard = program.guard(i)
    relaxed = "relaxed" in parts
    index = destination[1]

    def step(c: Convoy) -> int | None:
        where = c.active(guard)
        if where is False:
            return None
        machine = c.machine
        addresses = read(c, where)
        phases = np.broadcast_to(phase_of(c), c.shape.hi - c.shape.lo)
        phases = phases if where is None else phases[where]
        first, phase = int(addresses[0]), int(phases[0])
        if addresses.size > 1 and not ((addresses == first).all() and (phases == phase).all()):
            if len(c.fragments) > 1:  # treat the warps one by one: they wait for different things
                lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo

                def key(f: Fragment) -> tuple[int, int]:
                    at = min(int(np.searchsorted(lanes, f.warp.index * 32)), len(lanes) - 1)
                    return int(addresses[at]), int(phases[at])

                distinct = {key(f) for f in c.fragments}
                return machine.regroup(c, key if len(distinct) > 1 else lambda f: f.warp.index)
            return each_lane(c, where, addresses, phases)
        barrier = mbarrier_at(c, first, not remote)
        if machine.track:
            check_initialised(c, barrier, rows_of(c, where))
        done = done_with(barrier, phase)
        row = c.rows.P[index]
        if done:
            c.expired, c.note = 0, None
            _observe(c, barrier, phase, where)
            _set(row, True, where)
            return None
        if c.note is not None and c.note.barrier is not barrier:
            c.expired = 0
        elif c.note is not None and barrier.phase >= c.since + 2:
            machine.finding(
                "barriers",
                f"waits at the {barrier} since its phase {c.since} and has missed its end: the barrier is in phase "
                f"{barrier.phase} by now. Whoever arrives there must wait for this warp before the next phase.",
                c,
            )
        if blocking and c.expired != 1:
            if not c.expired and machine.schedule == "random" and machine.random.random() < 0.1:
                _set(row, False, where)
                return machine.poll(c, c.pc + 1)
            c.note = _Waiting(barrier)
            c.since = barrier.phase
            barrier.waiters.append(c)
            machine.waiting.append(c)
            return STOP
        _set(row, False, where)
        if not blocking:
            return machine.poll(c, c.pc + 1)
        # The time-out ran out while nothing else could go on: the answer is "not yet", once.
        c.expired = 2
        return None

    def done_with(barrier: MBarrier, phase: int) -> bool:
        if parity:
            return (barrier.phase & 1) != (phase & 1)
        return barrier.phase > phase

    def _observe(c: Convoy, barrier: MBarrier, phase: int, where: NDArray | None) -> None:
        machine = c.machine
        if machine.log_events:
            machine.event(c, "wait", f"{barrier}: over, {barrier.state}")
        for w in c.shape.warps:
            machine.counters.add(w, "barriers", 1)
        if machine.track and barrier.done and barrier.phase:
            seen = barrier.done[((barrier.phase - 1) if parity else min(phase, barrier.phase - 1)) & 1]
            if not relaxed:
                c.cta.cluster.clocks.acquire(rows_of(c, where), seen)
                return
            for row in rows_of(c, where):
                extra = warp_of(c.cta, row).extra
                extra["to acquire"] = (
                    np.maximum(extra["to acquire"], seen) if "to acquire" in extra else seen.copy()
                )

    def each_lane(c: Convoy, where: NDArray | None, addresses: NDArray, phases: NDArray) -> int | None:
        result = np.zeros(addresses.size, np.bool_)
        for n in range(addresses.size):
            barrier = mbarrier_at(c, int(addresses[n]), not remote)
            result[n] = done_with(barrier, int(phases[n]))
            if result[n]:
                _observe(c, barrier, int(phases[n]), where)
        row = c.rows.P[index]
        if where is None:
            row[:] = result
        else:
            row[where] = result
        return None if result.all() else c.machine.poll(c, c.pc + 1)

    return step


class _Waiting:
    """What a sleeping convoy waits for."""

    __slots__ = ("barrier",)

    def __init__(self, barrier: MBarrier):
        self.barrier = barrier

    def remove(self, c: Convoy) -> None:
        self.barrier.waiters.remove(c)


def _set(row: NDArray, value: bool, where: NDArray | None) -> None:
    if where is None:
        row[:] = value
    else:
        np.copyto(row, value, where=where)


@handles("mbarrier.pending_count")
def pending_count(program: Program, i: Instruction) -> Step:
    raise PtxError("mbarrier.pending_count is not supported: the machine's states are phase numbers", i.line)


# ---- Fences -------------------------------------------------------------------------------------------------------


@handles("fence", "membar")
def fence(program: Program, i: Instruction) -> Step:
    parts = i.parts
    proxy = parts[1] == "proxy"
    asynchronous = proxy and parts[2].startswith("async")
    initialisation = parts[1] == "mbarrier_init"
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        if not c.machine.track or (proxy and not asynchronous):
            return
        where = c.active(guard)
        if where is False:
            return
        rows = rows_of(c, where)
        clocks = c.cta.cluster.clocks
        if asynchronous or initialisation:
            for barrier in c.cta.mbarriers.values():
                if barrier.init_row in rows:
                    barrier.fenced = True
        if asynchronous:
            clocks.proxy_fence(rows)
            return
        for row in rows:
            warp = warp_of(c.cta, row)
            seen = warp.extra.pop("to acquire", None)
            if seen is not None:
                clocks.acquire([row], seen)
            warp.extra["fenced"] = clocks.snapshot(row)
            clocks.vc[0, row, row + 1] += 1

    return step


def warp_of(cta: Cta, row: int) -> Warp:
    """The warp of a cluster row."""
    return cta.cluster.ctas[row // cta.warp_count].warps[row % cta.warp_count]


def release(warps: list[Warp], into: Any, relaxed: bool) -> None:
    """Hand over what these warps know; a relaxed operation hands over what a fence before it made visible."""
    clocks = warps[0].cta.cluster.clocks
    if not relaxed:
        clocks.release([w.row for w in warps], into)
        return
    for w in warps:
        np.maximum(into, clocks.tensor_fenced[:, w.row], out=into)
        fenced = w.extra.get("fenced")
        if fenced is not None:
            np.maximum(into, fenced, out=into)


# ---- The end ------------------------------------------------------------------------------------------------------


def warp_ended(warp: Warp) -> None:
    cta = warp.cta
    if cta.machine.races and "remote" in cta.extra:
        known = cta.cluster.clocks.vc[0, warp.row]
        seen = cta.extra.get("exit clock")
        cta.extra["exit clock"] = known.copy() if seen is None else np.maximum(seen, known)
    if warp.cta.cluster.barrier is not None:
        check_cluster_barrier(warp.cta)


def cta_ended(cta: Cta) -> None:
    machine = cta.machine
    seen = cta.extra.get("exit clock")
    for row, (time, pc, what) in cta.extra.get("remote", {}).items():
        if seen is not None and seen[row + 1] < time:
            machine.finding(
                "exit",
                f"{cta} may end before {warp_of(cta, row)} of {warp_of(cta, row).cta} {what} {cta}: no barrier orders "
                "its end after that.",
                warp_of(cta, row),
                pc=pc,
            )
    for barrier in cta.mbarriers.values():
        # Bytes still expected may be a producer's last, unused turn; bytes that nobody expected are always wrong.
        if barrier.tx < 0:
            machine.finding(
                "barriers",
                f"the CTA ends with the {barrier} in the middle of a phase ({barrier.state}): the bytes expected and "
                "the bytes copied do not agree.",
                cta,
                pc=barrier.init_pc,
                key=("end", barrier.offset),
            )


def explain_deadlock(machine: Machine) -> None:
    """One finding that says who waits where, for what, and who could have ended it."""
    lines: list[str] = []
    program = machine.program
    place: Any = None
    for cluster in machine.live_clusters:
        for cta in cluster.ctas:
            for barrier in cta.named.values():
                for c in barrier.waiters:
                    place = place or c
                    missing = [w for w in cta.warps if w.alive and w.index not in barrier.warps]
                    lines.append(
                        f"{program.describe_warps(c.shape.warps)} of {cta} at {program.words(c.pc)} waits at named "
                        f"barrier {barrier.number}: {barrier.arrived} of {barrier.count} threads are there; not there: "
                        + (program.describe_warps(missing) if missing else "nobody that still runs")
                    )
            for c in cta.register_waiters:
                place = place or c
                lines.append(
                    f"{program.describe_warps(c.shape.warps)} of {cta} at {program.words(c.pc)} waits for registers: "
                    f"{cta.registers_left // 32} a thread of one warp are free"
                )
            for (pc, warp), fragments in cta.rendezvous.items():
                threads = sum(f.mask.bit_count() for f in fragments)
                lines.append(
                    f"{threads} threads of warp {warp} of {cta} at {program.words(pc)} wait for the other threads of "
                    "their warp"
                )
            for kind in ("tensor_alloc_waiters", "warpgroup_waiters"):
                for c in cta.extra.get(kind, ()):
                    place = place or c
                    what = (
                        "tensor memory" if kind.startswith("tensor") else "the other warps of its warpgroup"
                    )
                    lines.append(
                        f"{program.describe_warps(c.shape.warps)} of {cta} at {program.words(c.pc)} waits for {what}"
                    )
        if cluster.barrier is not None:
            for c in cluster.barrier.waiters:
                place = place or c
                missing_rows = [
                    f"{w} of {o}" for o in cluster.ctas for w in o.warps
                    if w.alive and cluster.barrier.arrived.get(w.row, 0) < w.alive.bit_count()
                ]  # fmt: skip
                lines.append(
                    f"{program.describe_warps(c.shape.warps)} of {c.cta} at {program.words(c.pc)} waits at the cluster "
                    f"barrier for {', '.join(missing_rows[:8])}"
                )
    for c in [*machine.waiting, *[r for r in machine.ready if r.expired]]:
        barrier = c.note.barrier if c.note is not None else None
        if barrier is None:
            continue
        place = place or c
        here = [program.words(pc) for pc in sorted(set(barrier.arrivers.values()))[:3]]
        arrived = f" (in this phase arrived {'; '.join(here)})" if here else ""
        could = [f"{who} at {program.words(pc)}" for pc, who in list(barrier.history.items())[:3]]
        usual = (
            f"; in earlier phases {', '.join(could)} arrived" if could else "; nobody has ever arrived there"
        )
        lines.append(
            f"{program.describe_warps(c.shape.warps)} of {c.cta} at {program.words(c.pc)} waits at the {barrier}: "
            f"{barrier.state}{arrived}{usual}"
        )
    for c in machine.ready:
        if c.note is None:
            place = place or c
            lines.append(f"{program.describe_warps(c.shape.warps)} of {c.cta} polls at {program.words(c.pc)}")
    seen: list[str] = []
    for line in lines:
        if line not in seen:
            seen.append(line)
    message = "deadlock: nothing can go on. " + "; ".join(seen[:24])
    machine.finding("deadlock", message + ".", place, key="deadlock", fatal=True)


# ---- Global memory -------------------------------------------------------------------------------------------------


def track_global(
    at: Any, cluster: Any, addresses: NDArray[Any], nbytes: int, component: Any, time: Any, known: Any, pc: int,
    write: bool, reduce: bool = False, words: NDArray[Any] | None = None,
) -> None:  # fmt: skip
    """Hold accesses of `nbytes` each against the shadow of global memory.

    component and time: scalars, or one an address. words: what is written, one a 4-byte cell; a write that
    changes nothing does not conflict with the one before (blocks that compute the same padding, threads that all
    issue one copy).
    """
    machine: Machine = cluster.machine
    shadow = machine.global_shadow
    if shadow is None or not addresses.size:
        return
    memory = machine.memory
    low, high = int(addresses.min()), int(addresses.max()) + nbytes
    try:
        i = memory.find(low, high)
    except OutOfBounds:
        return  # several buffers at once, or none: the access itself says so
    buffer = memory.buffers[i]
    table = shadow.tables.get(i)
    if table is None:
        if not write:
            return
        table = shadow.table(i, buffer.nbytes)
        if table is None:
            return
    offsets = (addresses.astype(np.uint64) - np.uint64(buffer.address)).astype(np.int64)
    cells = offsets >> 2
    if nbytes > 4:
        cells = (cells[:, None] + np.arange(nbytes // 4)).reshape(-1)
        if isinstance(component, np.ndarray):
            component, time = np.repeat(component, nbytes // 4), np.repeat(time, nbytes // 4)
    if not write and not buffer.initialised:
        fresh = table.write_pc[cells] < 0
        if fresh.any():
            cell = int(cells[int(np.argmax(fresh))])
            machine.finding(
                "uninitialised",
                f"reads {buffer.name or 'a buffer'} at byte {4 * cell}, which nobody has written.",
                at,
                pc=pc,
            )
    if nbytes < 4:
        if write:
            table.write_pc[cells] = pc
        return
    if not machine.races:
        if write:
            table.write_pc[cells] = pc
        return
    rows = component - 1 if isinstance(component, np.ndarray) else None

    def knows(components: NDArray[Any]) -> Any:
        return known(components) if rows is None else cluster.clocks.vc[0, rows, components]

    def changed() -> Any:
        return True if words is None else memory.view(i, 4, 0)[cells] != words

    found = shadow.touch(table, cells, cluster.index, component, time, knows, changed, pc, write, reduce)
    if found is None:
        return
    conflict, owner = found
    if owner == cluster.index:
        who = cluster.clocks.names[conflict.component]
        row = conflict.component - 1
        if 0 <= row < cluster.clocks.warps:
            cta = cluster.ctas[row // cluster.ctas[0].warp_count]
            who = f"{machine.describe_warps([warp_of(cta, row)])} of {cta}"
    else:
        who = f"block {owner}" if len(cluster.ctas) == 1 else f"cluster {owner}"
    machine.finding(
        "races",
        f"{'writes' if write else 'reads'} {buffer.name or 'a buffer'} at byte {4 * conflict.location}, which {who} "
        f"{conflict.earlier} at {machine.program.words(conflict.pc)}, and nothing orders the two.",
        at,
        pc=pc,
        key="global",
    )


# ---- Conflicts in words -------------------------------------------------------------------------------------------


def report_conflict(
    at: Any, conflict: Any, space: str, cta: Cta, cell: int, what: str = "writes", pc: int | None = None,
    clock: Any = None,
) -> None:  # fmt: skip
    """Turn a conflict that the shadow found into a finding; `clock` is that of an asynchronous operation's issue."""
    if conflict is None:
        return
    machine: Machine = cta.machine
    clocks = cta.cluster.clocks
    program = machine.program
    earlier = clocks.names[conflict.component]
    row = conflict.component - 1
    if 0 <= row < clocks.warps:
        owner = cta.cluster.ctas[row // cta.warp_count]
        earlier = machine.describe_warps([owner.warps[row % cta.warp_count]])
        if len(cta.cluster.ctas) > 1:
            earlier += f" of {owner}"
    where = f"shared+{conflict.location * cell:#x}" if space == "shared" else str(conflict.location)
    if space == "tensor":
        where = f"tensor memory lanes {conflict.location // 512 * 16}.., column {conflict.location % 512}"
    if conflict.fence:
        machine.finding(
            "tensor_fence",
            f"{what} {where} of {cta}, which {earlier} {conflict.earlier} at {program.words(conflict.pc)}. A barrier "
            "orders the two, but not for tcgen05: a tcgen05.fence::before_thread_sync before the barrier or a "
            "tcgen05.fence::after_thread_sync behind it is missing.",
            at,
            pc=pc,
        )
        return
    asynchronous_earlier = bool(clocks.asynchronous[conflict.component])
    now_async = not isinstance(at, Convoy)
    hint = _missing_order(asynchronous_earlier, now_async, conflict, earlier, at, clock)
    machine.finding(
        "races",
        f"{what} {where} of {cta}, which {earlier} {conflict.earlier} at {program.words(conflict.pc)}, and nothing "
        f"orders the two: {hint}.",
        at,
        pc=pc,
    )


def _missing_order(
    async_earlier: bool, async_now: bool, conflict: Any, earlier: str, at: Any, clock: Any
) -> str:
    if conflict.earlier == "written" and not async_earlier and async_now:
        if clock is not None and clock[0, conflict.component] >= conflict.time:
            return (
                "a fence.proxy.async is missing between the write through the generic proxy and the barrier"
            )
        wait = "a wgmma.wait_group" if at.kind == "wgmma" else "a cp.async.bulk.wait_group"
        wait = (
            "a wait for its mbarrier" if at.kind.startswith(("tensor load", "tcgen05", "bulk copy")) else wait
        )
        return (
            "the writer needs a fence.proxy.async and a barrier before the asynchronous operation is issued; or, "
            f"if it wrote after that, {wait} is missing before the write"
        )
    if async_earlier:
        if "wgmma" in earlier:
            return "a wgmma.wait_group is missing"
        if "tcgen05.st" in earlier:
            return "a tcgen05.wait::st and a barrier are missing"
        if "tcgen05.ld" in earlier:
            return "a tcgen05.wait::ld and a barrier are missing"
        if "tensor core" in earlier:
            return "a wait for the mbarrier that a tcgen05.commit arrives at is missing"
        if "bulk" in earlier:
            return "a cp.async.bulk.wait_group is missing, or a barrier after it"
        if "cp.async" in earlier:
            return "a cp.async.wait_group is missing, or a barrier after it"
        return "a wait for that mbarrier is missing"
    return "a barrier is missing between them"
