"""Loads, stores and atomics of threads, in every state space, and the matrix loads of warps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codegen import LOCAL_WINDOW, RAW, SHARED_WINDOW
from .control import gather
from .decode import PARAMETER_BASE, Program, handles
from .machine import FULL, Convoy, Cta, Fault, Step
from .memory import UINT, OutOfBounds
from .ptx import Instruction, Mem, Operand, PtxError, Reg, Sym, Vec
from .sync import groups, remote_access, report_conflict, rows_of, track_global
from .units import layouts

_TYPES = frozenset("b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 b128 f16x2 bf16x2".split())
_BYTES = {"f16x2": 4, "bf16x2": 4, "bf16": 2, "f16": 2}
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
_SYNCHRONISING = ("acquire", "release", "acq_rel", "relaxed", "volatile", "mmio")


def _type_of(i: Instruction) -> tuple[str, int]:
    for part in reversed(i.parts):
        if part in _TYPES:
            return part, _BYTES.get(part) or int(part[1:]) // 8
    raise PtxError(f"{i.op} has no type: {i.text}", i.line)


def _space_of(i: Instruction) -> str:
    return next((p for p in i.parts if p in _SPACES), "generic")


class Span:
    """Where the active threads of a convoy access memory: one state space, addresses of it."""

    __slots__ = ("addresses", "cta", "space", "threads")

    def __init__(self, space: str, cta: Cta, addresses: NDArray, threads: NDArray | None):
        self.space, self.cta, self.addresses, self.threads = space, cta, addresses, threads


def spans(c: Convoy, space: str, addresses: NDArray, where: NDArray | None) -> list[Span]:
    """Sort out which memory each thread means. `threads` of a span index the active threads; None for all."""
    if space.startswith("param"):
        window = c.machine.program.parameter_window
        return [Span("global", c.cta, addresses.astype(np.uint64) + np.uint64(window), None)]
    if space in ("global", "const"):
        return [Span("global", c.cta, addresses.astype(np.uint64, copy=False), None)]
    if space == "local":
        return [Span("local", c.cta, addresses.astype(np.int64), None)]
    if space == "generic":
        addresses = addresses.astype(np.uint64, copy=False)
        kinds = (addresses >= np.uint64(LOCAL_WINDOW)).astype(np.int8) + (
            addresses >= np.uint64(SHARED_WINDOW)
        )
        result = []
        for kind in np.unique(kinds):
            threads = None if (kinds == kind).all() else np.flatnonzero(kinds == kind)
            some = addresses if threads is None else addresses[threads]
            if kind == 0:
                result.append(Span("global", c.cta, some, threads))
            elif kind == 1:
                result.append(
                    Span("local", c.cta, (some - np.uint64(LOCAL_WINDOW)).astype(np.int64), threads)
                )
            else:
                for span in spans(
                    c, "shared::cluster", (some - np.uint64(SHARED_WINDOW)).astype(np.uint32), where
                ):
                    inner = span.threads
                    if threads is not None:
                        inner = threads if inner is None else threads[inner]
                    result.append(Span("shared", span.cta, span.addresses, inner))
        return result
    # Shared memory: which CTA of the cluster?
    local_only = space != "shared::cluster"
    addresses = addresses.astype(np.int64)
    ranks = addresses >> 24
    first = int(ranks[0])
    ctas = c.cta.cluster.ctas
    result = []
    if addresses.size == 1 or (ranks == first).all():
        choices: list[tuple[int, NDArray | None]] = [(first, None)]
    else:
        choices = [(int(r), np.flatnonzero(ranks == r)) for r in np.unique(ranks)]
    for rank, threads in choices:
        if rank >= len(ctas):
            raise Fault("bounds", f"a shared address names CTA rank {rank} in a cluster of {len(ctas)}.")
        if local_only and rank != c.cta.rank:
            raise Fault(
                "bounds",
                f"a shared::cta access got an address of CTA rank {rank} (mapa without shared::cluster?).",
            )
        some = addresses if threads is None else addresses[threads]
        result.append(Span("shared", ctas[rank], some & 0xFFFFFF, threads))
    return result


def check_alignment(c: Convoy, addresses: NDArray, nbytes: int) -> None:
    machine = c.machine
    if "alignment" in machine.checks and nbytes > 1:
        mask = addresses.dtype.type(nbytes - 1)
        low = np.bitwise_or.reduce(addresses) & mask
        if low:
            bad = addresses[(addresses & mask) != 0]
            machine.finding(
                "alignment",
                f"an access of {nbytes} bytes at address {int(bad[0]):#x}, which is not a multiple of {nbytes}.",
                c,
            )


def cells_of(addresses: NDArray, nbytes: int) -> NDArray:
    """The 4-byte cells that accesses of consecutive bytes touch: [n, cells], flattened."""
    first = addresses >> 2
    if nbytes <= 4:
        return first
    return (first[:, None] + np.arange(nbytes // 4)).reshape(-1)


def lane_rows(c: Convoy, where: NDArray | None, span: Span) -> NDArray:
    rows = c.shape.slice_rows if where is None else c.shape.slice_rows[where]
    return rows if span.threads is None else rows[span.threads]


def track_shared(
    c: Convoy, span: Span, where: NDArray | None, nbytes: int, write: bool, flag: bool = False
) -> None:
    """Hold an access to shared memory against its shadow."""
    cta = span.cta
    shadow = cta.shadow
    if shadow is None or not span.addresses.size:
        return
    cells = cells_of(span.addresses, nbytes)
    rows = lane_rows(c, where, span)
    if nbytes > 4:
        rows = np.repeat(rows, nbytes // 4)
    machine = c.machine
    if not write and "uninitialised" in machine.checks:
        fresh = shadow.unwritten(cells)
        if fresh.any():
            cell = int(cells[int(np.argmax(fresh))])
            machine.finding(
                "uninitialised", f"reads shared+{cell * 4:#x} of {cta}, which nobody has written.", c
            )
    if flag or not machine.races:
        if write:
            shadow.write_pc[cells] = c.pc
        return
    if write:
        report_conflict(c, shadow.warp_write(cells, rows, c.pc), "shared", cta, 4, "writes")
    else:
        report_conflict(c, shadow.warp_read(cells, rows, c.pc), "shared", cta, 4, "reads")


def track_threads(
    c: Convoy,
    span: Span,
    where: NDArray[Any] | None,
    nbytes: int,
    write: bool,
    reduce: bool = False,
    values: NDArray[Any] | None = None,
) -> None:
    """Hold threads' accesses to global memory against its shadow. values: what is written, [elements, n]."""
    shadow = c.machine.global_shadow
    if shadow is None or (not write and not shadow.tables):
        return
    cluster = c.cta.cluster
    rows = lane_rows(c, where, span)
    times = cluster.clocks.vc[0, rows, rows + 1]
    words = None
    if values is not None and nbytes >= 4:
        words = np.ascontiguousarray(values.T).view(np.uint32).reshape(-1)
    track_global(c, cluster, span.addresses, nbytes, rows + 1, times, None, c.pc, write, reduce, words)


def load(c: Convoy, span: Span, where: NDArray | None, width: int, count: int, flag: bool = False) -> NDArray:
    """[count, n] elements of `width` bytes. A `flag` synchronises, and does not race."""
    machine = c.machine
    if span.space == "global":
        if not flag:
            track_threads(c, span, where, width * count, False)
        return machine.memory.load(span.addresses, width, count)
    if span.space == "shared":
        if span.cta is not c.cta:
            remote_access(c, span.cta, rows_of(c, where), "reads")
        if machine.track:
            span.cta.shared.check(span.addresses, width * count)
            track_shared(c, span, where, width * count, False, flag)
        return span.cta.shared.load(span.addresses, width, count)
    lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo
    lanes = lanes if span.threads is None else lanes[span.threads]
    local = _local(c, span, width * count)
    raw = local[lanes[:, None], span.addresses[:, None] + np.arange(width * count)]
    return np.ascontiguousarray(raw).view(UINT[width]).T


def store(
    c: Convoy,
    span: Span,
    where: NDArray | None,
    values: NDArray,
    width: int,
    count: int,
    flag: bool = False,
) -> None:
    machine = c.machine
    if span.space == "global":
        if not flag:
            track_threads(c, span, where, width * count, True, values=values)
        machine.memory.store(span.addresses, values, width, count)
        machine.idle_polls = 0
        return
    if span.space == "shared":
        if span.cta is not c.cta:
            remote_access(c, span.cta, rows_of(c, where), "writes to")
        if machine.track:
            span.cta.shared.check(span.addresses, width * count)
            track_shared(c, span, where, width * count, True, flag)
        span.cta.shared.store(span.addresses, values, width, count)
        machine.idle_polls = 0
        return
    lanes = c.shape.lanes if where is None else np.flatnonzero(where) + c.shape.lo
    lanes = lanes if span.threads is None else lanes[span.threads]
    local = _local(c, span, width * count)
    raw = np.ascontiguousarray(values.T).view(np.uint8).reshape(len(lanes), -1)
    local[lanes[:, None], span.addresses[:, None] + np.arange(width * count)] = raw


def _local(c: Convoy, span: Span, nbytes: int) -> NDArray[np.uint8]:
    local = c.cta.local
    size = 0 if local is None else local.shape[1]
    if local is None or span.addresses.min() < 0 or span.addresses.max() + nbytes > size:
        raise OutOfBounds(int(span.addresses.max()), nbytes, f"a thread has {size} bytes of local memory")
    return local


# ---- ld, st -------------------------------------------------------------------------------------------------------


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _extend(values: NDArray, type_: str, width: int) -> NDArray:
    """Elements as a register of `width` bits holds them."""
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    if values.dtype == dtype:
        return values
    if type_[0] == "s":
        signed = values.view(np.dtype(f"i{values.dtype.itemsize}"))
        return signed.astype(np.dtype(f"i{width // 8}")).view(dtype)
    return values.astype(dtype)


@handles("ld", "ldu")
def ld(program: Program, i: Instruction) -> Step:
    type_, nbytes = _type_of(i)
    space = _space_of(i)
    targets = [program.destination(t, i) for t in _vector(i.operands[0])]
    count = len(targets)
    if count not in (1, 2, 4, 8):
        raise PtxError(f"a vector of {count} elements: {i.text}", i.line)
    memory = i.operands[1]
    guard = program.guard(i)
    wide = nbytes == 16
    if wide:
        width, per = 8, 2
    else:
        width, per = nbytes, 1
    total = nbytes * count
    if isinstance(memory, Mem) and isinstance(memory.base, Sym):
        address = program.address_of(Sym(memory.base.name, memory.base.offset + memory.offset), i)
        if space.startswith("param"):
            if address is None:
                raise PtxError(f"{memory.base.name} is not a parameter of this kernel: {i.text}", i.line)
            return _load_parameter(program, i, address, type_, nbytes, targets)
    shared = space.startswith("shared")
    read = program.address(memory, i, shared)
    synchronising = any(p in _SYNCHRONISING for p in i.parts) and not space.startswith(
        ("local", "param", "const")
    )

    def step(c: Convoy) -> int | None:
        where = c.active(guard)
        if where is False:
            return None
        addresses = _addresses(read(c), c, where)
        check_alignment(c, addresses, total)
        machine = c.machine
        parts = spans(c, space, addresses, where)
        for span in parts:
            values = load(c, span, where, width, count * per, synchronising)
            if synchronising and machine.track:
                acquire(c, span, where)
            _count(c, span, "read", total)
            for n, target in enumerate(targets):
                if target is None:
                    continue
                if wide:
                    row = c.rows.Q[target[1]].reshape(-1, 2)
                    lanes = _lanes(c, where, span)
                    row[lanes, 0] = values[2 * n]
                    row[lanes, 1] = values[2 * n + 1]
                    continue
                row = c.rows.of(target[0])[target[1]]
                value = _extend(values[n], type_, target[0])
                if where is None and span.threads is None:
                    row[:] = value
                else:
                    row[_lanes(c, where, span)] = value
        if synchronising:
            if len(machine.ready) or machine.streams or machine.idle_polls:
                return machine.poll(c, c.pc + 1)
            machine.idle_polls += 1
        return None

    return step


def _lanes(c: Convoy, where: NDArray | None, span: Span) -> Any:
    """Index of a span's threads into the convoy's slice."""
    if where is None:
        return slice(None) if span.threads is None else span.threads
    lanes = np.flatnonzero(where)
    return lanes if span.threads is None else lanes[span.threads]


def _addresses(value: Any, c: Convoy, where: NDArray | None) -> NDArray:
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        n = c.shape.hi - c.shape.lo if where is None else int(np.count_nonzero(where))
        number = int(value)
        return np.full(n, number, np.uint64 if number > 0xFFFFFFFF else np.uint32)
    return value if where is None else value[where]


def _load_parameter(
    program: Program,
    i: Instruction,
    address: int,
    type_: str,
    nbytes: int,
    targets: list[tuple[int, int] | None],
) -> Step:
    """Parameters are the same for all threads: the value is known now."""
    start = address - PARAMETER_BASE
    if start < 0 or start + nbytes * len(targets) > len(program.parameter_data):
        raise PtxError(f"reads past the end of the parameters: {i.text}", i.line)
    guard = program.guard(i)
    raw = program.parameter_data[start : start + nbytes * len(targets)].copy()
    constants = []
    for n, target in enumerate(targets):
        if target is None:
            continue
        piece = raw[n * nbytes : (n + 1) * nbytes].view(UINT[nbytes])
        constants.append((target, _extend(piece, type_, target[0])[0]))

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        for (width, index), value in constants:
            row = c.rows.of(width)[index]
            if where is None:
                row[:] = value
            else:
                np.copyto(row, value, where=where)

    return step


@handles("st")
def st(program: Program, i: Instruction) -> Step:
    _, nbytes = _type_of(i)
    space = _space_of(i)
    memory = i.operands[0]
    sources = _vector(i.operands[1])
    count = len(sources)
    guard = program.guard(i)
    total = nbytes * count
    width, per = (8, 2) if nbytes == 16 else (nbytes, 1)
    shared = space.startswith("shared")
    read = program.address(memory, i, shared)
    readers: list[Any] = []
    for source in sources:
        if nbytes == 16:
            if not isinstance(source, Reg) or source.width != 128:
                raise PtxError(f"a b128 store takes a 128-bit register: {i.text}", i.line)
            readers += [_half(source.index, n) for n in range(2)]
        else:
            readers.append(program.reader(source, RAW[max(16, nbytes * 8)], i))
    dtype = UINT[width]
    synchronising = any(p in _SYNCHRONISING for p in i.parts)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        addresses = _addresses(read(c), c, where)
        check_alignment(c, addresses, total)
        values = np.empty((count * per, addresses.size), dtype)
        for n, reader in enumerate(readers):
            value = reader(c)
            if where is not None and isinstance(value, np.ndarray) and value.ndim:
                value = value[where]
            values[n] = value
        for span in spans(c, space, addresses, where):
            if synchronising and c.machine.track:
                publish(c, span, where)
            some = values if span.threads is None else values[:, span.threads]
            store(c, span, where, some, width, count * per, synchronising)
            _count(c, span, "write", total)

    return step


def _half(index: int, n: int) -> Any:
    """Reads 64 bits of a 128-bit register."""
    name = f"S128_64_{n}"
    return lambda c: getattr(c.rows, name)[index]


def _count(c: Convoy, span: Span, what: str, nbytes: int) -> None:
    if span.space == "local":
        return
    per_warp = nbytes * span.addresses.size / len(c.shape.warps)
    for w in c.shape.warps:
        c.machine.counters.add(w, f"{span.space}_{what}_bytes", per_warp)


# ---- Synchronisation through memory -------------------------------------------------------------------------------


def _flags(c: Convoy, span: Span) -> tuple[dict, list[int]]:
    """The table of clocks published at addresses of this span's memory, and the addresses."""
    holder = span.cta.extra if span.space == "shared" else c.cta.cluster.extra
    return holder.setdefault("flags", {}), [int(a) for a, _ in groups(span.addresses)]


def publish(c: Convoy, span: Span, where: NDArray | None) -> None:
    """A releasing (or relaxed, or volatile) write: who reads it may go by it."""
    flags, addresses = _flags(c, span)
    clocks = c.cta.cluster.clocks
    for address in addresses:
        if address not in flags:
            flags[address] = clocks.fresh()
        clocks.release(rows_of(c, where), flags[address])


def acquire(c: Convoy, span: Span, where: NDArray | None) -> None:
    flags, addresses = _flags(c, span)
    for address in addresses:
        if address in flags:
            c.cta.cluster.clocks.acquire(rows_of(c, where), flags[address])


# ---- Atomics ------------------------------------------------------------------------------------------------------


def _combine(op: str, type_: str) -> Callable[[Any, Any, Any], Any]:
    """The new value from (old, operand, second operand), raw elements in and out."""
    size = _BYTES.get(type_) or int(type_[1:]) // 8
    raw = UINT[size]
    if type_ in ("f32", "f64", "f16"):
        number = np.dtype({"f32": np.float32, "f64": np.float64, "f16": np.float16}[type_])

        def floating(old: Any, b: Any, _: Any) -> Any:
            x, y = raw.type(old).view(number), raw.type(b).view(number)
            result = x + y if op == "add" else np.fmin(x, y) if op == "min" else np.fmax(x, y)
            return number.type(result).view(raw)

        return floating
    if type_ in ("bf16", "bf16x2", "f16x2"):
        from .units import arith

        function = arith.resolve(f"{op}.rn.{type_}" if op == "add" else f"{op}.{type_}")
        return lambda old, b, _: function(np.array([old], raw), np.array([b], raw))[0]
    number = np.dtype(f"i{size}") if type_[0] == "s" else raw
    full = (1 << (8 * size)) - 1

    def integer(old: Any, b: Any, third: Any) -> Any:
        x, y = int(raw.type(old).view(number)), int(raw.type(b).view(number))
        if op == "add":
            r = x + y
        elif op == "min":
            r = min(x, y)
        elif op == "max":
            r = max(x, y)
        elif op == "and":
            r = x & y
        elif op == "or":
            r = x | y
        elif op == "xor":
            r = x ^ y
        elif op == "exch":
            r = y
        elif op == "cas":
            r = int(third) if x == y else x
        elif op == "inc":
            r = 0 if x >= y else x + 1
        else:
            r = y if x == 0 or x > y else x - 1
        return raw.type(r & full)

    return integer


@handles("atom", "red")
def atomic(program: Program, i: Instruction) -> Step:
    type_, nbytes = _type_of(i)
    parts = i.parts
    if "async" in parts:
        raise PtxError(f"{i.op} is not supported: {i.text}", i.line)
    op = next(
        (p for p in parts[1:] if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")),
        "",
    )
    if not op or nbytes == 16:
        raise PtxError(f"unknown atomic operation: {i.text}", i.line)
    space = _space_of(i)
    operands = list(i.operands)
    targets: list[tuple[int, int] | None] = []
    if parts[0] == "atom":
        targets = [program.destination(t, i) for t in _vector(operands.pop(0))]
    shared = space.startswith("shared")
    read = program.address(operands[0], i, shared)
    kind = RAW[max(16, nbytes * 8)]
    sources = [program.reader(s, kind, i) for s in _vector(operands[1])]
    third = program.reader(operands[2], kind, i) if op == "cas" else None
    count = len(sources)
    combine = _combine(op, type_)
    guard = program.guard(i)
    raw = UINT[nbytes]
    vectorised = op == "add" and type_ in ("f32", "u32", "s32", "b32", "u64", "s64", "f64")
    floats: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
    number = floats.get(type_, raw)

    def step(c: Convoy) -> int | None:
        where = c.active(guard)
        if where is False:
            return None
        machine = c.machine
        addresses = _addresses(read(c), c, where)
        check_alignment(c, addresses, nbytes * count)
        size = c.shape.hi - c.shape.lo

        def chosen(reader: Any) -> NDArray:
            value = np.broadcast_to(reader(c), size)
            return value if where is None else value[where]

        values = [chosen(s) for s in sources]
        compare = chosen(third) if third is not None else None
        for span in spans(c, space, addresses, where):
            if machine.track:
                acquire(c, span, where)
                publish(c, span, where)
                if span.space == "shared":
                    _touch_atomic(c, span, nbytes * count)
                elif not targets:
                    track_threads(c, span, where, nbytes * count, True, reduce=True)
            where_to = span.addresses
            index = np.arange(addresses.size) if span.threads is None else span.threads
            old = np.empty((count, len(index)), raw)
            distinct = len(where_to) == 1 or len(np.unique(where_to)) == len(where_to)
            memory = span.cta.shared if span.space == "shared" else machine.memory
            if span.space == "local":
                raise Fault("bounds", "an atomic operation on local memory.")
            if distinct and vectorised:
                old = memory.load(where_to, nbytes, count)
                new = np.stack([v[index].astype(raw).view(number) for v in values])
                memory.store(where_to, (old.view(number) + new).view(raw), nbytes, count)
            else:
                for k, lane in enumerate(index):
                    one = where_to[k : k + 1]
                    before = memory.load(one, nbytes, count)
                    after = np.empty_like(before)
                    for n in range(count):
                        other = compare[lane] if compare is not None else None
                        after[n, 0] = combine(
                            before[n, 0],
                            raw.type(values[n][lane] & raw.type(-1 & ((1 << 8 * nbytes) - 1))),
                            other,
                        )
                    memory.store(one, after, nbytes, count)
                    old[:, k] = before[:, 0]
            _count(c, span, "write", nbytes * count)
            for n, target in enumerate(targets):
                if target is not None:
                    row = c.rows.of(target[0])[target[1]]
                    row[_lanes(c, where, span)] = old[n]
        if targets and op in ("cas", "exch", "add", "or", "and"):
            return machine.poll(c, c.pc + 1) if op == "cas" else None
        machine.idle_polls = 0
        return None

    return step


def _touch_atomic(c: Convoy, span: Span, nbytes: int) -> None:
    """Atomics don't race with each other; they do initialise."""
    if span.cta.shadow is not None:
        span.cta.shared.check(span.addresses, nbytes)
        cells = cells_of(span.addresses, nbytes)
        fresh = span.cta.shadow.unwritten(cells)
        if fresh.any() and "uninitialised" in c.machine.checks:
            cell = int(cells[int(np.argmax(fresh))])
            c.machine.finding(
                "uninitialised", f"updates shared+{cell * 4:#x} of {span.cta}, which nobody has written.", c
            )
        span.cta.shadow.write_pc[cells] = c.pc


# ---- Addresses of other CTAs --------------------------------------------------------------------------------------


@handles("mapa")
def mapa(program: Program, i: Instruction) -> Step:
    target = program.destination(i.operands[0], i)
    shared = "shared::cluster" in i.parts
    wide = i.parts[-1] == "u64"
    kind = "D" if wide else "W"
    read = program.reader(i.operands[1], kind, i)
    rank_of = program.reader(i.operands[2], "W", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False or target is None:
            return
        address = np.asarray(read(c)).astype(np.uint64)
        rank = np.asarray(rank_of(c)).astype(np.uint64)
        # A rank that the cluster does not have makes an address that must not be used; making it is no fault.
        offset = address & np.uint64(0xFFFFFF)
        result = offset | (rank & np.uint64(0xFF)) << np.uint64(24)
        if not shared:
            result = result + np.uint64(SHARED_WINDOW)
        row = c.rows.of(target[0])[target[1]]
        np.copyto(row, result.astype(row.dtype), where=True if where is None else where)

    return step


@handles("getctarank")
def getctarank(program: Program, i: Instruction) -> Step:
    target = program.destination(i.operands[0], i)
    read = program.reader(i.operands[1], "D" if i.parts[-1] == "u64" else "W", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False or target is None:
            return
        rank = (np.asarray(read(c)).astype(np.uint64) >> np.uint64(24)) & np.uint64(0xFF)
        np.copyto(c.rows.W[target[1]], rank.astype(np.uint32), where=True if where is None else where)

    return step


@handles("isspacep")
def isspacep(program: Program, i: Instruction) -> Step:
    space = i.parts[1]
    if space not in ("shared", "shared::cta", "shared::cluster", "local", "global", "const"):
        raise PtxError(f"isspacep of state space {space} is not supported: {i.text}", i.line)
    target = program.destination(i.operands[0], i)
    read = program.reader(i.operands[1], "D", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        where = c.active(guard)
        if where is False or target is None:
            return
        a = np.asarray(read(c))
        if space.startswith("shared"):
            result = a >= np.uint64(SHARED_WINDOW)
            if space != "shared::cluster":
                result = result & (((a >> np.uint64(24)) & np.uint64(0xFF)) == np.uint64(c.cta.rank))
        elif space == "local":
            result = (a >= np.uint64(LOCAL_WINDOW)) & (a < np.uint64(SHARED_WINDOW))
        elif space == "global":
            result = a < np.uint64(LOCAL_WINDOW)
        else:
            result = np.zeros(a.shape, np.bool_)
        np.copyto(c.rows.P[target[1]], result, where=True if where is None else where)

    return step


# ---- ldmatrix, stmatrix -------------------------------------------------------------------------------------------


@handles("ldmatrix", "stmatrix")
def matrix_access(program: Program, i: Instruction) -> Step:
    parts = i.parts
    loading = parts[0] == "ldmatrix"
    shape = next((p for p in parts if p.startswith("m") and p[1:2].isdigit()), "")
    number = int(next((p for p in parts if p in ("x1", "x2", "x4")), "x1")[1:])
    trans = "trans" in parts
    try:
        address_lane, byte = layouts.ldmatrix(shape, number, trans, store=not loading)
    except (KeyError, ValueError, NotImplementedError) as error:
        raise PtxError(f"unknown matrix shape: {i.text} ({error})", i.line) from None
    memory, vector = (i.operands[1], i.operands[0]) if loading else (i.operands[0], i.operands[1])
    items = _vector(vector)
    registers = address_lane.shape[1]
    if len(items) != registers:
        raise PtxError(f"{i.op} takes {registers} registers, not {len(items)}: {i.text}", i.line)
    read = program.address(memory, i, True)
    space = _space_of(i)
    element = 4 // address_lane.shape[2]  # bytes
    rows_needed = sorted(set(address_lane.reshape(-1).tolist()))
    guard = program.guard(i)
    targets = [program.destination(t, i) for t in items] if loading else []
    sources = [] if loading else [program.reader(s, "W", i) for s in items]
    dtype = UINT[element]

    def step(c: Convoy) -> int | None:
        if c.active(guard) is False:
            return None
        if not c.shape.full:
            return gather(c, FULL)
        warps = len(c.shape.warps)
        value = np.broadcast_to(read(c), c.shape.hi - c.shape.lo)
        value = value if c.mask is None else value[c.mask]
        if value.dtype == np.uint64:
            value = value.astype(np.uint32)
        rank = int(value[0]) >> 24
        cta = c.cta.cluster.ctas[rank] if rank < len(c.cta.cluster.ctas) else c.cta
        if space != "shared::cluster" and cta is not c.cta:
            raise Fault("bounds", f"a shared::cta access got an address of CTA rank {rank}.")
        base = (value & 0xFFFFFF).astype(np.int64).reshape(warps, 32)
        check_alignment(c, base[:, rows_needed].reshape(-1), 16)
        offsets = base[:, address_lane] + byte  # [warps, 32, registers, elements]
        flat = offsets.reshape(-1)
        cta.shared.check(flat, element)
        if c.machine.track:
            span = Span("shared", cta, flat, None)
            _track_matrix(c, span, offsets, not loading)
        if loading:
            elements = cta.shared.load(flat, element)[0].reshape(offsets.shape)
            words = np.ascontiguousarray(elements).view(np.uint32)[..., 0]  # [warps, 32, registers]
            for n, target in enumerate(targets):
                if target is not None:
                    row = c.rows.W[target[1]]
                    if c.mask is None:
                        row[:] = words[:, :, n].reshape(-1)
                    else:
                        row[c.mask] = words[:, :, n].reshape(-1)
        else:
            words = np.empty((warps, 32, registers), np.uint32)
            for n, source in enumerate(sources):
                row = np.broadcast_to(source(c), c.shape.hi - c.shape.lo)
                words[:, :, n] = (row if c.mask is None else row[c.mask]).reshape(warps, 32)
            elements = words[..., None].view(dtype).reshape(offsets.shape)
            cta.shared.store(flat, elements.reshape(1, -1), element)
            c.machine.idle_polls = 0
        for w in c.shape.warps:
            kind = "shared_read_bytes" if loading else "shared_write_bytes"
            c.machine.counters.add(w, kind, 128 * registers)
        return None

    return step


def _track_matrix(c: Convoy, span: Span, offsets: NDArray, write: bool) -> None:
    shadow = span.cta.shadow
    if shadow is None:
        return
    rows = np.repeat(np.array(c.shape.warp_rows), offsets[0].size)
    cells = span.addresses >> 2
    machine = c.machine
    if not write and "uninitialised" in machine.checks:
        fresh = shadow.unwritten(cells)
        if fresh.any():
            cell = int(cells[int(np.argmax(fresh))])
            machine.finding(
                "uninitialised", f"reads shared+{cell * 4:#x} of {span.cta}, which nobody has written.", c
            )
    if not machine.races:
        if write:
            shadow.write_pc[cells] = c.pc
        return
    if write:
        report_conflict(c, shadow.warp_write(cells, rows, c.pc), "shared", span.cta, 4, "writes")
    else:
        report_conflict(c, shadow.warp_read(cells, rows, c.pc), "shared", span.cta, 4, "reads")
