"""A kernel, decoded: every instruction a step that a convoy executes, arithmetic compiled in runs.

Handlers for the instructions that are more than arithmetic live in the modules `control`, `access`, `sync`, `copies`
and `tensor`; each registers itself with `@handles`. A handler looks at an instruction once and returns the function
that executes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import ptx
from .codegen import (
    Namespace,
    Translator,
    compile_run,
    is_compute,
    registers_of,
)
from .launch import Buffer, Launch
from .memory import SharedMemory
from .ptx import Imm, Instruction, Kernel, Mem, Module, Operand, PtxError, Reg, Sink, Sym

if TYPE_CHECKING:
    from .machine import Cta, Machine, Step, Warp

Handler = Callable[["Program", Instruction], "Step"]
HANDLERS: dict[str, Handler] = {}
PARAMETER_BASE = 0x380
INVISIBLE = {"bra", "ret", "exit"}


def handles(*heads: str) -> Callable[[Handler], Handler]:
    """Register a handler for mnemonics that start with these words (the longest match counts)."""

    def register(function: Handler) -> Handler:
        for head in heads:
            HANDLERS[head] = function
        return function

    return register


def find_handler(op: str) -> Handler | None:
    parts = op.split(".")
    for n in range(len(parts), 0, -1):
        found = HANDLERS.get(".".join(parts[:n]))
        if found is not None:
            return found
    return None


class Program:
    """What all CTAs of a launch share."""

    def __init__(self, machine: Machine, module: Module, kernel: Kernel, launch: Launch):
        from . import access, control, copies, sync, tensor  # noqa: F401  (they register their handlers)

        self.machine = machine
        self.module = module
        self.kernel = kernel
        self.launch = launch
        self.buffers: list[Buffer] = []
        self.namespace = Namespace()
        self.translator = Translator(self._symbol_expression, self.namespace)
        self._place_parameters()
        self._place_variables()
        self.meet_instruction = kernel.reconvergence()
        self._decode()

    # -- memory layout

    def _place_parameters(self) -> None:
        params = np.frombuffer(self.launch.params + bytes(-len(self.launch.params) % 16), np.uint8)
        holder = np.zeros(len(params) + 128, np.uint8)
        skip = -holder.ctypes.data % 128
        self.parameter_data = holder[skip : skip + len(params)]
        self.parameter_data[:] = params
        self.parameter_address = self.parameter_data.ctypes.data
        # Addresses in the parameter space are small; cvta.param makes generic ones of them.
        self.parameters = {p.name: PARAMETER_BASE + p.offset for p in self.kernel.parameters}
        self.parameter_window = self.parameter_address - PARAMETER_BASE
        self.translator.parameter_window = self.parameter_window
        if len(params):
            self.buffers.append(Buffer(self.parameter_address, self.parameter_data, "the kernel parameters"))
        self._keep = holder

    def _place_variables(self) -> None:
        self.shared_symbols: dict[str, int] = {}
        self.global_symbols: dict[str, int] = {}
        self.local_symbols: dict[str, int] = {}
        offset = SharedMemory.RESERVED
        dynamic: list[ptx.Variable] = []
        self.local_bytes = 0
        for v in [*self.module.variables, *self.kernel.variables]:
            if v.space == "shared":
                if v.extern or v.size == 0:
                    dynamic.append(v)
                    continue
                offset = -(-offset // v.align) * v.align
                self.shared_symbols[v.name] = offset
                offset += v.size
            elif v.space == "local":
                self.local_bytes = -(-self.local_bytes // v.align) * v.align
                self.local_symbols[v.name] = self.local_bytes
                self.local_bytes += v.size
            else:
                holder = np.zeros(v.size + 128, np.uint8)
                skip = -holder.ctypes.data % max(v.align, 16)
                data = holder[skip : skip + max(v.size, 1)]
                if v.data:
                    data[: len(v.data)] = np.frombuffer(v.data, np.uint8)
                self.global_symbols[v.name] = data.ctypes.data
                self.buffers.append(Buffer(data.ctypes.data, data, v.name))
        for v in dynamic:
            start = -(-offset // v.align) * v.align
            self.shared_symbols[v.name] = start
            offset = max(offset, start) if v is not dynamic[-1] else start
        self.static_shared = offset - SharedMemory.RESERVED

    # -- symbols and special registers

    def _symbol_expression(self, symbol: Sym, i: Instruction) -> str:
        name = symbol.name
        if name in self.parameters:
            return self.namespace.constant(self.parameters[name] + symbol.offset, "D")
        if name in self.global_symbols:
            return self.namespace.constant(self.global_symbols[name] + symbol.offset, "D")
        if name in self.local_symbols:
            return self.namespace.constant(self.local_symbols[name] + symbol.offset, "D")
        if name in self.shared_symbols:
            return f"(c.cta.symbols[{name!r}] + {symbol.offset})"
        if name in SPECIAL:
            function = self.namespace.add(SPECIAL[name], ("special", name))
            return f"{function}(c)"
        if name == "WARP_SZ":
            return self.namespace.constant(32, "W")
        raise PtxError(
            f"{name} is neither a register nor a variable that this module defines: {i.text}", i.line
        )

    def address_of(self, symbol: Sym, i: Instruction) -> int | None:
        """The address of a symbol, in its own space, where it is the same for all CTAs (not shared memory)."""
        for table in (self.parameters, self.global_symbols, self.local_symbols):
            if symbol.name in table:
                return table[symbol.name] + symbol.offset
        return None

    def reader(self, operand: Operand, kind: str, i: Instruction) -> Callable[[Any], Any]:
        """A function of a convoy: the operand's row over the whole slice, or a scalar."""
        if isinstance(operand, Reg) and not operand.negated:
            index = operand.index
            if operand.width == {"P": 1, "H": 16, "J": 16, "W": 32, "I": 32, "F": 32}.get(kind, 64):
                return eval(f"lambda c: c.rows.{kind}[{index}]")
        expression = self.translator.read(operand, kind, i)
        names = self.namespace.values
        expression = re.sub(r"\b([PHJWIFDLGX])\[", r"c.rows.\1[", expression)
        return eval(f"lambda c: {expression}", names)

    def address(self, memory: Operand, i: Instruction, shared: bool) -> Callable[[Any], Any]:
        """A function of a convoy: an address operand as integers over the slice (uint32 if shared, else uint64)."""
        if not isinstance(memory, Mem):
            raise PtxError(f"{i.op} needs an address in brackets: {i.text}", i.line)
        offset = memory.offset
        base = memory.base
        if isinstance(base, Imm):
            value = base.value + offset
            return lambda c: value
        if isinstance(base, Sym):
            read = self.reader(Sym(base.name, base.offset + offset), "D", i)
            return read
        if isinstance(base, Reg) and base.width == 64 and not shared:
            index = base.index
            if not offset:
                return lambda c: c.rows.D[index]
            add = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
            return lambda c: c.rows.D[index] + add
        if isinstance(base, Reg) and base.width in (32, 64):
            index = base.index
            wide = base.width == 64
            add32 = np.uint32(offset & 0xFFFFFFFF)
            if wide:
                return lambda c: c.rows.D[index].astype(np.uint32) + add32
            if shared:
                return (lambda c: c.rows.W[index] + add32) if offset else (lambda c: c.rows.W[index])
            add = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
            return lambda c: c.rows.W[index].astype(np.uint64) + add
        raise PtxError(f"cannot use {memory!r} as an address: {i.text}", i.line)

    def guard(self, i: Instruction) -> tuple[int, bool] | None:
        """The guard, for handlers that look at it themselves."""
        self._guard_taken = True
        return None if i.guard is None else (i.guard.index, i.guard.negated)

    @staticmethod
    def destination(operand: Operand, i: Instruction) -> tuple[int, int] | None:
        """(width, number) of a destination register; None for `_`."""
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Reg):
            raise PtxError(f"cannot write to {operand!r}: {i.text}", i.line)
        return operand.width, operand.index

    # -- decoding

    def _decode(self) -> None:
        kernel = self.kernel
        instructions = kernel.instructions
        starts = set(ptx.leaders(kernel)) | set(self.meet_instruction.values())
        spans: list[tuple[int, int, bool]] = []
        n = 0
        while n < len(instructions):
            end = n + 1
            pure = is_compute(instructions[n])
            while pure and end < len(instructions) and end not in starts and is_compute(instructions[end]):
                end += 1
            spans.append((n, end, pure))
            n = end
        self.spans = spans
        self.step_of = {first: s for s, (first, _, _) in enumerate(spans)}
        self.step_of[len(instructions)] = len(spans)
        self.visible = np.zeros(len(spans) + 1, np.bool_)
        self.reads: dict[int, frozenset[tuple[int, int]]] = {}
        self.writes: dict[int, frozenset[tuple[int, int]]] = {}
        self.pure = np.array([p for _, _, p in spans] + [False])
        self.steps: list[Step] = []
        problems: list[PtxError] = []
        for s, (first, last, pure) in enumerate(spans):
            try:
                if pure:
                    self.steps.append(self._run_step(s, instructions[first:last]))
                else:
                    self.steps.append(self._single_step(s, instructions[first]))
            except PtxError as error:
                problems.append(error)
                self.steps.append(lambda c: None)
        if problems:
            raise problems[0]
        self.uses_wgmma = any(i.op.startswith("wgmma.mma") for i in instructions)
        self.synchronises_globally = any(_may_synchronise(i.op) for i in instructions)
        self.uses_tensor_fences = any(i.op.startswith("tcgen05.fence") for i in instructions)
        watch = {"pending_registers", "tensor_load_wait", "races"} & self.machine.checks
        if watch and (self.uses_wgmma or any(i.op.startswith("tcgen05.ld") for i in instructions)):
            from . import tensor

            self.steps = tensor.guarded(self, self.steps)
        # Running off the end of the body is a return.
        self.steps.append(lambda c: c.machine.exit(c, None))

    def _single_step(self, s: int, i: Instruction) -> Step:
        from .machine import UnknownInstruction

        handler = find_handler(i.op)
        if handler is None:
            raise UnknownInstruction(f"unknown instruction {i.text!r}", i.line)
        self.visible[s] = i.op.split(".", 1)[0] not in INVISIBLE
        self._guard_taken = False
        step = handler(self, i)
        if i.guard is None or self._guard_taken or i.op.startswith("bra"):
            return step
        return self._branch_around(s, i.guard, step)

    @staticmethod
    def _branch_around(s: int, guard: Reg, step: Step) -> Step:
        """`@p op` as a branch over the instruction, for what whole warps do."""
        index, negated = guard.index, guard.negated

        def guarded(c: Any) -> int | None:
            row = c.rows.P[index]
            on = ~row if negated else row
            live = on if c.mask is None else on[c.mask]
            count = np.count_nonzero(live)
            if count == live.size:
                return step(c)
            if count == 0:
                return None
            return c.machine.split(c, ~on, s + 1, s, s + 1)

        return guarded

    def _run_step(self, s: int, run: list[Instruction]) -> Step:
        """One step for a run of computing instructions; compiled at first use."""
        from .machine import UnknownInstruction

        translator, names = self.translator, self.namespace
        # Translate now, so that an unknown instruction is an error before anything runs.
        lines: list[str] = []
        for i in run:
            try:
                lines += translator.translate(i, None)
            except PtxError as error:
                if "unknown instruction" in str(error):
                    raise UnknownInstruction(str(error).split(": ", 1)[-1], i.line) from None
                raise
        compiled: list[Any] = [None, None]

        def build(masked: bool) -> Callable[[Any], None]:
            body = lines
            if masked:
                body = [line for i in run for line in translator.translate(i, "M")]
            function = compile_run(body, names, masked)
            compiled[masked] = function
            return function

        def step(c: Any) -> None:
            masked = c.mask is not None
            (compiled[masked] or build(masked))(c)

        return step

    def touched(self, s: int) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
        """(registers read, registers written) of a step, as (width, number)."""
        if s not in self.reads:
            first, last, _ = self.spans[s]
            reads: set[tuple[int, int]] = set()
            writes: set[tuple[int, int]] = set()
            for i in self.kernel.instructions[first:last]:
                r, w = registers_touched(i)
                reads |= r - writes
                writes |= w
            self.reads[s], self.writes[s] = frozenset(reads), frozenset(writes)
        return self.reads[s], self.writes[s]

    # -- places in words

    def instruction_at(self, pc: int | None) -> Instruction | None:
        if pc is None or not 0 <= pc < len(self.spans):
            return None
        return self.kernel.instructions[self.spans[pc][0]]

    def place(self, pc: int | None) -> tuple[int, str, str]:
        """(PTX line, instruction text, source line) of a step."""
        i = self.instruction_at(pc)
        if i is None:
            return 0, "", ""
        source = self.module.source(i.loc)
        return i.line, i.text, str(source) if source else ""

    def words(self, pc: int | None) -> str:
        line, text, source = self.place(pc)
        if not line:
            return "the launch"
        return f"PTX line {line} ({' '.join(text.split()[:2])[:90]}{', ' + source if source else ''})"

    @staticmethod
    def describe_warps(warps: list[Warp]) -> str:
        numbers = sorted({w.index for w in warps})
        kinds: set[str] = set().union(*(w.kinds for w in warps)) if warps else set()
        if len(numbers) == 1:
            text = f"warp {numbers[0]}"
        elif numbers == list(range(numbers[0], numbers[-1] + 1)):
            text = f"warps {numbers[0]} to {numbers[-1]}"
        else:
            text = "warps " + ", ".join(map(str, numbers))
        role = role_name(kinds)
        return f"{text} ({role})" if role else text

    # -- life of CTAs

    def start(self, cta: Cta) -> None:
        from . import sync

        sync.start(cta)

    def warp_ended(self, warp: Warp) -> None:
        from . import copies, sync, tensor

        copies.warp_ended(warp)
        tensor.warp_ended(warp)
        sync.warp_ended(warp)

    def cta_ended(self, cta: Cta) -> None:
        from . import copies, sync, tensor

        tensor.cta_ended(cta)
        copies.cta_ended(cta)
        sync.cta_ended(cta)

    def deadlock(self) -> None:
        from . import sync

        sync.explain_deadlock(self.machine)


ROLES = (
    ("mma", "tensor cores"),
    ("load", "loads"),
    ("exp", "softmax"),
    ("store", "stores"),
    ("tensor memory", "tensor memory"),
)


def role_name(kinds: set[str]) -> str:
    """What a warp does, from the kinds of work it has done so far."""
    return ", ".join(word for kind, word in ROLES if kind in kinds)


def _may_synchronise(op: str) -> bool:
    """Can this instruction order accesses of different clusters, through global memory?"""
    parts = op.split(".")
    if parts[0] == "atom":
        return not any(p.startswith("shared") for p in parts)
    if parts[0] in ("ld", "st", "red"):
        flagged = {"acquire", "release", "acq_rel", "volatile", "relaxed"} & set(parts)
        return bool(flagged) and not any(p.startswith("shared") for p in parts) and parts[0] != "red"
    return False


_NO_DESTINATION = {
    "st",
    "red",
    "bar",
    "barrier",
    "cp",
    "fence",
    "membar",
    "bra",
    "ret",
    "exit",
    "prefetch",
    "stmatrix",
}


def registers_touched(i: Instruction) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(read, written) registers of one instruction, as (width, number)."""
    reads: set[tuple[int, int]] = set()
    writes: set[tuple[int, int]] = set()
    if i.guard is not None:
        reads.add((1, i.guard.index))
    head = i.op.split(".", 1)[0]
    for n, operand in enumerate(i.operands):
        names = {(r.width, r.index) for r in registers_of(operand)}
        if n == 0 and head not in _NO_DESTINATION and not isinstance(operand, Mem):
            writes |= names
            if head == "wgmma":
                reads |= names
        else:
            reads |= names
    return reads, writes


# ---- Special registers --------------------------------------------------------------------------------------------


def _per_thread(name: str, function: Callable[[Any, NDArray[np.int64]], NDArray]) -> Callable[[Any], Any]:
    def read(c: Any) -> NDArray:
        cta = c.cta
        row = cta.specials.get(name)
        if row is None:
            row = cta.specials[name] = function(cta, np.arange(cta.warp_count * 32)).astype(np.uint32)
        return row[c.shape.lo : c.shape.hi]

    return read


def _block(axis: int) -> Callable[[Any, NDArray[np.int64]], NDArray]:
    def index(cta: Any, t: NDArray[np.int64]) -> NDArray:
        x, y, _ = cta.machine.launch.block
        return (t % x, t // x % y, t // (x * y))[axis]

    return index


def _rank(c: Any, axis: int) -> int:
    x, y, _ = c.cta.machine.launch.cluster
    rank = c.cta.rank
    return (rank % x, rank // x % y, rank // (x * y))[axis]


SPECIAL: dict[str, Callable[[Any], Any]] = {
    "%laneid": _per_thread("laneid", lambda cta, t: t % 32),
    "%warpid": _per_thread("warpid", lambda cta, t: t // 32),
    "%nwarpid": lambda c: np.uint32(64),
    "%smid": lambda c: np.uint32(c.cta.index % c.machine.num_sms),
    "%nsmid": lambda c: np.uint32(c.machine.num_sms),
    "%gridid": lambda c: np.uint64(0),
    "%clock": lambda c: np.uint32(c.machine.time & 0xFFFFFFFF),
    "%clock_hi": lambda c: np.uint32(c.machine.time >> 32),
    "%clock64": lambda c: np.uint64(c.machine.time),
    "%globaltimer": lambda c: np.uint64(c.machine.time),
    "%globaltimer_lo": lambda c: np.uint32(c.machine.time & 0xFFFFFFFF),
    "%globaltimer_hi": lambda c: np.uint32(c.machine.time >> 32),
    "%cluster_ctarank": lambda c: np.uint32(c.cta.rank),
    "%cluster_nctarank": lambda c: np.uint32(len(c.cta.cluster.ctas)),
    "%is_explicit_cluster": lambda c: np.bool_(len(c.cta.cluster.ctas) > 1),
    "%dynamic_smem_size": lambda c: np.uint32(c.machine.launch.shared_bytes),
    "%total_smem_size": lambda c: np.uint32(c.machine.launch.shared_bytes + c.machine.program.static_shared),
    "%aggr_smem_size": lambda c: np.uint32(c.cta.shared.size),
    "%lanemask_eq": _per_thread("lm_eq", lambda cta, t: np.left_shift(1, t % 32)),
    "%lanemask_lt": _per_thread("lm_lt", lambda cta, t: np.left_shift(1, t % 32) - 1),
    "%lanemask_le": _per_thread("lm_le", lambda cta, t: np.left_shift(2, t % 32) - 1),
    "%lanemask_gt": _per_thread("lm_gt", lambda cta, t: 0xFFFFFFFF & ~(np.left_shift(2, t % 32) - 1)),
    "%lanemask_ge": _per_thread("lm_ge", lambda cta, t: 0xFFFFFFFF & ~(np.left_shift(1, t % 32) - 1)),
}


def _along(axis: int, letter: str) -> dict[str, Callable[[Any], Any]]:
    """The special registers of one axis."""
    return {
        f"%tid.{letter}": _per_thread(f"tid.{letter}", _block(axis)),
        f"%ntid.{letter}": lambda c: np.uint32(c.machine.launch.block[axis]),
        f"%ctaid.{letter}": lambda c: np.uint32(c.cta.position[axis]),
        f"%nctaid.{letter}": lambda c: np.uint32(c.machine.launch.grid[axis]),
        f"%cluster_ctaid.{letter}": lambda c: np.uint32(_rank(c, axis)),
        f"%cluster_nctaid.{letter}": lambda c: np.uint32(c.machine.launch.cluster[axis]),
        f"%clusterid.{letter}": lambda c: np.uint32(c.cta.position[axis] // c.machine.launch.cluster[axis]),
        f"%nclusterid.{letter}": lambda c: np.uint32(
            c.machine.launch.grid[axis] // c.machine.launch.cluster[axis]
        ),
    }


for _axis, _letter in enumerate("xyz"):
    SPECIAL |= _along(_axis, _letter)
