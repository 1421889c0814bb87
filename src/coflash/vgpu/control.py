"""Branches and what the threads of a warp do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import Program, handles
from .machine import FULL, STOP, Convoy, Fragment, Step
from .ptx import Imm, Instruction, Pair, PtxError, Sym


@handles("bra")
def branch(program: Program, i: Instruction) -> Step:
    target_symbol = i.operands[0]
    assert isinstance(target_symbol, Sym)
    target = program.step_of[program.kernel.labels[target_symbol.name]]
    if i.guard is None:
        return lambda c: target
    index, negated = i.guard.index, i.guard.negated
    following = program.step_of[i.index] + 1
    meeting = program.meet_instruction.get(i.index)
    meet = None
    if meeting is not None and meeting < len(program.kernel.instructions):
        meet = program.step_of[meeting]

    def step(c: Convoy) -> int | None:
        p = c.rows.P[index]
        live = p if c.mask is None else p[c.mask]
        count = np.count_nonzero(live)
        if count == (0 if negated else live.size):
            return target
        if count == (live.size if negated else 0):
            return None
        return c.machine.split(c, ~p if negated else p.copy(), target, following, meet)

    return step


@handles("ret", "exit")
def leave(program: Program, i: Instruction) -> Step:
    guard = program.guard(i)

    def step(c: Convoy) -> int | None:
        active = c.active(guard)
        if active is False:
            return None
        if active is None or (c.mask is not None and active is c.mask):
            return c.machine.exit(c, None)
        return c.machine.exit(c, active)

    return step


@handles("trap", "brkpt")
def trap(program: Program, i: Instruction) -> Step:
    from .machine import Fault

    guard = program.guard(i)

    def step(c: Convoy) -> None:
        if c.active(guard) is not False:
            raise Fault("trap", f"the kernel stops itself with {i.text!r}.")

    return step


@handles("nanosleep")
def sleep(program: Program, i: Instruction) -> Step:
    return lambda c: c.machine.poll(c, c.pc + 1)


@handles("griddepcontrol", "pmevent", "prefetch", "prefetchu", "applypriority", "discard", "isspacep.const")
def nothing(program: Program, i: Instruction) -> Step:
    """Hints, and the wait for a grid that ran before: launches run one after the other."""
    return lambda c: None


# ---- Warp-level operations ----------------------------------------------------------------------------------------


def together(membermask: Callable[[Any], int], body: Step) -> Step:
    """Run `body` when all named threads of a warp stand at the instruction; those that come early wait."""

    def step(c: Convoy) -> int | None:
        if c.shape.full:
            return body(c)
        wanted = membermask(c)
        if all(f.mask & wanted & f.warp.alive == wanted & f.warp.alive for f in c.fragments):
            return body(c)
        return gather(c, wanted)

    return step


def gather(c: Convoy, wanted: int) -> int:
    """Some threads wait at this instruction for the others of their warp; complete warps go on."""
    cta = c.cta
    go: list[Fragment] = []
    for f in c.fragments:
        need = wanted & f.warp.alive
        waiting = cta.rendezvous.setdefault((c.pc, f.warp.index), [])
        waiting.append(f)
        mask = 0
        for w in waiting:
            mask |= w.mask
        if mask & need == need:
            stack = waiting[0].stack
            for w in waiting[1:]:
                stack = tuple(a for a, b in zip(stack, w.stack, strict=False) if a is b)
            del cta.rendezvous[(c.pc, f.warp.index)]
            go.append(Fragment(f.warp, mask, stack))
    for f in go:
        cta.machine.ready.append(Convoy(cta, c.pc, [f]))
    return STOP


def mask_reader(program: Program, operand: Any, i: Instruction) -> Callable[[Convoy], int]:
    """The membermask: the same for all threads of the convoy."""
    if isinstance(operand, Imm):
        value = operand.value & FULL
        return lambda c: value
    read = program.reader(operand, "W", i)

    def mask(c: Convoy) -> int:
        row = read(c)
        row = row if c.mask is None else row[c.mask]
        return int(row[0])

    return mask


def warp_blocks(c: Convoy, row: NDArray) -> tuple[NDArray, NDArray | None]:
    """A row over the slice, as [warps, 32], whole warps only; with the bool mask of the threads present."""
    lo = c.shape.lo // 32 * 32
    hi = -(-c.shape.hi // 32) * 32
    if lo == c.shape.lo and hi == c.shape.hi and c.mask is None:
        return row.reshape(-1, 32), None
    full = np.zeros(hi - lo, row.dtype)
    full[c.shape.lo - lo : c.shape.hi - lo] = row
    there = np.zeros(hi - lo, np.bool_)
    there[c.shape.lo - lo : c.shape.hi - lo] = True if c.mask is None else c.mask
    return full.reshape(-1, 32), there.reshape(-1, 32)


def write_row(c: Convoy, target: tuple[int, int] | None, blocks: NDArray, where: NDArray | None) -> None:
    """Write [warps, 32] values to a register row; `where` over the slice."""
    if target is None:
        return
    width, index = target
    lo = c.shape.lo // 32 * 32
    flat = blocks.reshape(-1)[c.shape.lo - lo : c.shape.hi - lo]
    row = c.rows.of(width)[index]
    if where is None:
        row[...] = flat
    else:
        np.copyto(row, flat, where=where)


@handles("shfl")
def shuffle(program: Program, i: Instruction) -> Step:
    parts = i.parts
    if "sync" not in parts or len(i.operands) != 5:
        raise PtxError(f"only shfl.sync with five operands is supported: {i.text}", i.line)
    mode = parts[2]
    destination, source, b_operand, c_operand, mask_operand = i.operands
    predicate = None
    if isinstance(destination, Pair):
        predicate = program.destination(destination.second, i)
        destination = destination.first
    target = program.destination(destination, i)
    read_a = program.reader(source, "W", i)
    read_b = program.reader(b_operand, "W", i)
    read_c = program.reader(c_operand, "W", i)
    guard = program.guard(i)
    lanes = np.arange(32)

    def body(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        size = c.shape.hi - c.shape.lo
        a, _ = warp_blocks(c, np.broadcast_to(read_a(c), size))
        b, _ = warp_blocks(c, np.broadcast_to(read_b(c), size))
        clamp_mask, _ = warp_blocks(c, np.broadcast_to(read_c(c), size))
        bval = (b & 31).astype(np.int64)
        cval = (clamp_mask & 31).astype(np.int64)
        segment = (clamp_mask >> 8 & 31).astype(np.int64)
        max_lane = (lanes & segment) | (cval & ~segment)
        min_lane = lanes & segment
        if mode == "up":
            j = lanes - bval
            p = j >= max_lane
        elif mode == "down":
            j = lanes + bval
            p = j <= max_lane
        elif mode == "bfly":
            j = lanes ^ bval
            p = j <= max_lane
        else:
            j = min_lane | (bval & ~segment)
            p = j <= max_lane
        j = np.where(p, j, lanes)
        write_row(c, target, np.take_along_axis(a, j, 1), where)
        write_row(c, predicate, p, where)

    if mode not in ("up", "down", "bfly", "idx"):
        raise PtxError(f"unknown shuffle mode {mode}: {i.text}", i.line)
    return together(mask_reader(program, mask_operand, i), body)


@handles("vote")
def vote(program: Program, i: Instruction) -> Step:
    parts = i.parts
    mode = next((m for m in ("all", "any", "uni", "ballot") if m in parts), "")
    if not mode or "sync" not in parts:
        raise PtxError(f"unknown vote: {i.text}", i.line)
    target = program.destination(i.operands[0], i)
    read = program.reader(i.operands[1], "P", i)
    member = mask_reader(program, i.operands[2], i)
    guard = program.guard(i)

    def body(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        p, there = warp_blocks(c, np.broadcast_to(read(c), c.shape.hi - c.shape.lo))
        bits = member(c)
        on = np.unpackbits(np.array([bits], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
        if there is not None:
            on = there & on
        yes = p & on
        if mode == "ballot":
            value = np.packbits(yes, axis=1, bitorder="little").view("<u4")
            write_row(c, target, np.repeat(value, 32, 1), where)
            return
        no = ~p & on
        if mode == "all":
            result = ~no.any(1, keepdims=True)
        elif mode == "any":
            result = yes.any(1, keepdims=True)
        else:
            result = ~(no.any(1, keepdims=True) & yes.any(1, keepdims=True))
        write_row(c, target, np.repeat(result, 32, 1), where)

    return together(member, body)


@handles("activemask")
def activemask(program: Program, i: Instruction) -> Step:
    target = program.destination(i.operands[0], i)

    def step(c: Convoy) -> None:
        ones, there = warp_blocks(c, np.ones(c.shape.hi - c.shape.lo, np.bool_))
        on = ones if there is None else there
        value = np.packbits(on, axis=1, bitorder="little").view("<u4")
        write_row(c, target, np.repeat(value, 32, 1), c.mask)

    return step


@handles("elect")
def elect(program: Program, i: Instruction) -> Step:
    destination = i.operands[0]
    if not isinstance(destination, Pair):
        raise PtxError(f"elect.sync needs d|p: {i.text}", i.line)
    lane_target = program.destination(destination.first, i)
    target = program.destination(destination.second, i)
    member = mask_reader(program, i.operands[1], i)
    guard = program.guard(i)

    def body(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        size = c.shape.hi - c.shape.lo
        blocks, there = warp_blocks(c, np.zeros(size, np.bool_))
        mask = member(c)
        leader = (mask & -mask).bit_length() - 1
        result = np.zeros_like(blocks)
        if there is None:
            result[:, leader] = True
            lanes = np.full(blocks.shape, leader, np.uint32)
        else:
            bits = np.unpackbits(np.array([mask], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
            first = np.argmax(there & bits, 1)
            result[np.arange(len(blocks)), first] = True
            lanes = np.repeat(first[:, None].astype(np.uint32), 32, 1)
        write_row(c, target, result, where)
        write_row(c, lane_target, lanes, where)

    return together(member, body)


@handles("redux")
def redux(program: Program, i: Instruction) -> Step:
    parts = i.parts
    op, type_ = parts[2], parts[-1]
    kind = {"s32": "I", "u32": "W", "b32": "W", "f32": "F"}.get(type_)
    functions: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    if kind is None or op not in functions:
        raise PtxError(f"unknown reduction: {i.text}", i.line)
    function = functions[op]
    absolute, nan = "abs" in parts, "NaN" in parts
    if kind == "F":
        function = {"min": np.minimum if nan else np.fmin, "max": np.maximum if nan else np.fmax}[op]
    target = program.destination(i.operands[0], i)
    read = program.reader(i.operands[1], kind, i)
    member = mask_reader(program, i.operands[2], i)
    guard = program.guard(i)

    def body(c: Convoy) -> None:
        where = c.active(guard)
        if where is False:
            return
        a, there = warp_blocks(c, np.broadcast_to(read(c), c.shape.hi - c.shape.lo))
        bits = member(c)
        on = np.unpackbits(np.array([bits], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
        on = np.broadcast_to(on, a.shape) if there is None else there & on
        if absolute:
            a = np.abs(a)
        result = np.empty((len(a), 1), a.dtype)
        for w in range(len(a)):
            chosen = a[w][on[w]]
            result[w, 0] = function.reduce(chosen) if len(chosen) else 0
        write_row(c, target, np.repeat(result, 32, 1).view(np.uint32), where)

    return together(member, body)


@handles("match")
def match(program: Program, i: Instruction) -> Step:
    parts = i.parts
    every = "all" in parts
    destination = i.operands[0]
    predicate = None
    if isinstance(destination, Pair):
        predicate = program.destination(destination.second, i)
        destination = destination.first
    target = program.destination(destination, i)
    read = program.reader(i.operands[1], "D" if parts[-1] == "b64" else "W", i)
    member = mask_reader(program, i.operands[2], i)

    def body(c: Convoy) -> None:
        a, there = warp_blocks(c, np.broadcast_to(read(c), c.shape.hi - c.shape.lo))
        bits = member(c)
        on = np.unpackbits(np.array([bits], "<u4").view(np.uint8), bitorder="little").astype(np.bool_)
        on = np.broadcast_to(on, a.shape) if there is None else there & on
        same = (a[:, :, None] == a[:, None, :]) & on[:, None, :]
        masks = np.packbits(same, axis=2, bitorder="little").view("<u4")[:, :, 0]
        if every:
            agree = (same | ~on[:, None, :]).all(2)
            masks = np.where(agree, np.uint32(bits), np.uint32(0))
            write_row(c, predicate, agree, c.mask)
        write_row(c, target, masks, c.mask)

    return together(member, body)


@handles("bar.warp.sync")
def warp_sync(program: Program, i: Instruction) -> Step:
    return together(mask_reader(program, i.operands[0], i), lambda c: None)


# ---- Registers ----------------------------------------------------------------------------------------------------


@handles("setmaxnreg")
def setmaxnreg(program: Program, i: Instruction) -> Step:
    count = i.operands[0]
    if not isinstance(count, Imm) or not 24 <= count.value <= 256 or count.value % 8:
        raise PtxError(f"setmaxnreg takes a multiple of 8 from 24 to 256: {i.text}", i.line)
    wanted = count.value
    increase = "inc" in i.parts

    def step(c: Convoy) -> int | None:
        cta = c.cta
        machine = c.machine
        if not c.shape.full:
            return gather(c, FULL)
        go: list[Fragment] = []
        stay: list[Fragment] = []
        freed = False
        for f in c.fragments:
            warp = f.warp
            if increase and wanted < warp.registers or not increase and wanted > warp.registers:
                machine.finding(
                    "registers",
                    f"setmaxnreg.{'inc' if increase else 'dec'} to {wanted} registers, but the warp has "
                    f"{warp.registers}: the new count must not be {'smaller' if increase else 'larger'}.",
                    c,
                )
                go.append(f)
                continue
            need = 32 * (wanted - warp.registers)
            if need > cta.registers_left:
                stay.append(f)
                continue
            cta.registers_left -= need
            freed = freed or need < 0
            warp.registers = wanted
            go.append(f)
        if freed and cta.register_waiters:
            waiters, cta.register_waiters = cta.register_waiters, []
            machine.wake(waiters)
        if not stay:
            return None
        cta.register_waiters.append(Convoy(cta, c.pc, stay))
        if go:
            machine.resume(Convoy(cta, c.pc + 1, go))
        return STOP

    return step
