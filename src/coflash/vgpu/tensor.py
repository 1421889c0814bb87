"""Matrix instructions: mma.sync, wgmma, and tcgen05 with its tensor memory."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import _vector
from .clocks import GENERIC, TENSOR, Shadow
from .control import gather
from .copies import Agent, _shared_address, _value, snapshot, threads_of
from .decode import Program, handles
from .machine import FULL, STOP, Convoy, Cta, Fault, Fragment, Operation, Step, Warp
from .ptx import Imm, Instruction, Mem, Operand, PtxError, Reg, Vec
from .sync import async_mbarrier, report_conflict, shared_place
from .units import arith, descriptors, layouts, tmem

ELEMENT = descriptors.ELEMENT_BITS
LANES, COLUMNS, GRANULE = 128, 512, 16
"""Tensor memory; its shadow has one cell for 16 lanes of a column."""


def _registers(
    program: Program, operand: Operand, i: Instruction, count: int | None = None
) -> NDArray[np.intp]:
    """The numbers of the 32-bit registers in a vector operand."""
    numbers = []
    for item in _vector(operand):
        if not isinstance(item, Reg) or item.width != 32:
            raise PtxError(f"{i.op} takes 32-bit registers: {i.text[:120]}", i.line)
        numbers.append(item.index)
    if count is not None and len(numbers) != count:
        raise PtxError(f"{i.op} takes {count} registers here, not {len(numbers)}: {i.text[:120]}", i.line)
    return np.array(numbers, np.intp)


def _unpack(words: NDArray[np.uint32], bits: int) -> NDArray:
    """[..., registers] to [..., registers, elements] of an unsigned type, lowest first."""
    if bits == 32:
        return words[..., None]
    return np.ascontiguousarray(words)[..., None].view(np.uint16 if bits == 16 else np.uint8)


# ---- mma.sync -----------------------------------------------------------------------------------------------------


@handles("mma")
def mma_sync(program: Program, i: Instruction) -> Step:
    m = re.match(
        r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)\Z", i.op
    )
    if m is None:
        raise PtxError(f"unknown matrix instruction: {i.text[:160]}", i.line)
    shape, saturate, d_type, a_type, b_type, c_type = m.groups()
    names = {"s32": 32, "f32": 32, "f16": 16}
    bits = ELEMENT.get(a_type)
    if bits is None or b_type not in ELEMENT or d_type not in names or bits < 8:
        raise PtxError(f"unknown matrix types: {i.text[:160]}", i.line)
    a_index = layouts.mma_fragment(shape, "a", bits)
    b_index = layouts.mma_fragment(shape, "b", bits)
    c_index = layouts.mma_fragment(shape, "c", names[c_type])
    d_index = layouts.mma_fragment(shape, "d", names[d_type])
    d_regs = _registers(program, i.operands[0], i, d_index[0].shape[1])
    a_regs = _registers(program, i.operands[1], i, a_index[0].shape[1])
    b_regs = _registers(program, i.operands[2], i, b_index[0].shape[1])
    c_items = _vector(i.operands[3])
    c_readers = [program.reader(item, "W", i) for item in c_items]
    k = int(shape.split("k")[1])
    kind = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}.get(a_type, "f8f6f4")
    multiply = _multiply(kind, bool(saturate), i)
    guard = program.guard(i)

    def step(c: Convoy) -> int | None:
        if c.active(guard) is False:
            return None
        if not c.shape.full:
            return gather(c, FULL)
        file = c.cta.files[32]
        for warp in c.shape.warps:
            lo, hi = warp.index * 32, warp.index * 32 + 32
            a = np.zeros((16, k), np.uint32)
            b = np.zeros((k, 8), np.uint32)
            acc = np.zeros((16, 8), np.uint32)
            a[a_index] = _unpack(file[a_regs, lo:hi].T, bits)
            b[b_index] = _unpack(file[b_regs, lo:hi].T, bits)
            c_words = np.stack(
                [
                    np.broadcast_to(r(c), c.shape.hi - c.shape.lo)[lo - c.shape.lo : hi - c.shape.lo]
                    for r in c_readers
                ],
                1,
            )
            acc[c_index] = _unpack(c_words, names[c_type])
            raw = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
            af, bf = arith.to_float32(a.astype(raw), a_type), arith.to_float32(b.astype(raw), b_type)
            if kind == "i8":
                cf: Any = acc.view(np.int32)
            else:
                cf = arith.to_float32(acc.astype(np.uint16) if c_type == "f16" else acc, c_type)
            d = multiply(af, np.ascontiguousarray(bf.T), cf, kind, d_type)
            _write_fragment(file, d_regs, lo, hi, d, d_index, d_type)
            c.machine.counters.add(warp, "tensor_flops", 2 * 16 * 8 * k)
            warp.kinds.add("mma")
        return None

    return step


def _multiply(kind: str, saturate: bool, i: Instruction) -> Any:
    """The product of a kind; .satfinite is for integers."""
    if not saturate:
        return arith.mma
    if kind != "i8":
        raise PtxError(f".satfinite is for integers: {i.text[:160]}", i.line)
    return lambda a, b, c, kind, d_type: arith.mma_i8_saturating(a, b, c)


def _write_fragment(
    file: NDArray, regs: NDArray, lo: int, hi: int, d: NDArray, index: tuple, d_type: str
) -> None:
    if d_type == "s32":
        words = d.astype(np.int32).view(np.uint32)[index][..., 0]
    elif d_type == "f16":
        words = np.ascontiguousarray(arith.from_float32(d, "f16")[index]).view(np.uint32)[..., 0]
    else:
        words = np.asarray(d, np.float32).view(np.uint32)[index][..., 0]
    file[regs, lo:hi] = words.T


# ---- wgmma --------------------------------------------------------------------------------------------------------


class WgmmaGroup:
    """The wgmma of one warpgroup: what is in flight."""

    __slots__ = ("component", "done", "group", "issued", "key")

    def __init__(self, cta: Cta, group: int):
        self.group = group
        self.key = ("wgmma", cta.index, group)
        self.issued = self.done = 0
        self.component = 0
        if cta.machine.track:
            self.component = cta.cluster.clocks.component(
                ("wgmma", cta.rank, group), f"the wgmma of warps {4 * group} to {4 * group + 3} of {cta}"
            )


class WarpWgmma:
    """What one warp knows of its warpgroup's wgmma: open and committed groups, as (number of the last, steps)."""

    __slots__ = ("committed", "fence_time", "last", "open")

    def __init__(self) -> None:
        self.open: list[int] = []
        self.committed: list[tuple[int, list[int]]] = []
        self.last = 0
        self.fence_time = -1

    def in_flight(self) -> list[int]:
        return [pc for _, pcs in self.committed for pc in pcs] + self.open


def _warp_state(warp: Warp) -> WarpWgmma:
    found = warp.extra.get("wgmma")
    if found is None:
        found = warp.extra["wgmma"] = WarpWgmma()
        warp.cta.extra.setdefault("wgmma_warps", {})[warp.index] = found
    return found


def _group_state(cta: Cta, group: int) -> WgmmaGroup:
    table = cta.extra.setdefault("wgmma", {})
    if group not in table:
        table[group] = WgmmaGroup(cta, group)
    return table[group]


def warpgroups(c: Convoy) -> list[int] | None:
    """The warpgroups of the convoy when they are whole; None after parking what waits for its other warps."""
    members: dict[int, list[Fragment]] = {}
    for f in c.fragments:
        members.setdefault(f.warp.index // 4, []).append(f)
    if all(len(fs) == 4 for fs in members.values()) and c.shape.full:
        return sorted(members)
    if not c.shape.full:
        gather(c, FULL)
        return None
    parked = c.cta.extra.setdefault("warpgroup_parked", {})
    waiters = c.cta.extra.setdefault("warpgroup_waiters", [])
    for group, fragments in members.items():
        place = parked.setdefault((c.pc, group), [])
        place += fragments
        waiters[:] = [w for w in waiters if not (w.pc == c.pc and w.shape.warps[0].index // 4 == group)]
        if len(place) == 4:
            del parked[(c.pc, group)]
            c.machine.ready.append(Convoy(c.cta, c.pc, list(place)))
        else:
            waiters.append(Convoy(c.cta, c.pc, list(place)))
    return None


@handles("wgmma.fence")
def wgmma_fence(program: Program, i: Instruction) -> Step:
    def step(c: Convoy) -> None:
        for warp in c.shape.warps:
            _warp_state(warp).fence_time = c.machine.time

    return step


@handles("wgmma.commit_group")
def wgmma_commit(program: Program, i: Instruction) -> Step:
    def step(c: Convoy) -> None:
        for warp in c.shape.warps:
            state = _warp_state(warp)
            state.committed.append((state.last, state.open))
            state.open = []

    return step


@handles("wgmma.wait_group")
def wgmma_wait(program: Program, i: Instruction) -> Step:
    operand = i.operands[0]
    if not isinstance(operand, Imm):
        raise PtxError(f"wait_group takes a number: {i.text}", i.line)
    keep = operand.value

    def step(c: Convoy) -> None:
        machine = c.machine
        for warp in c.shape.warps:
            state = _warp_state(warp)
            if len(state.committed) <= keep:
                continue
            cut = len(state.committed) - keep
            target = state.committed[cut - 1][0]
            state.committed = state.committed[cut:]
            group = _group_state(c.cta, warp.index // 4)
            while group.done < target:
                machine._complete(group.key)
            if machine.track:
                c.cta.cluster.clocks.observe([warp.row], group.component, target)

    return step


@handles("wgmma.mma_async")
def wgmma_mma(program: Program, i: Instruction) -> Step:
    m = re.match(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\Z", i.op
    )
    if m is None:
        raise PtxError(f"unknown matrix instruction: {i.text[:160]}", i.line)
    n, k = int(m.group(1)), int(m.group(2))
    d_type, a_type, b_type = m.group(4), m.group(5), m.group(6)
    if a_type not in ELEMENT or b_type not in ELEMENT or d_type not in ("f32", "f16", "s32"):
        raise PtxError(f"unknown matrix types: {i.text[:160]}", i.line)
    bits = ELEMENT[a_type]
    if k * bits != 256 or n % 8 or not 8 <= n <= 256:
        raise PtxError(f"no wgmma has the shape m64n{n}k{k} for {a_type}: {i.text[:160]}", i.line)
    d_bits = 16 if d_type == "f16" else 32
    d_index = layouts.wgmma_accumulator(n, d_bits)
    d_regs = _registers(program, i.operands[0], i, d_index[0].shape[1])
    a_operand, b_operand = i.operands[1], i.operands[2]
    a_regs = None
    if isinstance(a_operand, Vec):
        a_regs = _registers(program, a_operand, i, 4)
        a_index = layouts.wgmma_a(bits)
    else:
        a_read = program.reader(a_operand, "D", i)
    b_read = program.reader(b_operand, "D", i)
    scale = program.reader(i.operands[3], "P", i)
    rest = []
    for operand in i.operands[4:]:
        if not isinstance(operand, Imm):
            raise PtxError(f"the last operands of wgmma are literals: {i.text[:160]}", i.line)
        rest.append(operand.value)
    integer = d_type == "s32"
    scale_a, scale_b = (1, 1) if integer else (rest[0], rest[1]) if len(rest) >= 2 else (1, 1)
    trans = rest[2:] if not integer else []
    a_k_major = not (trans[0] if a_regs is None and trans else 0)
    b_k_major = not (trans[-1] if trans else 0)
    if (not a_k_major or not b_k_major) and bits != 16:
        raise PtxError(f"only 16-bit operands can be transposed: {i.text[:160]}", i.line)
    kind = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "s8": "i8", "u8": "i8"}.get(a_type, "f8f6f4")
    multiply = _multiply(kind, m.group(3) is not None, i)
    writers: list[NDArray] = []
    guard = program.guard(i)

    def dirty_steps() -> NDArray:
        """Steps that write the registers of this instruction by other means than wgmma."""
        if not writers:
            mine = {(32, int(r)) for r in d_regs} | (
                {(32, int(r)) for r in a_regs} if a_regs is not None else set()
            )
            found = []
            for s, (first, _, _) in enumerate(program.spans):
                if (
                    not program.kernel.instructions[first].op.startswith("wgmma")
                    and program.touched(s)[1] & mine
                ):
                    found.append(s)
            writers.append(np.array(found, np.intp))
        return writers[0]

    def step(c: Convoy) -> int | None:
        if c.active(guard) is False:
            return None
        groups = warpgroups(c)
        if groups is None:
            return STOP
        machine, cta, pc = c.machine, c.cta, c.pc
        scale_row = np.broadcast_to(scale(c), c.shape.hi - c.shape.lo)
        for group in groups:
            lo = group * 128
            position = lo - c.shape.lo
            state = _group_state(cta, group)
            state.issued += 1
            number = state.issued
            accumulate = bool(scale_row[position])
            try:
                b_desc = descriptors.decode_wgmma(_value(b_read, c, position))
                a_desc = descriptors.decode_wgmma(_value(a_read, c, position)) if a_regs is None else None
            except descriptors.DescriptorError as error:
                raise Fault("descriptors", f"wgmma: {error}.") from None
            first = cta.warps[lo // 32]
            clock = snapshot(first)
            if machine.track and clock is not None:
                # All four warps issue it together: what any of them has fenced counts.
                vc = cta.cluster.clocks.vc
                for w in range(1, 4):
                    np.maximum(clock, vc[:, first.row + w], out=clock)
                clock[:, state.component] = number
            for w in range(4):
                warp = cta.warps[lo // 32 + w]
                warp.kinds.add("mma")
                mine = _warp_state(warp)
                mine.open.append(pc)
                mine.last = number
                _check_fence(c, warp, mine)
                machine.counters.add(warp, "tensor_flops", 2 * 16 * n * k)
            operation = Operation("wgmma", first, pc, lambda: None, f"m64n{n}k{k}")

            def apply(
                lo: int = lo, a_desc: Any = a_desc, b_desc: Any = b_desc, clock: Any = clock, number: int = number,
                accumulate: bool = accumulate, state: WgmmaGroup = state, operation: Operation = operation,
            ) -> None:  # fmt: skip
                file = cta.files[32]
                agent = Agent(operation, clock, state.component, number)
                if a_desc is not None:
                    a = _operand(cta, agent, a_desc, 64, k, a_type, a_k_major)
                else:
                    raw = np.empty((64, k), {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
                    raw[a_index] = _unpack(file[a_regs, lo : lo + 128].T, bits)
                    a = arith.to_float32(raw, a_type)
                b = _operand(cta, agent, b_desc, n, k, b_type, b_k_major)
                if scale_a == -1:
                    a = -a
                if scale_b == -1:
                    b = -b
                acc = None
                if accumulate:
                    words = _unpack(file[d_regs, lo : lo + 128].T, d_bits)
                    acc = np.empty((64, n), words.dtype)
                    acc[d_index] = words
                    acc = acc.view(np.int32) if integer else arith.to_float32(acc, d_type)
                d = multiply(a, b, acc, kind, d_type)
                _write_fragment(file, d_regs, lo, lo + 128, d, d_index, d_type)
                state.done = number

            operation.apply = apply
            machine.queue(state.key, operation)
        return None

    def _check_fence(c: Convoy, warp: Warp, mine: WarpWgmma) -> None:
        last = c.cta.extra.get("last_run")
        if mine.fence_time < 0:
            c.machine.finding(
                "pending_registers",
                "the first wgmma of a warp, and no wgmma.fence before it: it must come first.",
                c,
            )
            return
        if last is None:
            return
        steps = dirty_steps()
        if len(steps) and int(last[steps, warp.index].max()) > mine.fence_time:
            s = int(steps[int(np.argmax(last[steps, warp.index]))])
            c.machine.finding(
                "pending_registers",
                f"wgmma uses registers that were used at {program.words(s)} after the last wgmma.fence: a "
                "wgmma.fence is missing.",
                c,
            )

    return step


def _operand(
    cta: Cta, agent: Agent, d: Any, rows: int, k: int, type_: str, k_major: bool
) -> NDArray[np.float32]:
    """An operand tile from shared memory, as float32 values; marks it as read."""
    machine = cta.machine
    bits = ELEMENT[type_]
    try:
        if machine.track:
            agent.reads(cta, _operand_cells(d, rows, k, bits, k_major))
        raw = descriptors.load_operand(cta.shared.data, d, rows, k, bits, k_major)
    except descriptors.DescriptorError as error:
        raise Fault("descriptors", f"{agent.operation.kind}: {error}.") from None
    except IndexError as error:
        raise Fault(
            "bounds",
            f"{agent.operation.kind}: the operand at shared+{d.start:#x} leaves shared memory ({error}).",
        ) from None
    machine.counters.add(agent.operation.warp, "shared_read_bytes", rows * k * bits // 8)
    return arith.to_float32(raw, type_)


@lru_cache(maxsize=4096)
def _operand_cells(d: Any, rows: int, k: int, bits: int, k_major: bool) -> NDArray[np.int64]:
    chunks = descriptors.operand_chunks(d, rows, k, bits, k_major).astype(np.int64).reshape(-1)
    return ((chunks >> 2)[:, None] + np.arange(4)).reshape(-1)


# ---- Registers that an asynchronous instruction owns --------------------------------------------------------------


def guarded(program: Program, steps: list[Step]) -> list[Step]:
    """Steps that also look whether they touch registers in flight. Only for kernels with wgmma or tcgen05.ld."""
    return [_guard(program, s, step) for s, step in enumerate(steps)]


def _guard(program: Program, s: int, step: Step) -> Step:
    instructions = program.kernel.instructions
    if s >= len(program.spans):
        return step
    op = instructions[program.spans[s][0]].op
    if op.startswith(("wgmma.", "tcgen05.wait")):
        return step
    uses_wgmma = program.uses_wgmma
    conflicts: dict[int, bool] = {}

    def touches(pc: int) -> bool:
        found = conflicts.get(pc)
        if found is None:
            reads, writes = program.touched(s)
            i = instructions[program.spans[pc][0]]
            own = {(r.width, r.index) for r in _vector(i.operands[0]) if isinstance(r, Reg)}
            found = bool((reads | writes) & own)
            if not found and i.op.startswith("wgmma") and isinstance(i.operands[1], Vec):
                found = bool(
                    writes & {(r.width, r.index) for r in _vector(i.operands[1]) if isinstance(r, Reg)}
                )
            conflicts[pc] = found
        return found

    def checked(c: Convoy) -> int | None:
        cta = c.cta
        extra = cta.extra
        if uses_wgmma:
            last = extra.get("last_run")
            if last is None:
                last = extra["last_run"] = np.full((len(program.spans) + 1, cta.warp_count), -1, np.int64)
            last[s, c.shape.warp_numbers] = c.machine.time
            states = extra.get("wgmma_warps")
            if states:
                for w in c.shape.warps:
                    state = states.get(w.index)
                    if state is not None and (state.open or state.committed):
                        for pc in state.in_flight():
                            if touches(pc):
                                c.machine.finding(
                                    "pending_registers",
                                    f"touches registers of the wgmma at {program.words(pc)}, which is still in flight: "
                                    "a wgmma.wait_group is missing before.",
                                    c,
                                )
                                break
        pending = extra.get("loads_pending")
        if pending:
            for w in c.shape.warps:
                loads = pending.get(w.index)
                if loads:
                    for pc in loads:
                        if touches(pc):
                            c.machine.finding(
                                "tensor_load_wait",
                                f"uses registers of the tcgen05.ld at {program.words(pc)} without a tcgen05.wait::ld "
                                "between.",
                                c,
                                pc=pc,
                            )
                            _loads_done(w)
                            break
        return step(c)

    return checked


# ---- Tensor memory ------------------------------------------------------------------------------------------------


class TensorMemory:
    """One CTA's tensor memory: data, who holds which columns, and its shadow."""

    def __init__(self, cta: Cta):
        self.cta = cta
        self.data = np.zeros((LANES, COLUMNS), np.uint32)
        self.owned = np.zeros(COLUMNS, np.bool_)
        self.allocations: dict[int, tuple[int, int]] = {}  # first column -> (columns, step)
        self.permit = True
        self.shadow: Shadow | None = None
        if cta.machine.track:
            self.shadow = Shadow(LANES // GRANULE * COLUMNS, cta.cluster.clocks, tensor=True)
            # Tensor memory may be read where never written only by mistake; nothing clears it at allocation.

    def check(self, at: Any, first: int, count: int, what: str) -> None:
        machine = self.cta.machine
        if first < 0 or first + count > COLUMNS:
            raise Fault(
                "bounds",
                f"{what} touches tensor memory columns {first} to {first + count - 1}: there are {COLUMNS}.",
            )
        if not self.owned[first : first + count].all():
            column = first + int(np.argmin(self.owned[first : first + count]))
            machine.finding(
                "tensor_memory",
                f"{what} touches tensor memory column {column} of {self.cta}, which is not allocated "
                f"(allocated: {self.words()}).",
                at,
            )

    def words(self) -> str:
        if not self.allocations:
            return "nothing"
        return ", ".join(f"columns {a} to {a + n - 1}" for a, (n, _) in sorted(self.allocations.items()))


def tensor_memory(cta: Cta) -> TensorMemory:
    found = cta.extra.get("tensor")
    if found is None:
        found = cta.extra["tensor"] = TensorMemory(cta)
    return found


def cta_group(i: Instruction) -> int:
    for part in i.parts:
        if part.startswith("cta_group::"):
            return int(part[-1])
    raise PtxError(f"{i.op} needs a cta_group: {i.text[:120]}", i.line)


@handles("tcgen05.alloc")
def tensor_alloc(program: Program, i: Instruction) -> Step:
    read = program.address(i.operands[0], i, True)
    columns_of = program.reader(i.operands[1], "W", i)
    cta_group(i)

    def step(c: Convoy) -> int | None:
        if not c.shape.full:
            return gather(c, FULL)
        machine, cta = c.machine, c.cta
        memory = tensor_memory(cta)
        if len(c.fragments) > 1:
            return machine.regroup(c, lambda f: f.warp.index)
        count = _value(columns_of, c, 0)
        if count not in (32, 64, 128, 256, 512):
            raise Fault(
                "tensor_memory",
                f"tcgen05.alloc of {count} columns: it must be a power of two from 32 to 512.",
            )
        if not memory.permit:
            machine.finding("tensor_memory", "tcgen05.alloc after tcgen05.relinquish_alloc_permit.", c)
        start = next(
            (s for s in range(0, COLUMNS - count + 1, 32) if not memory.owned[s : s + count].any()), None
        )
        if start is None:
            cta.extra.setdefault("tensor_alloc_waiters", []).append(c)
            return STOP
        memory.owned[start : start + count] = True
        memory.allocations[start] = (count, c.pc)
        place, offset = shared_place(cta, _shared_address(_value(read, c, 0)), True, c)
        place.shared.store(np.array([offset]), np.array([[start]], np.uint32), 4)
        row = c.shape.warp_rows[0]
        if place.shadow is not None:
            if machine.races:
                conflict = place.shadow.warp_write(np.array([offset // 4]), np.array([row]), c.pc)
                report_conflict(c, conflict, "shared", place, 4)
            else:
                place.shadow.write_pc[offset // 4] = c.pc
        machine.event(c, "tensor memory", f"alloc {count} columns at {start}")
        return None

    return step


@handles("tcgen05.dealloc")
def tensor_dealloc(program: Program, i: Instruction) -> Step:
    read = program.reader(i.operands[0], "W", i)
    columns_of = program.reader(i.operands[1], "W", i)

    def step(c: Convoy) -> int | None:
        if not c.shape.full:
            return gather(c, FULL)
        machine, cta = c.machine, c.cta
        memory = tensor_memory(cta)
        start, count = _value(read, c, 0) & 0xFFFF, _value(columns_of, c, 0)
        held = memory.allocations.get(start)
        if held is None or held[0] != count:
            machine.finding(
                "tensor_memory",
                f"tcgen05.dealloc of {count} columns at {start}, which is no allocation (allocated: {memory.words()}).",
                c,
            )
            return None
        shadow = memory.shadow
        if shadow is not None and machine.races:
            # Everything done to these columns must be over, and known to be.
            lanes = np.arange(LANES // GRANULE)[:, None] * COLUMNS
            cells = (lanes + np.arange(start, start + count)).reshape(-1)
            rows = np.full(len(cells), c.shape.warp_rows[0])
            saved = shadow.writer[cells], shadow.write_time[cells], shadow.write_pc[cells]
            conflict = shadow.warp_write(cells, rows, c.pc)
            shadow.writer[cells], shadow.write_time[cells], shadow.write_pc[cells] = saved
            report_conflict(c, conflict, "tensor", cta, 1, "frees")
            shadow.write_pc[cells] = -1
            shadow.write_time[cells] = 0
            shadow.read_time[:, cells] = 0
        memory.owned[start : start + count] = False
        del memory.allocations[start]
        machine.event(c, "tensor memory", f"dealloc {count} columns at {start}")
        waiters = cta.extra.pop("tensor_alloc_waiters", [])
        if waiters:
            machine.wake(waiters)
        return None

    return step


@handles("tcgen05.relinquish_alloc_permit")
def tensor_relinquish(program: Program, i: Instruction) -> Step:
    def step(c: Convoy) -> None:
        tensor_memory(c.cta).permit = False

    return step


# ---- tcgen05.ld, st, wait -----------------------------------------------------------------------------------------


class WarpTensor:
    """The tcgen05.ld and st of one warp."""

    __slots__ = ("component_ld", "component_st", "key", "loads", "pending", "st_done", "stores")

    def __init__(self, warp: Warp):
        self.key = ("tcgen05.st", warp.cta.index, warp.index)
        self.loads = self.stores = self.st_done = 0
        self.component_ld = self.component_st = 0
        self.pending: list[int] = []
        if warp.cta.machine.track:
            clocks = warp.cta.cluster.clocks
            self.component_ld = clocks.component(
                ("tld", warp.row), f"the tcgen05.ld of {warp} of {warp.cta}", True
            )
            self.component_st = clocks.component(
                ("tst", warp.row), f"the tcgen05.st of {warp} of {warp.cta}", True
            )


def _warp_tensor(warp: Warp) -> WarpTensor:
    found = warp.extra.get("tensor")
    if found is None:
        found = warp.extra["tensor"] = WarpTensor(warp)
        warp.cta.extra.setdefault("loads_pending", {})[warp.index] = found.pending
    return found


def _loads_done(warp: Warp) -> None:
    state = _warp_tensor(warp)
    state.pending.clear()
    if warp.cta.machine.track:
        warp.cta.cluster.clocks.observe([warp.row], state.component_ld, state.loads)


@lru_cache(maxsize=1024)
def _cells(shape: str, number: int, split: int, packed: bool, lane: int, column: int) -> NDArray[np.int64]:
    lanes, columns = tmem.ldst(shape, number, split, packed)
    return np.unique((lanes + lane) // GRANULE * COLUMNS + columns + column)


@handles("tcgen05.ld", "tcgen05.st")
def tensor_access(program: Program, i: Instruction) -> Step:
    parts = i.parts
    loading = parts[1] == "ld"
    shape = next((p for p in parts if re.match(r"\d+x\d+b(x2)?\Z", p)), "")
    number = next((int(p[1:]) for p in parts if re.match(r"x\d+\Z", p)), 0)
    packed = any(p in ("pack::16b", "unpack::16b") for p in parts)
    if "red" in parts or not shape or not number:
        raise PtxError(f"unknown tensor memory access: {i.text[:160]}", i.line)
    memory_operand, vector = (i.operands[1], i.operands[0]) if loading else (i.operands[0], i.operands[-1])
    split = 0
    if shape == "16x32bx2":
        offset = i.operands[2] if loading else i.operands[1]
        if not isinstance(offset, Imm):
            raise PtxError(f"the half split offset is a literal: {i.text[:160]}", i.line)
        split = offset.value
    try:
        lane_index, column_index = tmem.ldst(shape, number, split, packed)
    except (ValueError, KeyError) as error:
        raise PtxError(f"unknown tensor memory access: {i.text[:160]} ({error})", i.line) from None
    regs = _registers(program, vector, i, lane_index.shape[1])
    read = program.address(memory_operand, i, True)
    plain = shape == "32x32b" and not packed
    width = int(column_index.max()) + 1
    narrow = shape != "32x32b"
    amount = 32 * len(regs) * 4

    def step(c: Convoy) -> int | None:
        if not c.shape.full:
            return gather(c, FULL)
        machine, cta = c.machine, c.cta
        memory = tensor_memory(cta)
        file = cta.files[32]
        addresses = read(c)
        for f in c.fragments:
            warp = f.warp
            lo = warp.index * 32
            address = (
                int(addresses[lo - c.shape.lo])
                if isinstance(addresses, np.ndarray) and addresses.ndim
                else int(addresses)
            )
            lane, column = address >> 16, address & 0xFFFF
            quarter = 32 * (warp.index % 4)
            if lane != quarter and not (narrow and lane == quarter + 16):
                machine.finding(
                    "tensor_memory",
                    f"warp {warp.index} accesses tensor memory lane {lane}; it can reach lanes {quarter} to "
                    f"{quarter + 31} only.",
                    c,
                )
                if lane + 32 > LANES:
                    raise Fault("bounds", f"tensor memory lane {lane} and up: there are {LANES}.")
            memory.check(c, column, width, i.op.split(".sync")[0])
            state = _warp_tensor(warp)
            warp.kinds.add("tensor memory")
            if loading:
                state.loads += 1
                if memory.shadow is not None:
                    cells = _cells(shape, number, split, packed, lane, column)
                    _track_load(c, memory, cells, warp, state)
                block: NDArray[Any]
                if plain:
                    block = memory.data[lane : lane + 32, column : column + width]
                else:
                    block = memory.data[lane_index + lane, column_index + column]
                    if packed:
                        block = (block[..., 0] & 0xFFFF) | block[..., 1] << 16
                file[regs, lo : lo + 32] = block.T
                state.pending.append(c.pc)
                machine.counters.add(warp, "tensor_read_bytes", amount)
            else:
                _queue_store(c, warp, state, memory, file[regs, lo : lo + 32].T.copy(), lane, column)
                machine.counters.add(warp, "tensor_write_bytes", amount)
        return None

    def _track_load(c: Convoy, memory: TensorMemory, cells: NDArray, warp: Warp, state: WarpTensor) -> None:
        shadow = memory.shadow
        assert shadow is not None
        machine = c.machine
        if "uninitialised" in machine.checks:
            fresh = shadow.unwritten(cells)
            if fresh.any():
                cell = int(cells[int(np.argmax(fresh))])
                machine.finding(
                    "uninitialised",
                    f"reads tensor memory lanes {cell // COLUMNS * GRANULE}.., column {cell % COLUMNS} of {c.cta}, "
                    "which nobody has written.",
                    c,
                )
        if machine.races:
            clock = tensor_snapshot(warp)
            conflict = shadow.async_read(cells, clock, state.component_ld, state.loads, c.pc)
            report_conflict(c, conflict, "tensor", c.cta, 1, "reads")

    def _queue_store(
        c: Convoy,
        warp: Warp,
        state: WarpTensor,
        memory: TensorMemory,
        values: NDArray,
        lane: int,
        column: int,
    ) -> None:
        state.stores += 1
        number_ = state.stores
        clock = tensor_snapshot(warp)
        if clock is not None:
            clock[:, state.component_st] = number_

        def apply() -> None:
            if memory.shadow is not None:
                agent = Agent(operation, clock, state.component_st, number_)
                agent.writes(
                    memory.cta, _cells(shape, number, split, packed, lane, column), memory.shadow, "tensor"
                )
            if plain:
                memory.data[lane : lane + 32, column : column + width] = values
            elif packed:
                memory.data[lane_index[..., 0] + lane, column_index[..., 0] + column] = values & 0xFFFF
                memory.data[lane_index[..., 1] + lane, column_index[..., 1] + column] = values >> 16
            else:
                memory.data[lane_index + lane, column_index + column] = values
            state.st_done = number_

        operation = Operation("tcgen05.st", warp, c.pc, apply, f"lane {lane}, column {column}")
        c.machine.queue(state.key, operation)

    return step


@handles("tcgen05.wait::ld", "tcgen05.wait::st")
def tensor_wait(program: Program, i: Instruction) -> Step:
    loads = "wait::ld" in i.parts

    def step(c: Convoy) -> None:
        machine = c.machine
        for warp in c.shape.warps:
            if loads:
                _loads_done(warp)
                continue
            state = _warp_tensor(warp)
            while state.st_done < state.stores:
                machine._complete(state.key)
            if machine.track:
                c.cta.cluster.clocks.observe([warp.row], state.component_st, state.stores)

    return step


@handles("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def tensor_fence(program: Program, i: Instruction) -> Step:
    after = "fence::after_thread_sync" in i.parts

    def step(c: Convoy) -> None:
        if not c.machine.track:
            return
        for warp in c.shape.warps:
            state, clocks = _warp_tensor(warp), c.cta.cluster.clocks
            clocks.tensor_fence(warp.row, after, [state.component_ld, state.component_st])
            if after and "to acquire" in warp.extra:
                clocks.acquire_tensor(warp.row, warp.extra["to acquire"])

    return step


def tensor_snapshot(warp: Warp) -> Any:
    """The clock of a tcgen05 operation: a warp's own accesses need no fence for itself."""
    clock = snapshot(warp)
    if clock is not None:
        state = _warp_tensor(warp)
        own = [state.component_ld, state.component_st]
        clock[TENSOR, own] = clock[GENERIC, own]
    return clock


# ---- The tcgen05 pipe: mma, cp, shift, commit ---------------------------------------------------------------------


class Pipe:
    """The tcgen05 operations that the threads of one CTA issue, which take effect in order."""

    __slots__ = ("component", "done", "issued", "key")

    def __init__(self, cta: Cta):
        self.key = ("tcgen05", cta.index)
        self.issued = self.done = 0
        self.component = 0
        if cta.machine.track:
            self.component = cta.cluster.clocks.component(
                ("tcgen05", cta.rank), f"the tensor cores (tcgen05) of {cta}", True
            )


def pipe_of(cta: Cta) -> Pipe:
    found = cta.extra.get("pipe")
    if found is None:
        found = cta.extra["pipe"] = Pipe(cta)
    return found


def _pipe_queue(c: Convoy, warp: Warp, kind: str, label: str, run: Any) -> None:
    """Queue an operation of the tensor pipe; `run(agent)` does it."""
    pipe = pipe_of(c.cta)
    pipe.issued += 1
    number = pipe.issued
    clock = tensor_snapshot(warp)
    if clock is not None:
        clock[:, pipe.component] = number

    def apply() -> None:
        run(Agent(operation, clock, pipe.component, number))
        pipe.done = number

    operation = Operation(kind, warp, c.pc, apply, label)
    c.machine.queue(pipe.key, operation)


def pair_of(cta: Cta, group: int) -> list[Cta]:
    if group == 1:
        return [cta]
    ctas = cta.cluster.ctas
    base = cta.rank & ~1
    if base + 1 >= len(ctas):
        raise Fault("barriers", "a cta_group::2 instruction in a cluster without CTA pairs.")
    return [ctas[base], ctas[base + 1]]


@lru_cache(maxsize=256)
def _accumulator(m: int, n: int, group: int, ws: bool) -> tuple[Any, ...]:
    """Per rank of the pair: (row, col) of the elements it holds and (lane, column) where; and cells without bases."""
    rank, lane, column = tmem.accumulator(m, n, group, ws)
    result = []
    for r in range(group):
        i, j = np.nonzero(rank == r)
        lanes, columns = lane[i, j], column[i, j]
        dense = None
        if len(np.unique(i)) * len(np.unique(j)) == len(i):
            rows = np.unique(i)
            # Whole rows, one per lane, columns in order: moved as a block.
            if (lanes == lane[i, 0]).all() and (columns == j).all() and len(np.unique(j)) == n:
                dense = rows, lane[rows, 0]
        cells = np.unique(lanes // GRANULE * COLUMNS + columns)
        result.append((i, j, lanes, columns, dense, cells, int(columns.max()) + 1 if len(columns) else 0))
    return tuple(result)


@handles("tcgen05.mma")
def tensor_mma(program: Program, i: Instruction) -> Step:
    parts = i.parts
    group = cta_group(i)
    kind = next((p.split("::")[1] for p in parts if p.startswith("kind::")), "")
    ws = "ws" in parts
    known = all(p == "ws" or p.startswith(("cta_group::", "kind::", "collector::")) for p in parts[2:])
    if kind not in ("f16", "tf32", "f8f6f4", "i8") or not known:
        raise PtxError(f"tcgen05.mma of this kind is not modelled: {i.text[:160]}", i.line)
    operands = list(i.operands)
    d_read = program.address(operands[0], i, True)
    a_in_tensor = isinstance(operands[1], Mem)
    a_read = program.address(operands[1], i, True) if a_in_tensor else program.reader(operands[1], "D", i)
    b_read = program.reader(operands[2], "D", i)
    idesc_read = program.reader(operands[3], "W", i)
    rest = operands[4:]
    disable: list[Any] = []
    if rest and isinstance(rest[0], Vec):
        disable = [program.reader(x, "W", i) for x in rest[0].items]
        rest = rest[1:]
    accumulate_of = program.reader(rest[0], "P", i)
    scale = 0
    if len(rest) > 1 and not ws:
        if not isinstance(rest[1], Imm):
            raise PtxError(f"scale-input-d is a literal: {i.text[:160]}", i.line)
        scale = rest[1].value
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        machine, cta = c.machine, c.cta
        for warp, _, position in threads_of(c, guard):
            warp.kinds.add("mma")
            try:
                idesc = descriptors.decode_instruction(_value(idesc_read, c, position), kind, group, ws)
                b_desc = descriptors.decode_tcgen05(_value(b_read, c, position))
                a_desc = None if a_in_tensor else descriptors.decode_tcgen05(_value(a_read, c, position))
            except descriptors.DescriptorError as error:
                raise Fault("descriptors", f"tcgen05.mma: {error}.") from None
            if idesc.sparse:
                raise Fault(
                    "descriptors",
                    "tcgen05.mma: the instruction descriptor says sparse, the instruction does not.",
                )
            masks = [_value(r, c, position) for r in disable]
            accumulate = bool(_value(accumulate_of, c, position))
            d_address = _value(d_read, c, position)
            a_address = _value(a_read, c, position) if a_in_tensor else 0
            ctas = pair_of(cta, group)

            def run(
                agent: Agent, idesc: Any = idesc, a_desc: Any = a_desc, b_desc: Any = b_desc, masks: list[int] = masks,
                accumulate: bool = accumulate, d_address: int = d_address, a_address: int = a_address,
                ctas: list[Cta] = ctas,
            ) -> None:  # fmt: skip
                _mma(
                    agent,
                    ctas,
                    idesc,
                    a_desc,
                    b_desc,
                    a_address,
                    d_address,
                    accumulate,
                    masks,
                    scale,
                    group,
                    ws,
                )

            machine.counters.add(warp, "tensor_flops", 2 * idesc.m * idesc.n * idesc.k)
            _pipe_queue(c, warp, "tcgen05.mma", f"{idesc.m}x{idesc.n}x{idesc.k}", run)

    return step


def _mma(
    agent: Agent, ctas: list[Cta], idesc: Any, a_desc: Any, b_desc: Any, a_address: int, d_address: int,
    accumulate: bool, masks: list[int], scale: int, group: int, ws: bool,
) -> None:  # fmt: skip
    m, n, k = idesc.m, idesc.n, idesc.k
    machine = ctas[0].machine
    integer = idesc.d_type == "s32"
    # B: all of N from one CTA, or half from each of a pair.
    pieces = [_operand(cta, agent, b_desc, n // group, k, idesc.b_type, idesc.b_k_major) for cta in ctas]
    b = pieces[0] if group == 1 else np.concatenate(pieces)
    if a_desc is not None:
        pieces = [_operand(cta, agent, a_desc, m // group, k, idesc.a_type, idesc.a_k_major) for cta in ctas]
        copies = [pieces[0] if group == 1 else np.concatenate(pieces)]
    else:
        copies = _a_from_tensor(agent, ctas, idesc, a_address, group, ws)
    if idesc.negate_a:
        copies = [-a for a in copies]
    if idesc.negate_b:
        b = -b
    places = _accumulator(m, n, group, ws)
    lane0, column0 = d_address >> 16, d_address & 0xFFFF
    acc: NDArray | None = None
    memories = [tensor_memory(cta) for cta in ctas]
    for memory, (_, _, _, _, _, cells, width) in zip(memories, places, strict=True):
        memory.check(agent.operation, column0, width, "the accumulator of tcgen05.mma")
        if memory.shadow is not None:
            shifted = cells + column0 + lane0 // GRANULE * COLUMNS
            if accumulate:
                agent.reads(memory.cta, shifted, memory.shadow, "tensor")
            agent.writes(memory.cta, shifted, memory.shadow, "tensor")
    if accumulate:
        raw = np.empty((m, n), np.uint32)
        for memory, (i, j, lanes, columns, dense, _, _) in zip(memories, places, strict=True):
            if dense is not None:
                raw[dense[0]] = memory.data[dense[1] + lane0, column0 : column0 + n]
            else:
                raw[i, j] = memory.data[lanes + lane0, columns + column0]
        if integer:
            acc = raw.view(np.int32)
        else:
            acc = (
                raw.view(np.float32)
                if idesc.d_type == "f32"
                else arith.to_float32(raw.astype(np.uint16), "f16")
            )
            if scale:
                acc = acc * np.float32(2.0**-scale)
    if len(copies) == 1:
        d = _product(copies[0], b, acc, idesc)
    else:
        part = n // len(copies)
        d = np.concatenate(
            [
                _product(
                    a,
                    b[x * part : (x + 1) * part],
                    None if acc is None else acc[:, x * part : (x + 1) * part],
                    idesc,
                )
                for x, a in enumerate(copies)
            ],
            axis=1,
        )
    if integer:
        raw = d.astype(np.int32).view(np.uint32)
    elif idesc.d_type == "f16":
        raw = arith.from_float32(d, "f16").astype(np.uint32)
    else:
        raw = np.ascontiguousarray(d, np.float32).view(np.uint32)
    keep = None
    if masks and any(masks):
        keep = np.concatenate(
            [
                ~np.unpackbits(np.array([x], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
                for x in masks
            ]
        )
    for r, (memory, (i, j, lanes, columns, dense, _, _)) in enumerate(zip(memories, places, strict=True)):
        if keep is not None:
            mine = keep[128 * r : 128 * r + 128] if len(keep) > 128 else keep
            chosen = mine[np.minimum(lanes + lane0, len(mine) - 1)]
            memory.data[lanes[chosen] + lane0, columns[chosen] + column0] = raw[i[chosen], j[chosen]]
        elif dense is not None:
            memory.data[dense[1] + lane0, column0 : column0 + n] = raw[dense[0]]
        else:
            memory.data[lanes + lane0, columns + column0] = raw[i, j]
    machine.idle_polls = 0


def _product(a: NDArray, b: NDArray, acc: NDArray | None, idesc: Any) -> NDArray:
    if idesc.kind == "i8" and idesc.saturate:
        return arith.mma_i8_saturating(a, b, acc)
    return arith.mma(a, b, acc, idesc.kind, idesc.d_type)


def _a_from_tensor(
    agent: Agent, ctas: list[Cta], idesc: Any, address: int, group: int, ws: bool
) -> list[NDArray]:
    ranks, lanes = tmem.a_operand(idesc.m, group, ws)
    lane0, column0 = address >> 16, address & 0xFFFF
    bits = idesc.a_bits if idesc.kind != "f8f6f4" else 8
    words = idesc.k * bits // 32
    if bits == 32:
        dtype: Any = np.uint32
    else:
        dtype = np.uint16 if bits == 16 else np.uint8
    result = []
    for copy in range(len(ranks)):
        raw = np.empty((idesc.m, words), np.uint32)
        for r, cta in enumerate(ctas):
            rows = np.flatnonzero(ranks[copy] == r)
            if not len(rows):
                continue
            memory = tensor_memory(cta)
            memory.check(agent.operation, column0, words, "operand A of tcgen05.mma")
            where = lanes[copy][rows] + lane0
            if memory.shadow is not None:
                granules = np.unique(where // GRANULE)
                cells = (granules[:, None] * COLUMNS + np.arange(column0, column0 + words)).reshape(-1)
                agent.reads(cta, cells, memory.shadow, "tensor")
            raw[rows] = memory.data[where, column0 : column0 + words]
            cta.machine.counters.add(agent.operation.warp, "tensor_read_bytes", len(rows) * words * 4)
        elements = raw.view(dtype).reshape(idesc.m, idesc.k)
        if idesc.a_bits < 8:
            elements = descriptors.unpack_padded(elements.reshape(idesc.m, -1, 16), idesc.a_bits).reshape(
                idesc.m, idesc.k
            )
        result.append(arith.to_float32(elements, idesc.a_type))
    return result


@handles("tcgen05.cp")
def tensor_cp(program: Program, i: Instruction) -> Step:
    parts = i.parts
    group = cta_group(i)
    shape = next((p for p in parts if re.match(r"\d+x\d+b\Z", p)), "")
    multicast = ".".join(p for p in parts if p.startswith("warpx"))
    if any(p.startswith(("b8x16", "b6x16", "b4x16")) for p in parts):
        raise PtxError(f"tcgen05.cp with decompression is not modelled: {i.text[:160]}", i.line)
    try:
        plan = tmem.cp(shape, multicast)
    except ValueError as error:
        raise PtxError(f"unknown tcgen05.cp: {i.text[:160]} ({error})", i.line) from None
    d_read = program.address(i.operands[0], i, True)
    s_read = program.reader(i.operands[1], "D", i)
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        for warp, _, position in threads_of(c, guard):
            address = _value(d_read, c, position)
            try:
                desc = descriptors.decode_tcgen05(_value(s_read, c, position))
            except descriptors.DescriptorError as error:
                raise Fault("descriptors", f"tcgen05.cp: {error}.") from None
            ctas = pair_of(c.cta, group)

            def run(agent: Agent, desc: Any = desc, address: int = address, ctas: list[Cta] = ctas) -> None:
                lane0, column0 = address >> 16, address & 0xFFFF
                for cta in ctas:
                    memory = tensor_memory(cta)
                    memory.check(agent.operation, column0, plan.words, "tcgen05.cp")
                    chunks = descriptors.operand_chunks(desc, plan.rows, 4 * plan.words, 8, True).astype(
                        np.int64
                    )
                    flat = chunks.reshape(-1)
                    cta.shared.check(flat, 16)
                    if cta.shadow is not None:
                        agent.reads(cta, ((flat >> 2)[:, None] + np.arange(4)).reshape(-1))
                        lanes = np.unique((plan.lanes + lane0) // GRANULE)
                        cells = (lanes[:, None] * COLUMNS + np.arange(column0, column0 + plan.words)).reshape(
                            -1
                        )
                        agent.writes(cta, cells, memory.shadow, "tensor")
                    words = cta.shared.data[(flat[:, None] + np.arange(16)).reshape(plan.rows, -1)].view(
                        np.uint32
                    )
                    for copy in range(plan.lanes.shape[1]):
                        memory.data[plan.lanes[:, copy] + lane0, column0 : column0 + plan.words] = words
                    cta.machine.counters.add(
                        agent.operation.warp, "tensor_write_bytes", words.nbytes * plan.lanes.shape[1]
                    )

            warp.kinds.add("mma")
            _pipe_queue(c, warp, "tcgen05.cp", shape, run)

    return step


@handles("tcgen05.shift")
def tensor_shift(program: Program, i: Instruction) -> Step:
    group = cta_group(i)
    if "down" not in i.parts:
        raise PtxError(f"unknown tcgen05.shift: {i.text[:160]}", i.line)
    read = program.address(i.operands[0], i, True)
    guard = program.guard(i)
    source, target = tmem.shift_lanes()

    def step(c: Convoy) -> None:
        for warp, _, position in threads_of(c, guard):
            address = _value(read, c, position)
            ctas = pair_of(c.cta, group)

            def run(agent: Agent, address: int = address, ctas: list[Cta] = ctas) -> None:
                lane0, column0 = address >> 16, address & 0xFFFF
                for cta in ctas:
                    memory = tensor_memory(cta)
                    memory.check(agent.operation, column0, 8, "tcgen05.shift")
                    if memory.shadow is not None:
                        granules = np.arange(lane0 // GRANULE, lane0 // GRANULE + 2)
                        cells = (granules[:, None] * COLUMNS + np.arange(column0, column0 + 8)).reshape(-1)
                        agent.reads(cta, cells, memory.shadow, "tensor")
                        agent.writes(cta, cells, memory.shadow, "tensor")
                    block = memory.data[source + lane0, column0 : column0 + 8].copy()
                    memory.data[target + lane0, column0 : column0 + 8] = block

            _pipe_queue(c, warp, "tcgen05.shift", "down", run)

    return step


@handles("tcgen05.commit")
def tensor_commit(program: Program, i: Instruction) -> Step:
    cta_group(i)  # which CTAs' operations it waits for is the pipe's matter; it must be there
    read = program.address(i.operands[0], i, True)
    multicast = any(p.startswith("multicast") for p in i.parts)
    mask_of = program.reader(i.operands[1], "H", i) if multicast else None
    guard = program.guard(i)

    def step(c: Convoy) -> None:
        machine = c.machine
        for warp, _, position in threads_of(c, guard):
            address = _shared_address(_value(read, c, position))
            target, offset = shared_place(c.cta, address, False, c)
            targets = [target]
            if mask_of is not None:
                mask = _value(mask_of, c, position)
                ctas = c.cta.cluster.ctas
                if mask >> len(ctas):
                    raise Fault(
                        "bounds",
                        f"a multicast mask {mask:#x} names a CTA outside the cluster of {len(ctas)}.",
                    )
                targets = [ctas[r] for r in range(len(ctas)) if mask >> r & 1]
            machine.counters.add(warp, "barriers", 1)
            warp.kinds.add("mma")

            def run(agent: Agent, targets: list[Cta] = targets, offset: int = offset) -> None:
                for cta in targets:
                    barrier = async_mbarrier(cta, offset, agent.operation)
                    if barrier.clock is not None and agent.clock is not None:
                        np.maximum(barrier.clock, agent.clock, out=barrier.clock)
                    barrier.arrivers[-1] = agent.operation.pc
                    barrier.history.setdefault(agent.operation.pc, "a tcgen05.commit")
                    barrier.arrive(1, agent.operation)

            _pipe_queue(c, warp, "tcgen05.commit", f"arrives at shared+{offset:#x}", run)

    return step


# ---- The end ------------------------------------------------------------------------------------------------------


def warp_ended(warp: Warp) -> None:
    state = warp.extra.get("tensor")
    if state is not None:
        while state.st_done < state.stores:
            warp.cta.machine._complete(state.key)
    wg = warp.extra.get("wgmma")
    if wg is not None and (wg.open or wg.committed):
        warp.cta.machine.finding(
            "exit",
            "a warp ends with wgmma in flight: a wgmma.wait_group is missing before the end.",
            warp,
            pc=wg.in_flight()[-1],
        )


def cta_ended(cta: Cta) -> None:
    machine = cta.machine
    for group in cta.extra.get("wgmma", {}).values():
        machine.drain(group.key)
    pipe = cta.extra.get("pipe")
    if pipe is not None and pipe.key in machine.streams:
        operation = machine.streams[pipe.key][0]
        work = [o for o in machine.streams[pipe.key] if o.kind != "tcgen05.commit"]
        if work:
            machine.finding(
                "exit",
                f"{cta} ends while its tensor cores still work ({operation.kind} {operation.label}).",
                operation,
            )
        machine.drain(pipe.key)
    memory = cta.extra.get("tensor")
    if memory is not None and memory.allocations:
        for start, (count, pc) in sorted(memory.allocations.items()):
            machine.finding(
                "tensor_memory",
                f"{cta} ends without freeing the {count} columns of tensor memory at {start}: a tcgen05.dealloc is "
                "missing.",
                cta,
                pc=pc,
            )
