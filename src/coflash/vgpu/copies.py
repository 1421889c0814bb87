"""Asynchronous copies: cp.async, bulk copies and reductions, tensor copies, st.async, cluster launch control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import _addresses, _vector
from .access import _combine as _combine_lazily
from .clocks import ASYNC, GENERIC, Clock
from .codegen import RAW, SHARED_WINDOW
from .decode import Program, handles
from .machine import Convoy, Cta, Fault, Operation, Step, Warp
from .memory import UINT
from .ptx import Imm, Instruction, Mem, PtxError, Reg, Vec
from .sync import async_mbarrier, cta_mbarrier, report_conflict, shared_place, track_global
from .tensormap import TensorMap, decode
from .units import tma

CHUNK = {16: np.dtype(np.complex128), **UINT}


# ---- Moving bytes -------------------------------------------------------------------------------------------------


def load_chunks(machine: Any, address: int, offsets: NDArray[np.int64], width: int) -> NDArray:
    """Chunks of `width` bytes of global memory at address + offsets, as raw [n, width] bytes."""
    if offsets.size == 0:
        return np.empty((0, width), np.uint8)
    view, index = _locate(machine, address, offsets, width)
    return view[index].view(np.uint8).reshape(-1, width)


def store_chunks(machine: Any, address: int, offsets: NDArray[np.int64], width: int, values: NDArray) -> None:
    if offsets.size == 0:
        return
    view, index = _locate(machine, address, offsets, width)
    view[index] = np.ascontiguousarray(values).reshape(-1).view(view.dtype)


def _locate(machine: Any, address: int, offsets: NDArray[np.int64], width: int) -> tuple[NDArray, NDArray]:
    memory = machine.memory
    # Addresses wrap at 2**64: a map's base may lie far outside, its coordinates lead back.
    low = (address + int(offsets.min())) & 0xFFFFFFFFFFFFFFFF
    spread = int(offsets.max() - offsets.min())
    i = memory.find(low, low + spread + width)
    start = low - int(memory.starts[i])
    phase = start % width
    data = memory.data[i][phase:]
    view = data[: data.size // width * width].view(CHUNK[width])
    return view, (offsets - offsets.min() + (start - phase)) // width


def cells_between(offset: int, nbytes: int) -> NDArray[np.int64]:
    return np.arange(offset >> 2, (offset + nbytes + 3) >> 2)


class Agent:
    """On whose behalf an asynchronous operation touches memory: its clock at issue, its component and time."""

    __slots__ = ("clock", "component", "operation", "time")

    def __init__(self, operation: Operation, clock: Clock | None, component: int, time: int):
        self.operation, self.clock, self.component, self.time = operation, clock, component, time

    def reads(self, cta: Cta, cells: NDArray, shadow: Any = None, space: str = "shared") -> None:
        shadow = shadow if shadow is not None else cta.shadow
        if shadow is None:
            return
        machine, operation = cta.machine, self.operation
        if "uninitialised" in machine.checks:
            fresh = shadow.unwritten(cells)
            if fresh.any():
                cell = int(cells[int(np.argmax(fresh))])
                where = f"shared+{cell * 4:#x}" if space == "shared" else f"tensor memory column {cell % 512}"
                machine.finding(
                    "uninitialised",
                    f"reads {where} of {cta}, which nobody has written.",
                    operation,
                    key=space,
                )
        if machine.races and self.clock is not None:
            conflict = shadow.async_read(cells, self.clock, self.component, self.time, operation.pc)
            report_conflict(operation, conflict, space, cta, 4, "reads", clock=self.clock)

    def touches_global(
        self,
        base: int,
        offsets: NDArray[Any],
        nbytes: int,
        write: bool,
        reduce: bool = False,
        data: NDArray[Any] | None = None,
    ) -> None:
        """Accesses of `nbytes` at base + offsets; data is what is written."""
        operation, clock = self.operation, self.clock
        machine = operation.cta.machine
        shadow = machine.global_shadow
        if shadow is None or clock is None or (not write and not shadow.tables):
            return
        addresses = offsets.astype(np.int64).view(np.uint64) + np.uint64(base & 0xFFFFFFFFFFFFFFFF)
        known = clock[ASYNC]
        track_global(
            operation, operation.cta.cluster, addresses, nbytes, self.component, self.time, lambda c: known[c],
            operation.pc, write, reduce,
            None if data is None or reduce or nbytes < 4 else np.ascontiguousarray(data).reshape(-1).view(np.uint32),
        )  # fmt: skip

    def writes(self, cta: Cta, cells: NDArray, shadow: Any = None, space: str = "shared") -> None:
        shadow = shadow if shadow is not None else cta.shadow
        if shadow is None:
            return
        if cta.machine.races and self.clock is not None:
            conflict = shadow.async_write(cells, self.clock, self.component, self.time, self.operation.pc)
            report_conflict(self.operation, conflict, space, cta, 4, "writes", clock=self.clock)
        else:
            shadow.write_pc[cells] = self.operation.pc


def snapshot(warp: Warp) -> Clock | None:
    return warp.cta.cluster.clocks.snapshot(warp.row) if warp.cta.machine.track else None


# ---- Groups of bulk copies ----------------------------------------------------------------------------------------


class BulkQueue:
    """The bulk copies out of shared memory that one thread has issued."""

    __slots__ = (
        "boundaries",
        "component",
        "component_write",
        "issued",
        "key",
        "read",
        "waited",
        "written",
        "last_pc",
    )

    def __init__(self, warp: Warp, lane: int):
        self.key = (warp.cta.index, warp.index, lane)
        self.issued = self.read = self.written = self.waited = 0
        self.boundaries: list[int] = []
        self.last_pc = 0
        self.component = self.component_write = 0
        if warp.cta.machine.track:
            clocks = warp.cta.cluster.clocks
            name = f"bulk copies that {warp} of {warp.cta} issued"
            self.component = clocks.component(("bulk", warp.row, lane), name)
            self.component_write = clocks.component(("bulk write", warp.row, lane), f"the writes of {name}")


def bulk_queue(warp: Warp, lane: int) -> BulkQueue:
    queues = warp.extra.setdefault("bulk", {})
    found = queues.get(lane)
    if found is None:
        found = queues[lane] = BulkQueue(warp, lane)
    return found


def issue_out(
    warp: Warp,
    lane: int,
    pc: int,
    kind: str,
    label: str,
    read: Callable[[Agent], Any],
    write: Callable[[Agent, Any], None],
) -> None:
    """Queue a copy out of shared memory: it reads some time, and its write becomes visible some time after."""
    machine = warp.cta.machine
    queue = bulk_queue(warp, lane)
    queue.issued += 1
    queue.last_pc = pc
    number = queue.issued
    clock = snapshot(warp)

    def apply_read() -> None:
        data = read(Agent(operation, clock, queue.component, number))
        queue.read = number

        def apply_write() -> None:
            write(Agent(writing, clock, queue.component_write, number), data)
            queue.written = number
            machine.idle_polls = 0

        writing = Operation(kind, warp, pc, apply_write, label)
        machine.queue(("bulk write", *queue.key), writing)

    operation = Operation(kind, warp, pc, apply_read, label)
    machine.queue(("bulk read", *queue.key), operation)


@handles("cp.async.bulk.commit_group")
def bulk_commit(program: Program, i: Instruction) -> Step:
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        for warp, lane, _ in threads_of(c, guard):
            queue = bulk_queue(warp, lane)
            queue.boundaries.append(queue.issued)

    return step


@handles("cp.async.bulk.wait_group")
def bulk_wait(program: Program, i: Instruction) -> Step:
    reads_only = "read" in i.parts
    keep = i.operands[0]
    if not isinstance(keep, Imm):
        raise PtxError(f"wait_group takes a number: {i.text}", i.line)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        machine = c.machine
        for warp in c.shape.warps:
            for lane, queue in warp.extra.get("bulk", {}).items():
                if not _thread_in(c, where, warp, lane):
                    continue
                if len(queue.boundaries) <= keep.value:
                    continue
                target = queue.boundaries[-1 - keep.value]
                while queue.read < target:
                    machine._complete(("bulk read", *queue.key))
                if not reads_only:
                    while queue.written < target:
                        machine._complete(("bulk write", *queue.key))
                queue.waited = max(queue.waited, target)
                if machine.track:
                    c.cta.cluster.clocks.observe([warp.row], queue.component, target)
                    if not reads_only:
                        c.cta.cluster.clocks.observe([warp.row], queue.component_write, target)

    return step


def threads_of(c: Convoy, guard: tuple[int, bool] | None) -> list[tuple[Warp, int, int]]:
    """The threads that an instruction is executed by: warp, lane, and place in the convoy's part of the registers."""
    where = c.active(guard)
    if where is False:
        return []
    first = c.shape.lo
    lanes = c.shape.lanes if where is None else np.flatnonzero(where) + first
    return [(c.cta.warps[int(t) // 32], int(t) % 32, int(t) - first) for t in lanes]


def _thread_in(c: Convoy, where: NDArray | None, warp: Warp, lane: int) -> bool:
    position = warp.index * 32 + lane - c.shape.lo
    if not 0 <= position < c.shape.hi - c.shape.lo:
        return False
    mask = c.mask if where is None else where
    return mask is None or bool(mask[position])


# ---- Bulk copies --------------------------------------------------------------------------------------------------


def _value(read: Callable[[Convoy], Any], c: Convoy, position: int) -> int:
    value = read(c)
    if isinstance(value, np.ndarray) and value.ndim:
        return int(value[position])
    return int(value)


def _shared_address(value: int) -> int:
    return value - SHARED_WINDOW if value >= SHARED_WINDOW else value


class _Coordinates:
    """`[map, {c0, c1, ...}]`."""

    def __init__(self, program: Program, memory: Any, i: Instruction):
        if not isinstance(memory, Mem) or not memory.extra:
            raise PtxError(f"{i.op} needs [map, {{coordinates}}]: {i.text}", i.line)
        self.map_address = program.address(Mem(memory.base, memory.offset), i, False)
        vector = memory.extra[0]
        items = vector.items if isinstance(vector, Vec) else (vector,)
        self.coordinates = [program.reader(x, "I", i) for x in items]

    def get(self, c: Convoy, position: int) -> tuple[int, list[int]]:
        return _value(self.map_address, c, position), [_value(r, c, position) for r in self.coordinates]


def tensor_map(machine: Any, address: int) -> TensorMap:
    cache = machine.program.__dict__.setdefault("tensor_maps", {})
    raw = machine.memory.bytes_at(address, 128).tobytes()
    found = cache.get(raw)
    if found is None:
        try:
            found = cache[raw] = decode(raw)
        except ValueError as error:
            raise Fault("descriptors", f"the tensor map at {address:#x} means nothing: {error}.") from None
    return found


def _tile(map_: TensorMap, coordinates: list[int], offset: int, gather4: bool) -> tma.Tile:
    try:
        if gather4:
            return tma.gather4(map_.tile, coordinates[0], coordinates[1:], offset)
        if len(coordinates) != len(map_.tile.extents):
            raise ValueError(f"{len(coordinates)} coordinates for a map of rank {len(map_.tile.extents)}")
        return tma.tile(map_.tile, coordinates, offset)
    except ValueError as error:
        raise Fault("descriptors", f"tensor copy: {error}.") from None


def _destinations(
    cta: Cta, address: int, barrier: int, mask: int | None, pair: bool
) -> list[tuple[Cta, int, Cta, int]]:
    """(CTA, offset, CTA of the mbarrier, its offset) for each copy that arrives."""
    target, offset = shared_place(cta, address, False, None)
    signal, signal_offset = shared_place(cta, barrier, False, None)
    if mask is None:
        return [(target, offset, signal, signal_offset)]
    ctas = cta.cluster.ctas
    result = []
    for rank in range(16):
        if not mask >> rank & 1:
            continue
        if rank >= len(ctas):
            raise Fault(
                "bounds", f"a multicast mask {mask:#x} names CTA rank {rank} in a cluster of {len(ctas)}."
            )
        to = (rank & ~1) | (signal.rank & 1) if pair else rank
        result.append((ctas[rank], offset, ctas[to], signal_offset))
    return result


def _arriving(
    warp: Warp, pc: int, kind: str, label: str, places: list[tuple[Cta, int, Cta, int]],
    nbytes: int, fetch: Callable[[Agent], Callable[[Cta, int], None]], cells: Callable[[int], NDArray],
) -> None:  # fmt: skip
    """Queue a copy into shared memory that completes on mbarriers, one operation per destination."""
    machine = warp.cta.machine
    clock = snapshot(warp)
    operations: list[Operation] = []
    for n, (cta, offset, signal, signal_offset) in enumerate(places):

        def apply(
            cta: Cta = cta, offset: int = offset, signal: Cta = signal, at: int = signal_offset, n: int = n
        ) -> None:
            barrier = async_mbarrier(signal, at, operations[n])
            cta.shared.check(np.array([offset]), nbytes)
            agent = Agent(operations[n], clock, barrier.component, barrier.phase + 1)
            put = fetch(agent)
            agent.writes(cta, cells(offset))
            put(cta, offset)
            machine.counters.add(warp, "shared_write_bytes", nbytes)
            barrier.complete(nbytes, operations[n])

        operations.append(Operation(kind, warp, pc, apply, label))
    for n, operation in enumerate(operations):
        machine.queue(("copy", operation.issued, warp.cta.index, warp.index, machine.sequence, n), operation)


@handles("cp.async.bulk", "cp.reduce.async.bulk")
def bulk(program: Program, i: Instruction) -> Step:
    parts = i.parts
    if "prefetch" in parts:
        return lambda c: None
    reduce = parts[1] == "reduce"
    parts = [p for p in parts if p not in ("cp", "reduce", "async", "bulk")]
    if parts and parts[0] == "tensor":
        return _tensor_copy(program, i, reduce, parts[1:])
    spaces = [p for p in parts if p in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) != 2:
        raise PtxError(f"unknown bulk copy: {i.text}", i.line)
    to, from_ = spaces
    grouped = "bulk_group" in parts
    operands = list(i.operands)
    read_to = program.address(operands[0], i, to != "global")
    read_from = program.address(operands[1], i, from_ != "global")
    size_of = program.reader(operands[2], "W", i)
    read_barrier = None if grouped else program.address(operands[3], i, True)
    multicast = "multicast::cluster" in parts
    mask_of = program.reader(operands[4], "H", i) if multicast else None
    operation_name, element = "", ""
    if reduce:
        operation_name = next(
            (p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), ""
        )
        element = parts[-1]
        if not operation_name or element not in tma.ELEMENT_BYTES | {"b32": 4, "b64": 8}:
            raise PtxError(f"unknown bulk reduction: {i.text}", i.line)
        element = {"b32": "u32", "b64": "u64"}.get(element, element)
    if "cp_mask" in parts:
        raise PtxError(f"byte masks are not supported: {i.text}", i.line)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        machine = c.machine
        for warp, lane, position in threads_of(c, guard):
            target = _value(read_to, c, position)
            source = _value(read_from, c, position)
            nbytes = _value(size_of, c, position)
            if nbytes % 16 or (target | source) % 16:
                machine.finding(
                    "alignment",
                    f"a bulk copy of {nbytes} bytes from {source:#x} to {target:#x}: size and addresses must be "
                    "multiples of 16.",
                    c,
                )
                nbytes -= nbytes % 16
            warp.kinds.add("store" if grouped else "load")
            label = f"{nbytes} bytes {from_} to {to}"
            if grouped:
                _bulk_out(
                    c.pc, warp, lane, label, target, _shared_address(source), nbytes, operation_name, element
                )
                continue
            assert read_barrier is not None
            barrier = _shared_address(_value(read_barrier, c, position))
            mask = _value(mask_of, c, position) if mask_of is not None else None
            places = _destinations(c.cta, _shared_address(target), barrier, mask, False)
            if from_ == "global":
                _bulk_in(c.pc, warp, label, source, nbytes, places)
            else:
                _bulk_across(
                    c.pc, warp, label, _shared_address(source), nbytes, places, operation_name, element
                )

    return step


def _bulk_in(pc: int, warp: Warp, label: str, source: int, nbytes: int, places: list) -> None:
    machine = warp.cta.machine

    def fetch(agent: Agent) -> Callable[[Cta, int], None]:
        data = machine.memory.bytes_at(source, nbytes)
        agent.touches_global(source, np.arange(0, nbytes, 16), 16, False)
        machine.counters.add(warp, "global_read_bytes", nbytes)

        def put(cta: Cta, offset: int) -> None:
            cta.shared.data[offset : offset + nbytes] = data

        return put

    _arriving(warp, pc, "bulk copy", label, places, nbytes, fetch, lambda o: cells_between(o, nbytes))


def _bulk_across(
    pc: int, warp: Warp, label: str, source: int, nbytes: int, places: list, operation_name: str, element: str
) -> None:
    """Shared memory to another CTA's shared memory."""
    cta = warp.cta
    machine = cta.machine
    owner, start = shared_place(cta, source, True, None)
    clock = snapshot(warp)
    target, offset, signal, signal_offset = places[0]

    def apply() -> None:
        owner.shared.check(np.array([start]), nbytes)
        target.shared.check(np.array([offset]), nbytes)
        barrier = async_mbarrier(signal, signal_offset, operation)
        agent = Agent(operation, clock, barrier.component, barrier.phase + 1)
        agent.reads(owner, cells_between(start, nbytes))
        agent.writes(target, cells_between(offset, nbytes))
        data = owner.shared.data[start : start + nbytes].copy()
        place = target.shared.data[offset : offset + nbytes]
        place[:] = tma.reduce(operation_name, element, place.copy(), data) if operation_name else data
        machine.counters.add(warp, "shared_read_bytes", nbytes)
        machine.counters.add(warp, "shared_write_bytes", nbytes)
        barrier.complete(nbytes, operation)

    operation = Operation("bulk copy", warp, pc, apply, label)
    machine.queue(("copy", machine.time, cta.index, warp.index, machine.sequence), operation)


def _bulk_out(
    pc: int,
    warp: Warp,
    lane: int,
    label: str,
    target: int,
    source: int,
    nbytes: int,
    operation_name: str,
    element: str,
) -> None:
    cta = warp.cta
    machine = cta.machine
    owner, start = shared_place(cta, source, True, None)

    def read(agent: Agent) -> NDArray:
        owner.shared.check(np.array([start]), nbytes)
        agent.reads(owner, cells_between(start, nbytes))
        machine.counters.add(warp, "shared_read_bytes", nbytes)
        return owner.shared.data[start : start + nbytes].copy()

    def write(agent: Agent, data: NDArray) -> None:
        place = machine.memory.bytes_at(target, nbytes)
        agent.touches_global(target, np.arange(0, nbytes, 16), 16, True, bool(operation_name), data)
        place[:] = tma.reduce(operation_name, element, place.copy(), data) if operation_name else data
        machine.counters.add(warp, "global_write_bytes", nbytes)

    issue_out(warp, lane, pc, "bulk store", label, read, write)


def _tensor_copy(program: Program, i: Instruction, reduce: bool, parts: list[str]) -> Step:
    spaces = [p for p in parts if p in ("global", "shared::cta", "shared::cluster")]
    mode = [p for p in parts if p.startswith(("tile", "im2col"))]
    if len(spaces) != 2 or any(m not in ("tile", "tile::gather4", "tile::scatter4") for m in mode):
        raise PtxError(f"unknown tensor copy: {i.text}", i.line)
    gather4 = bool(mode) and mode[0] != "tile"
    guard = program.guard(i)
    operands = list(i.operands)
    if spaces[0] == "global":
        where_to = _Coordinates(program, operands[0], i)
        read_source = program.address(operands[1], i, True)
        operation_name = next(
            (p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), ""
        )
        if reduce and not operation_name:
            raise PtxError(f"unknown tensor reduction: {i.text}", i.line)

        def store_step(c: Convoy) -> None:
            for warp, lane, position in threads_of(c, guard):
                address, coordinates = where_to.get(c, position)
                source = _shared_address(_value(read_source, c, position))
                warp.kinds.add("store")
                _tensor_out(c, warp, lane, address, coordinates, source, operation_name, gather4)

        return store_step
    read_target = program.address(operands[0], i, True)
    source = _Coordinates(program, operands[1], i)
    read_barrier = program.address(operands[2], i, True)
    multicast = "multicast::cluster" in parts
    mask_of = program.reader(operands[3], "H", i) if multicast else None
    pair = "cta_group::2" in parts

    def load_step(c: Convoy) -> None:
        for warp, _, position in threads_of(c, guard):
            address, coordinates = source.get(c, position)
            target = _shared_address(_value(read_target, c, position))
            barrier = _shared_address(_value(read_barrier, c, position))
            mask = _value(mask_of, c, position) if mask_of is not None else None
            warp.kinds.add("load")
            _tensor_in(
                c, warp, address, coordinates, _destinations(c.cta, target, barrier, mask, pair), gather4
            )

    return load_step


def _tensor_in(
    c: Convoy, warp: Warp, address: int, coordinates: list[int], places: list, gather4: bool
) -> None:
    machine = c.machine
    map_ = tensor_map(machine, address)
    tile = _tile(map_, coordinates, places[0][1], gather4)
    label = f"tensor {tuple(coordinates)} to shared+{places[0][1]:#x}, {tile.bytes} bytes"

    def fetch(agent: Agent) -> Callable[[Cta, int], None]:
        inside = tile.global_ if tile.inside is None else tile.global_[tile.inside]
        agent.touches_global(map_.address, inside, tile.width, False)
        if tile.inside is None:
            values = load_chunks(machine, map_.address, tile.global_, tile.width)
        else:
            values = np.empty((len(tile.shared), tile.width), np.uint8)
            values[:] = tma.fill(map_.tile)[: tile.width]
            values[tile.inside] = load_chunks(machine, map_.address, tile.global_[tile.inside], tile.width)
        machine.counters.add(warp, "global_read_bytes", tile.bytes)

        def put(cta: Cta, offset: int) -> None:
            view = cta.shared.data.view(CHUNK[tile.width])
            view[tile.shared // tile.width] = np.ascontiguousarray(values).reshape(-1).view(CHUNK[tile.width])

        return put

    _arriving(
        warp, c.pc, "tensor load", label, places, tile.bytes, fetch, lambda o: cells_between(o, tile.bytes)
    )


def _tensor_out(
    c: Convoy,
    warp: Warp,
    lane: int,
    address: int,
    coordinates: list[int],
    source: int,
    operation_name: str,
    gather4: bool,
) -> None:
    machine, cta = c.machine, c.cta
    map_ = tensor_map(machine, address)
    owner, start = shared_place(cta, source, True, None)
    tile = _tile(map_, coordinates, start, gather4)
    label = f"tensor shared+{start:#x} to {tuple(coordinates)}, {tile.bytes} bytes"

    def read(agent: Agent) -> NDArray:
        owner.shared.check(np.array([start]), tile.bytes)
        agent.reads(owner, cells_between(start, tile.bytes))
        machine.counters.add(warp, "shared_read_bytes", tile.bytes)
        return (
            owner.shared.data.view(CHUNK[tile.width])[tile.shared // tile.width]
            .view(np.uint8)
            .reshape(-1, tile.width)
        )

    def write(agent: Agent, data: NDArray) -> None:
        offsets = tile.global_
        if tile.inside is not None:
            offsets, data = offsets[tile.inside], data[tile.inside]
        agent.touches_global(map_.address, offsets, tile.width, True, bool(operation_name), data)
        if operation_name and len(offsets):
            old = load_chunks(machine, map_.address, offsets, tile.width)
            data = tma.reduce(
                operation_name, map_.tile.element, np.ascontiguousarray(old), np.ascontiguousarray(data)
            )
        store_chunks(machine, map_.address, offsets, tile.width, data)
        machine.counters.add(warp, "global_write_bytes", data.size)

    issue_out(warp, lane, c.pc, "tensor store", label, read, write)


# ---- cp.async -----------------------------------------------------------------------------------------------------


class CopyQueue:
    """The cp.async operations of one warp."""

    __slots__ = ("boundaries", "component", "done", "issued", "key")

    def __init__(self, warp: Warp):
        self.key = ("cp.async", warp.cta.index, warp.index)
        self.issued = self.done = 0
        self.boundaries: list[int] = []
        self.component = 0
        if warp.cta.machine.track:
            self.component = warp.cta.cluster.clocks.component(
                ("cp.async", warp.row), f"the cp.async of {warp} of {warp.cta}"
            )


def copy_queue(warp: Warp) -> CopyQueue:
    found = warp.extra.get("cp.async")
    if found is None:
        found = warp.extra["cp.async"] = CopyQueue(warp)
    return found


@handles("cp.async")
def cp_async(program: Program, i: Instruction) -> Step:
    parts = i.parts
    if parts[2] not in ("ca", "cg"):
        raise PtxError(f"unknown cp.async: {i.text}", i.line)
    read_to = program.address(i.operands[0], i, True)
    read_from = program.address(i.operands[1], i, False)
    size = i.operands[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise PtxError(f"cp.async copies 4, 8 or 16 bytes: {i.text}", i.line)
    nbytes = size.value
    source_size = None
    ignore = None
    if len(i.operands) > 3:
        extra = i.operands[3]
        if isinstance(extra, Reg) and extra.width == 1:
            ignore = program.reader(extra, "P", i)
        elif not (isinstance(extra, Reg) and extra.width == 64):
            source_size = program.reader(extra, "W", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        machine = c.machine
        size_ = c.shape.hi - c.shape.lo
        targets = _addresses(read_to(c), c, where).astype(np.int64) & 0xFFFFFF
        sources = _addresses(read_from(c), c, where).astype(np.uint64)
        lengths = np.full(targets.size, nbytes)
        if source_size is not None:
            value = np.broadcast_to(source_size(c), size_)
            lengths = (value if where is None else value[where]).astype(np.int64)
        if ignore is not None:
            value = np.broadcast_to(ignore(c), size_)
            lengths = np.where(value if where is None else value[where], 0, nbytes)
        if ((targets | sources.astype(np.int64)) % nbytes).any():
            machine.finding(
                "alignment", f"cp.async of {nbytes} bytes from or to an address that is no multiple.", c
            )
        lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo
        for warp in c.shape.warps:
            mine = lanes // 32 == warp.index
            if mine.any():
                _copy_of_warp(c, warp, targets[mine], sources[mine], lengths[mine], nbytes)

    return step


def _copy_of_warp(
    c: Convoy, warp: Warp, targets: NDArray, sources: NDArray, lengths: NDArray, nbytes: int
) -> None:
    machine, cta, pc = c.machine, c.cta, c.pc
    queue = copy_queue(warp)
    queue.issued += 1
    number = queue.issued
    clock = snapshot(warp)
    if clock is not None:
        # These copies go through the generic proxy: what the warp knows is enough.
        clock[ASYNC] = clock[GENERIC]
    targets, sources = targets.copy(), sources.copy()

    def apply() -> None:
        cta.shared.check(targets, nbytes)
        data = np.zeros((len(targets), nbytes), np.uint8)
        whole = lengths >= nbytes
        if whole.any():
            loaded = machine.memory.load(sources[whole], 4, nbytes // 4)
            data[whole] = np.ascontiguousarray(loaded.T).view(np.uint8).reshape(-1, nbytes)
        for k in np.flatnonzero(~whole & (lengths > 0)):
            data[k, : lengths[k]] = machine.memory.bytes_at(int(sources[k]), int(lengths[k]))
        if cta.shadow is not None:
            cells = ((targets >> 2)[:, None] + np.arange(nbytes // 4)).reshape(-1)
            Agent(operation, clock, queue.component, number).writes(cta, cells)
        cta.shared.data[targets[:, None] + np.arange(nbytes)] = data
        machine.counters.add(warp, "global_read_bytes", int(lengths.sum()))
        machine.counters.add(warp, "shared_write_bytes", data.size)
        queue.done = number

    operation = Operation("cp.async", warp, pc, apply, f"{len(targets)} copies of {nbytes} bytes")
    warp.kinds.add("load")
    machine.queue(queue.key, operation)


@handles("cp.async.commit_group")
def cp_commit(program: Program, i: Instruction) -> Step:
    def step(c: Convoy) -> None:
        for warp in c.shape.warps:
            queue = copy_queue(warp)
            queue.boundaries.append(queue.issued)

    return step


@handles("cp.async.wait_group", "cp.async.wait_all")
def cp_wait(program: Program, i: Instruction) -> Step:
    everything = i.op.endswith("wait_all")
    keep = 0
    if not everything:
        operand = i.operands[0]
        if not isinstance(operand, Imm):
            raise PtxError(f"wait_group takes a number: {i.text}", i.line)
        keep = operand.value

    def step(c: Convoy) -> None:
        for warp in c.shape.warps:
            queue = copy_queue(warp)
            if everything:
                target = queue.issued
            elif len(queue.boundaries) > keep:
                target = queue.boundaries[-1 - keep]
            else:
                continue
            while queue.done < target:
                c.machine._complete(queue.key)
            if c.machine.track:
                clocks = c.cta.cluster.clocks
                clocks.vc[GENERIC, warp.row, queue.component] = max(
                    int(clocks.vc[GENERIC, warp.row, queue.component]), target
                )

    return step


@handles("cp.async.mbarrier.arrive")
def cp_arrive(program: Program, i: Instruction) -> Step:
    noinc = "noinc" in i.parts
    read = program.address(i.operands[0], i, True)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        addresses = _addresses(read(c), c, where)
        lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo
        for warp in c.shape.warps:
            mine = addresses[lanes // 32 == warp.index]
            for address in np.unique(mine):
                _arrive_later(c, warp, int(address), int((mine == address).sum()), noinc)

    return step


def _arrive_later(c: Convoy, warp: Warp, address: int, count: int, noinc: bool) -> None:
    cta, offset = shared_place(c.cta, address, True, c)
    barrier = cta_mbarrier(cta, offset, c)
    queue = copy_queue(warp)
    queue.issued += 1
    number = queue.issued
    if not noinc:
        barrier.pending += count
    clock = snapshot(warp)

    def apply() -> None:
        queue.done = number
        if barrier.clock is not None and clock is not None:
            np.maximum(barrier.clock, clock, out=barrier.clock)
            column = barrier.clock[GENERIC]
            column[queue.component] = max(int(column[queue.component]), number)
        barrier.arrive(count, operation)

    operation = Operation("cp.async arrive", warp, c.pc, apply, str(barrier))
    c.machine.queue(queue.key, operation)


# ---- st.async, red.async ------------------------------------------------------------------------------------------


@handles("st.async", "red.async")
def store_async(program: Program, i: Instruction) -> Step:
    parts = i.parts
    reduce = parts[0] == "red"
    type_ = parts[-1]
    nbytes = int("".join(ch for ch in type_ if ch.isdigit()) or 0) // 8
    if nbytes not in (4, 8) or not any("complete_tx" in p for p in parts):
        raise PtxError(f"unknown asynchronous store: {i.text}", i.line)
    read_to = program.address(i.operands[0], i, True)
    kind = RAW[nbytes * 8]
    sources = [program.reader(s, kind, i) for s in _vector(i.operands[1])]
    read_barrier = program.address(i.operands[2], i, True)
    count = len(sources)
    op = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
    combine = _combine_lazily(op, type_) if reduce else None
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        targets = _addresses(read_to(c), c, where).astype(np.int64)
        barriers = _addresses(read_barrier(c), c, where).astype(np.int64)
        size = c.shape.hi - c.shape.lo
        values = np.empty((targets.size, count), UINT[nbytes])
        for n, source in enumerate(sources):
            value = np.broadcast_to(source(c), size)
            values[:, n] = value if where is None else value[where]
        lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo
        groups_: dict[tuple[int, int, int], list[int]] = {}
        for k in range(targets.size):
            key = (int(lanes[k]) // 32, int(targets[k]) >> 24, int(barriers[k]))
            groups_.setdefault(key, []).append(k)
        for (w, rank, barrier_address), members in groups_.items():
            if rank >= len(c.cta.cluster.ctas):
                raise Fault(
                    "bounds",
                    f"a shared address names CTA rank {rank} in a cluster of {len(c.cta.cluster.ctas)}.",
                )
            _store_later(c, c.cta.warps[w], c.cta.cluster.ctas[rank], targets[members] & 0xFFFFFF, values[members],
                         nbytes, barrier_address, combine)  # fmt: skip

    return step


def _store_later(
    c: Convoy,
    warp: Warp,
    target: Cta,
    offsets: NDArray,
    values: NDArray,
    nbytes: int,
    barrier_address: int,
    combine: Any,
) -> None:
    machine = c.machine
    signal, at = shared_place(c.cta, barrier_address, False, c)
    clock = snapshot(warp)
    count = values.shape[1]

    def apply() -> None:
        barrier = async_mbarrier(signal, at, operation)
        target.shared.check(offsets, nbytes * count)
        cells = ((offsets >> 2)[:, None] + np.arange(nbytes * count // 4)).reshape(-1)
        Agent(operation, clock, barrier.component, barrier.phase + 1).writes(target, cells)
        if combine is None:
            target.shared.store(offsets, values.T, nbytes, count)
        else:
            for k in range(len(offsets)):
                one = offsets[k : k + 1]
                old = target.shared.load(one, nbytes)
                target.shared.store(
                    one, np.array([[combine(old[0, 0], values[k, 0], None)]], UINT[nbytes]), nbytes
                )
        machine.counters.add(warp, "shared_write_bytes", values.nbytes)
        barrier.complete(values.nbytes, operation)

    operation = Operation("asynchronous store", warp, c.pc, apply, f"{values.nbytes} bytes")
    machine.queue(("copy", machine.time, c.cta.index, warp.index, machine.sequence), operation)


# ---- Cluster launch control ---------------------------------------------------------------------------------------


@handles("clusterlaunchcontrol.try_cancel")
def try_cancel(program: Program, i: Instruction) -> Step:
    read_to = program.address(i.operands[0], i, True)
    read_barrier = program.address(i.operands[1], i, True)
    everywhere = any("multicast" in p for p in i.parts)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        machine = c.machine
        for warp, _, position in threads_of(c, guard):
            target, offset = shared_place(c.cta, _shared_address(_value(read_to, c, position)), True, c)
            signal, at = shared_place(c.cta, _shared_address(_value(read_barrier, c, position)), True, c)
            ctas = c.cta.cluster.ctas if everywhere else [target]
            # The block is taken out of the queue now; the answer arrives later.
            answer = np.zeros(4, np.uint32)
            if machine.origins:
                answer[:3] = machine.origins.popleft()
                answer[3] = 1
                machine.total_clusters -= 1

            def fetch(agent: Agent, answer: NDArray = answer) -> Callable[[Cta, int], None]:
                def put(to: Cta, start: int) -> None:
                    to.shared.data[start : start + 16] = answer.view(np.uint8)

                return put

            places = [(x, offset, x if everywhere else signal, at) for x in ctas]
            _arriving(
                warp, c.pc, "launch control", "try_cancel", places, 16, fetch, lambda o: cells_between(o, 16)
            )

    return step


@handles("clusterlaunchcontrol.query_cancel")
def query_cancel(program: Program, i: Instruction) -> Step:
    parts = i.parts
    source = i.operands[1]
    if not isinstance(source, Reg) or source.width != 128:
        raise PtxError(f"the answer of a try_cancel is a 128-bit register: {i.text}", i.line)
    asks = "is_canceled" in parts
    axis = next((p.split("::")[1] for p in parts if p.startswith("get_first_ctaid::")), None)
    targets = [program.destination(t, i) for t in _vector(i.operands[0])]
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        words = np.ascontiguousarray(c.rows.Q[source.index]).view(np.uint32).reshape(-1, 4)
        chosen = True if where is None else where
        if asks:
            if targets[0] is not None:
                np.copyto(c.rows.P[targets[0][1]], words[:, 3] != 0, where=chosen)
            return
        columns = ["xyz".index(axis)] if axis else [0, 1, 2, 3]
        for column, target in zip(columns, targets, strict=False):
            if target is not None:
                value = words[:, column] if column < 3 else np.zeros(len(words), np.uint32)
                np.copyto(c.rows.W[target[1]], value, where=chosen)

    return step


# ---- The end ------------------------------------------------------------------------------------------------------


def warp_ended(warp: Warp) -> None:
    """Copies go on after their warp."""


def cta_ended(cta: Cta) -> None:
    machine = cta.machine
    for warp in cta.warps:
        for lane, queue in warp.extra.get("bulk", {}).items():
            if queue.waited < queue.issued:
                machine.finding(
                    "exit",
                    f"{cta} ends while bulk copies of its thread {warp.index * 32 + lane} may still read its shared "
                    "memory: a cp.async.bulk.commit_group or wait_group.read is missing before the end.",
                    warp,
                    pc=queue.last_pc,
                )
            machine.drain(("bulk read", *queue.key))
            machine.drain(("bulk write", *queue.key))
        queue = warp.extra.get("cp.async")
        if queue is not None:
            machine.drain(queue.key)
    for stream in list(machine.streams):
        if stream not in machine.streams:
            continue
        operation = machine.streams[stream][0]
        if operation.kind in ("bulk copy", "tensor load", "asynchronous store") and operation.cta is cta:
            if len(cta.cluster.ctas) > 1 and cta.cluster.live > 1:
                continue
            machine.finding(
                "exit",
                f"{cta} ends while a {operation.kind} into its shared memory is on its way ({operation.label}).",
                operation,
            )
            machine.drain(stream)
