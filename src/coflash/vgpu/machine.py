"""The virtual GPU: CTAs, warps, and who runs next.

The unit of execution is the convoy: fragments of warps (usually whole warps) of one CTA that stand at the same
instruction and go on in lock-step, so that one NumPy operation serves all of their threads. A convoy splits when a
branch or a barrier treats its warps differently, and convoys that meet at the same place are merged again. Threads of
one warp that diverge wait for each other at the branch's immediate post-dominator, as compiled code does.

Asynchronous operations are queued in streams; when they take effect is the schedule's choice.
"""

from __future__ import annotations

import random
import time as clock_time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import ptx
from .clocks import Clocks, GlobalShadow, Shadow
from .codegen import ROW_KINDS
from .counters import Counters
from .launch import Launch
from .memory import GlobalMemory, OutOfBounds, SharedMemory
from .report import CHECKS, Event, Finding, Report

ARCHITECTURES = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103", "sm_103a", "sm_103f")
SCHEDULES = ("round-robin", "random", "lazy", "eager")
FULL = 0xFFFFFFFF
ENDLESS = 100_000
"""Steps without an access to memory or a barrier after which a loop counts as endless."""
STOP = -1
"""What a step returns when its convoy must not go on: it has been put to sleep, split, or ended."""

Step = Callable[["Convoy"], "int | None"]


def runs_on(target: str, arch: str) -> bool:
    """Does a chip run PTX of this target? `a` is for one chip alone, `f` for the later ones of its family."""
    wanted, have = (int(name[3:].rstrip("af")) for name in (target, arch))
    if target.endswith("a"):
        return wanted == have
    if target.endswith("f"):
        return wanted // 10 == have // 10 and wanted <= have
    return wanted <= have


class Fault(Exception):
    """An error that ends the run: the kernel cannot go on in any meaningful way."""

    def __init__(self, check: str, message: str):
        super().__init__(message)
        self.check = check


class UnknownInstruction(ptx.PtxError):
    """An instruction that the machine does not model."""


# ---- Registers ----------------------------------------------------------------------------------------------------


class RowViews(dict):
    """Register number -> its row's slice, as one type; made at first use."""

    __slots__ = ("dtype", "file", "hi", "lo", "part", "pieces")

    def __init__(self, file: NDArray, lo: int, hi: int, dtype: Any, pieces: int = 1, part: int = 0):
        super().__init__()
        self.file, self.lo, self.hi, self.dtype = file, lo, hi, dtype
        self.pieces, self.part = pieces, part

    def __missing__(self, index: int) -> NDArray:
        row = self.file[index, self.lo : self.hi]
        if self.pieces > 1:
            row = row.reshape(-1).view(self.dtype).reshape(self.hi - self.lo, -1)[:, self.part]
        else:
            row = row.reshape(-1).view(self.dtype)
        self[index] = row
        return row


class Rows:
    """All register rows of a slice of threads, one attribute per kind (see codegen.ROW_KINDS)."""

    P: RowViews
    H: RowViews
    W: RowViews
    D: RowViews

    def __init__(self, files: dict[int, NDArray], lo: int, hi: int):
        for kind, (width, dtype) in ROW_KINDS.items():
            setattr(self, kind, RowViews(files[width], lo, hi, dtype))
        for width in (32, 64, 128):
            for part, dtype in ((16, np.uint16), (32, np.uint32), (64, np.uint64)):
                for n in range(width // part):
                    if width > part:
                        views = RowViews(files[width], lo, hi, dtype, width // part, n)
                        setattr(self, f"S{width}_{part}_{n}", views)
        self.Q = RowViews(files[128], lo, hi, np.uint64)

    def of(self, width: int) -> RowViews:
        return {1: self.P, 16: self.H, 32: self.W, 64: self.D, 128: self.Q}[width]


# ---- Warps, convoys -----------------------------------------------------------------------------------------------


class Warp:
    __slots__ = ("alive", "cta", "extra", "index", "kinds", "registers", "row")

    def __init__(self, cta: Cta, index: int, alive: int):
        self.cta = cta
        self.index = index
        self.row = cta.rank * cta.warp_count + index
        self.alive = alive
        self.registers = 0
        self.kinds: set[str] = set()
        self.extra: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"warp {self.index}"


class Token:
    """Threads of a warp that diverged and will wait for each other at `pc`."""

    __slots__ = ("got", "pc", "want")

    def __init__(self, pc: int, want: int):
        self.pc, self.want, self.got = pc, want, 0


class Fragment:
    """Some threads of a warp; usually all."""

    __slots__ = ("mask", "stack", "warp")

    def __init__(self, warp: Warp, mask: int, stack: tuple[Token, ...] = ()):
        self.warp, self.mask, self.stack = warp, mask, stack


class Shape:
    """Which threads a convoy has: computed once for each set that occurs."""

    __slots__ = (
        "full",
        "hi",
        "lanes",
        "lo",
        "mask",
        "rows",
        "slice_rows",
        "threads",
        "warp_hi",
        "warp_lo",
        "warp_numbers",
        "warp_rows",
        "warps",
    )

    def __init__(self, cta: Cta, key: tuple[tuple[int, int], ...]):
        members = np.zeros(cta.warp_count * 32, np.bool_)
        for w, mask in key:
            bits = np.unpackbits(np.array([mask], "<u4").view(np.uint8), bitorder="little")
            members[w * 32 : w * 32 + 32] |= bits.astype(np.bool_)
        lanes = np.flatnonzero(members)
        self.lo, self.hi = int(lanes[0]), int(lanes[-1]) + 1
        window = members[self.lo : self.hi]
        self.mask = None if window.all() else window
        self.lanes = lanes
        self.threads = len(lanes)
        self.full = all(mask == FULL for _, mask in key)
        self.warps = [cta.warps[w] for w, _ in key]
        self.warp_lo, self.warp_hi = key[0][0], key[-1][0] + 1
        self.warp_rows = [w.row for w in self.warps]
        whole = self.warp_hi - self.warp_lo == len(key)
        self.warp_numbers: Any = slice(self.warp_lo, self.warp_hi) if whole else [w for w, _ in key]
        base = cta.rank * cta.warp_count
        self.slice_rows = base + np.arange(self.lo, self.hi) // 32
        self.rows = cta.rows(self.lo, self.hi)


class Convoy:
    """Fragments that run in lock-step."""

    __slots__ = (
        "cta",
        "fragments",
        "mask",
        "meet",
        "pc",
        "rows",
        "shape",
        "expired",
        "machine",
        "note",
        "since",
        "solo",
    )

    def __init__(self, cta: Cta, pc: int, fragments: list[Fragment]):
        self.cta = cta
        self.machine = cta.machine
        self.pc = pc
        self.expired = 0  # 1: its time-out has run out; 2: it has been told so
        self.note: Any = None
        self.since = 0  # the phase of the mbarrier it went to sleep at
        self.solo = False  # not to be merged before its next step: it was split off because it differs there
        self.reshape(fragments)

    def reshape(self, fragments: list[Fragment]) -> None:
        if len(fragments) > 1:
            fragments.sort(key=lambda f: f.warp.index)
        self.fragments = fragments
        self.shape = self.cta.shape(fragments)
        self.rows = self.shape.rows
        self.mask = self.shape.mask
        stack = fragments[0].stack
        self.meet = stack[-1].pc if stack else -1

    @property
    def warps(self) -> list[Warp]:
        return self.shape.warps

    def active(self, guard: tuple[int, bool] | None) -> NDArray[np.bool_] | None | Literal[False]:
        """Which threads of the slice take part: None for all, False for none, else a mask."""
        mask = self.mask
        if guard is None:
            return mask
        row = self.rows.P[guard[0]]
        on = ~row if guard[1] else row
        if mask is not None:
            on = on & mask
        count = np.count_nonzero(on)
        if count == len(on):
            return None
        if count == 0:
            return False
        return on.copy() if on is row else on


class Cta:
    def __init__(
        self, machine: Machine, cluster: Cluster, index: int, position: tuple[int, int, int], rank: int
    ):
        self.machine = machine
        self.cluster = cluster
        self.index = index
        self.position = position
        self.rank = rank
        launch = machine.launch
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.threads = threads
        self.warp_count = -(-threads // 32)
        lanes = self.warp_count * 32
        program = machine.program
        self.files: dict[int, NDArray] = {}
        for width in (1, 16, 32, 64, 128):
            count = program.kernel.registers.get(width, 0) + 1
            if width == 128:
                self.files[width] = np.zeros((count, lanes, 2), np.uint64)
            else:
                dtype = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
                self.files[width] = np.zeros((count, lanes), dtype)
        self._rows: dict[tuple[int, int], Rows] = {}
        self._shapes: dict[Any, Shape] = {}
        self.shared = SharedMemory(SharedMemory.RESERVED + program.static_shared + launch.shared_bytes)
        self.local: NDArray[np.uint8] | None = None
        if program.local_bytes:
            self.local = np.zeros((lanes, program.local_bytes), np.uint8)
        self.window = rank << 24
        self.symbols = {name: self.window + offset for name, offset in program.shared_symbols.items()}
        self.warps: list[Warp] = []
        for w in range(self.warp_count):
            here = min(32, threads - 32 * w)
            self.warps.append(Warp(self, w, (1 << here) - 1))
        self.live = threads
        self.named: dict[int, Any] = {}
        self.mbarriers: dict[int, Any] = {}
        self.rendezvous: dict[tuple[int, int], list[Fragment]] = {}
        self.extra: dict[str, Any] = {}
        self.specials: dict[str, Any] = {}
        self.shadow: Shadow | None = None
        if machine.track:
            self.shadow = Shadow(len(self.shared.data) // 4, cluster.clocks)
        self.registers_left = 0
        self.register_waiters: list[Convoy] = []

    def rows(self, lo: int, hi: int) -> Rows:
        found = self._rows.get((lo, hi))
        if found is None:
            found = self._rows[(lo, hi)] = Rows(self.files, lo, hi)
        return found

    def shape(self, fragments: list[Fragment]) -> Shape:
        key = tuple((f.warp.index, f.mask) for f in fragments)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = Shape(self, key)
        return found

    def __str__(self) -> str:
        return f"CTA {self.position}"


class Cluster:
    def __init__(self, machine: Machine, index: int, origin: tuple[int, int, int]):
        launch = machine.launch
        self.machine = machine
        self.index = index
        self.origin = origin
        cx, cy, cz = launch.cluster
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if machine.track:  # only then does anything look at them
            self.clocks = Clocks(cx * cy * cz * -(-threads // 32))
            self.clocks.tensor_fences = (
                machine.program.uses_tensor_fences and "tensor_fence" in machine.checks
            )
        gx, gy, _ = launch.grid
        self.ctas: list[Cta] = []
        for rank in range(cx * cy * cz):
            x, y, z = origin[0] + rank % cx, origin[1] + rank // cx % cy, origin[2] + rank // (cx * cy)
            self.ctas.append(Cta(machine, self, x + gx * (y + gy * z), (x, y, z), rank))
        self.live = len(self.ctas)
        self.barrier: Any = None
        self.extra: dict[str, Any] = {}


# ---- Asynchronous operations --------------------------------------------------------------------------------------


class Operation:
    """Something that takes effect later. Operations of one stream take effect in order."""

    __slots__ = ("apply", "cta", "issued", "kind", "label", "pc", "sequence", "warp")

    def __init__(self, kind: str, warp: Warp, pc: int, apply: Callable[[], None], label: str = ""):
        self.kind, self.warp, self.cta, self.pc, self.apply, self.label = (
            kind,
            warp,
            warp.cta,
            pc,
            apply,
            label,
        )
        self.sequence = 0
        self.issued = warp.cta.machine.time


# ---- Machine ------------------------------------------------------------------------------------------------------


class Machine:
    """A GPU on which launches run.

    arch: "sm_90a", "sm_100a" or "sm_103a". schedule: how warps interleave and when asynchronous operations take effect:
    "round-robin" (warps in turn, operations soon), "random" (both drawn from `seed`), "lazy" (an operation takes
    effect only when nothing else can go on or something waits for it), "eager" (at once). checks: names from
    `report.CHECKS` to switch on; all by default. events: keep a chronological log. progress: called now and then with
    (CTAs done, CTAs in all).
    """

    def __init__(
        self,
        arch: str = "sm_100a",
        *,
        schedule: str = "round-robin",
        seed: int = 0,
        checks: Iterable[str] | None = None,
        events: bool = False,
        resident: int | None = None,
        max_steps: int = 50_000_000,
        max_findings: int = 20,
        num_sms: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        if arch not in ARCHITECTURES:
            raise ValueError(
                f"unsupported architecture {arch!r}: this machine is one of {', '.join(ARCHITECTURES)}"
            )
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
        self.checks = frozenset(CHECKS if checks is None else checks)
        if unknown := self.checks - set(CHECKS):
            raise ValueError(f"unknown checks {sorted(unknown)}: known are {', '.join(CHECKS)}")
        self.arch = arch
        self.schedule = schedule
        self.seed = seed
        self.log_events = events
        self.max_steps = max_steps
        self.max_findings = max_findings
        self.num_sms = num_sms or (132 if arch.startswith("sm_90") else 148)
        self.resident = resident
        self.progress = progress
        self.track = bool(self.checks & {"races", "uninitialised", "barriers", "exit"})
        self.races = "races" in self.checks

    # -- running

    def run(self, launch: Launch) -> Report:
        """Execute a launch to its end. Buffers are changed in place.

        Raises PtxError for PTX that is malformed or that the machine does not model, ValueError for a launch that does
        not fit its kernel. What is wrong with the kernel itself comes back as findings.
        """
        from .decode import Program

        started = clock_time.perf_counter()
        self.launch = launch
        module = ptx.parse(launch.ptx)
        if module.target not in ARCHITECTURES:
            raise ValueError(
                f"unsupported target {module.target!r} in the PTX: one of {', '.join(ARCHITECTURES)}"
            )
        if not runs_on(module.target, self.arch):
            raise ValueError(f"PTX for {module.target} does not run on {self.arch}")
        self.random = random.Random(self.seed)
        self.time = 0
        self.report = Report(launch.name or launch.kernel, self.arch, self.schedule, self.seed)
        self.reported: set[Any] = set()
        self.ready: deque[Convoy] = deque()
        self.streams: dict[Any, deque[Operation]] = {}
        self.sequence = 0
        self.waiting: list[Convoy] = []
        kernel = module.kernel(launch.kernel)
        self._check_launch(kernel)
        with np.errstate(all="ignore"):
            self.program = Program(self, module, kernel, launch)
            self.memory = GlobalMemory([*launch.buffers, *self.program.buffers])
            self.global_shadow = GlobalShadow(self.program.synchronises_globally) if self.track else None
            if self.global_shadow is not None:
                for i, buffer in enumerate(self.memory.buffers):
                    if not buffer.initialised:
                        self.global_shadow.table(i, buffer.nbytes)
            self.counters = Counters(self.program)
            self._run()
        self.report.events.sort(key=lambda e: e.time)
        self.report.counters = self.counters.totals()
        self.report.instructions = self.counters.instructions()
        self.report.seconds = clock_time.perf_counter() - started
        return self.report

    def _check_launch(self, kernel: ptx.Kernel) -> None:
        launch = self.launch
        if len(launch.params) < kernel.parameter_bytes:
            raise ValueError(
                f"{kernel.name} takes {kernel.parameter_bytes} bytes of parameters, the launch has {len(launch.params)}"
            )
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        wanted = kernel.directives.get("reqntid")
        if wanted:
            wanted = tuple(wanted) + (1,) * (3 - len(wanted))
            if wanted != tuple(launch.block):
                raise ValueError(f"{kernel.name} demands blocks of {wanted}, the launch has {launch.block}")
        limit = kernel.directives.get("maxntid")
        if limit and threads > int(np.prod(limit)):
            raise ValueError(
                f"{kernel.name} allows {int(np.prod(limit))} threads a block, the launch has {threads}"
            )
        cluster = kernel.directives.get("reqnctapercluster")
        if cluster:
            cluster = tuple(cluster) + (1,) * (3 - len(cluster))
            if cluster != tuple(launch.cluster):
                raise ValueError(
                    f"{kernel.name} demands clusters of {cluster}, the launch has {launch.cluster}"
                )
        if launch.shared_bytes > 232448:
            raise ValueError(f"{launch.shared_bytes} bytes of shared memory a block: the hardware has 232448")

    def _run(self) -> None:
        launch = self.launch
        gx, gy, gz = launch.grid
        cx, cy, cz = launch.cluster
        origins = deque(
            (x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)
        )  # fmt: skip
        self.origins = origins
        self.total_clusters = len(origins)
        self.done_clusters = 0
        self.live_clusters: list[Cluster] = []
        self.limit = self.resident or (3 if self.schedule == "random" else 1)
        self.most = max(self.limit, self.num_sms // (cx * cy * cz))
        self.idle_polls = 0
        try:
            while True:
                while origins and len(self.live_clusters) < self.limit:
                    self._start(origins.popleft())
                if self.ready:
                    self._turn()
                elif self.streams:
                    self.complete_one()
                elif not self.live_clusters and not origins:
                    break
                elif not self._unstick():
                    self._deadlock()
                    break
                if self.time > self.max_steps:
                    raise Fault(
                        "deadlock", f"no end after {self.max_steps} steps: the kernel seems to run forever"
                    )
        except Fault as fault:
            self.finding(fault.check, str(fault), getattr(self, "current", None), fatal=True)
        except OutOfBounds as error:
            self.finding(
                "bounds", f"access out of bounds: {error}.", getattr(self, "current", None), fatal=True
            )
        finally:
            self.live_clusters.clear()

    def _start(self, origin: tuple[int, int, int]) -> None:
        cluster = Cluster(self, self.total_clusters - len(self.origins) - 1, origin)
        self.live_clusters.append(cluster)
        for cta in cluster.ctas:
            self.program.start(cta)
            fragments = [Fragment(w, w.alive) for w in cta.warps]
            self.ready.append(Convoy(cta, 0, fragments))

    # -- schedule

    def _turn(self) -> None:
        ready = self.ready
        if self.schedule == "random":
            ready.rotate(self.random.randrange(len(ready)))
        convoy = ready.popleft()
        if convoy.solo:
            convoy.solo = False
        elif ready:
            self._merge(convoy)
        if self.schedule == "random" and len(convoy.fragments) > 1 and self.random.random() < 0.15:
            some = [f for f in convoy.fragments if self.random.random() < 0.5]
            if 0 < len(some) < len(convoy.fragments):
                rest = [f for f in convoy.fragments if f not in some]
                ready.append(Convoy(convoy.cta, convoy.pc, rest))
                convoy = Convoy(convoy.cta, convoy.pc, some)
        self.execute(convoy)
        if self.streams:
            if self.schedule == "eager":
                while self.streams:
                    self.complete_one()
            elif self.schedule == "round-robin":
                self.complete_one()
            elif self.schedule == "random":
                while self.streams and self.random.random() < 0.3:
                    self.complete_one()

    def _merge(self, convoy: Convoy) -> None:
        """Take into a convoy whatever else stands at the same instruction of its CTA."""
        pc, cta, meet = convoy.pc, convoy.cta, convoy.meet
        others = [c for c in self.ready if c.pc == pc and c.cta is cta and c.meet == meet and not c.solo]
        if not others:
            return
        if self.schedule == "random" and self.random.random() < 0.3:
            return
        fragments = list(convoy.fragments)
        for other in others:
            self.ready.remove(other)
            fragments += other.fragments
            convoy.expired = min(convoy.expired, other.expired)
        by_warp: dict[int, Fragment] = {}
        for f in fragments:
            old = by_warp.get(f.warp.index)
            if old is None:
                by_warp[f.warp.index] = f
            else:
                stack = tuple(a for a, b in zip(old.stack, f.stack, strict=False) if a is b)
                by_warp[f.warp.index] = Fragment(f.warp, old.mask | f.mask, stack)
        convoy.reshape(list(by_warp.values()))

    def execute(self, c: Convoy) -> None:
        """Run a convoy until it stops."""
        steps = self.program.steps
        visible = self.program.visible if self.schedule == "random" else None
        hits = self.counters.hits
        pc = c.pc
        warps = c.shape.warp_numbers
        meet = c.meet
        self.current = c
        budget, seen = ENDLESS, -1
        while True:
            if pc == meet:
                c.pc = pc
                self._arrive(c)
                return
            budget -= 1
            if not budget:
                # A loop that touches no memory and no barrier will never be left.
                now = int(hits[: len(self.program.visible)][self.program.visible].sum())
                if now == seen:
                    raise Fault(
                        "deadlock",
                        "an endless loop: it neither accesses memory nor synchronises with anybody.",
                    )
                budget, seen = ENDLESS, now
            c.pc = pc
            hits[pc, warps] += 1
            self.time += 1
            result = steps[pc](c)
            if result is None:
                pc += 1
            elif result >= 0:
                pc = result
            else:
                return
            if visible is not None and visible[pc] and self.random.random() < 0.08:
                c.pc = pc
                if pc == meet:
                    self._arrive(c)
                else:
                    self.ready.append(c)
                return

    def wake(self, convoys: list[Convoy], pc_step: int = 0) -> None:
        for c in convoys:
            c.pc += pc_step
            self.resume(c)
        self.idle_polls = 0

    def resume(self, c: Convoy) -> None:
        """Put a convoy among those that can run; its place may be where its threads wait for each other."""
        if c.pc == c.meet:
            self._arrive(c)
        else:
            self.ready.append(c)

    def poll(self, c: Convoy, pc: int) -> int:
        """A convoy looked at memory that another may change: let others run before it looks again."""
        self.idle_polls += 1
        c.pc = pc
        self.resume(c)
        if self.idle_polls > 200 + 4 * len(self.ready) and self.idle_polls % 50 == 0:
            if self.streams:
                self.complete_one()
            elif self.origins and len(self.live_clusters) < self.most:
                self._start(self.origins.popleft())
            elif self.idle_polls > 20_000:
                self._deadlock()
                raise Fault("deadlock", "every warp that can run only polls memory that nobody will change")
        return STOP

    def _unstick(self) -> bool:
        """Nothing can run. Time-outs of try_wait first, then more clusters; False when that is a deadlock."""
        expired = [c for c in self.waiting if not c.expired]
        if expired:
            self.waiting = [c for c in self.waiting if c.expired]
            for c in expired:
                c.expired = 1
                c.note.remove(c)
                self.ready.append(c)
            return True
        if self.origins and len(self.live_clusters) < self.most:
            self._start(self.origins.popleft())
            return True
        return False

    # -- divergence

    def split(
        self, c: Convoy, taken: NDArray[np.bool_], target: int, following: int, meet: int | None
    ) -> int:
        """Send the threads of `taken` (over the slice) to target, the others to the following step."""
        shape = c.shape
        lanes = np.zeros(c.cta.warp_count * 32, np.bool_)
        lanes[shape.lo : shape.hi] = taken if c.mask is None else taken & c.mask
        words = np.packbits(lanes, bitorder="little").view("<u4")
        gone: list[Fragment] = []
        stay: list[Fragment] = []
        for f in c.fragments:
            bits = int(words[f.warp.index]) & f.mask
            if bits == f.mask:
                gone.append(f)
            elif not bits:
                stay.append(f)
            else:
                stack = f.stack
                if meet is not None:
                    stack = (*stack, Token(meet, f.mask))
                gone.append(Fragment(f.warp, bits, stack))
                stay.append(Fragment(f.warp, f.mask & ~bits, stack))
        for pc, fragments in ((following, stay), (target, gone)):
            for group in self._by_meet(fragments):
                self.resume(Convoy(c.cta, pc, group))
        return STOP

    def regroup(self, c: Convoy, key: Callable[[Fragment], Any]) -> int:
        """Split a convoy whose warps do different things at this step: each group does it on its own."""
        groups: dict[Any, list[Fragment]] = {}
        for f in c.fragments:
            groups.setdefault(key(f), []).append(f)
        for fragments in reversed(groups.values()):
            piece = Convoy(c.cta, c.pc, fragments)
            piece.solo = True
            piece.expired = c.expired
            piece.note, piece.since = c.note, c.since
            self.ready.appendleft(piece)
        return STOP

    @staticmethod
    def _by_meet(fragments: list[Fragment]) -> Iterable[list[Fragment]]:
        groups: dict[int, list[Fragment]] = {}
        for f in fragments:
            groups.setdefault(f.stack[-1].pc if f.stack else -1, []).append(f)
        return groups.values()

    def _arrive(self, c: Convoy) -> None:
        """A convoy has reached the place where its threads wait for the rest of their warps."""
        go: list[Fragment] = []
        for f in c.fragments:
            token = f.stack[-1]
            token.got |= f.mask
            if token.got == token.want:
                go.append(Fragment(f.warp, token.want, f.stack[:-1]))
        for group in self._by_meet(go):
            self.resume(Convoy(c.cta, c.pc, group))

    def exit(self, c: Convoy, leaving: NDArray[np.bool_] | None) -> int:
        """Threads end."""
        shape = c.shape
        if leaving is not None:
            lanes = np.zeros(c.cta.warp_count * 32, np.bool_)
            lanes[shape.lo : shape.hi] = leaving
            words = np.packbits(lanes, bitorder="little").view("<u4")
        stay: list[Fragment] = []
        cta = c.cta
        for f in c.fragments:
            bits = f.mask if leaving is None else int(words[f.warp.index]) & f.mask
            f.warp.alive &= ~bits
            cta.live -= bits.bit_count()
            for token in f.stack:
                token.want &= ~bits
            if f.mask & ~bits:
                stay.append(Fragment(f.warp, f.mask & ~bits, f.stack))
            elif f.stack:
                self._release_tokens(f)
            if not f.warp.alive:
                self.program.warp_ended(f.warp)
        if stay:
            for group in self._by_meet(stay):
                self.resume(Convoy(cta, c.pc + 1, group))
        self.idle_polls = 0
        if cta.live == 0:
            self._end(cta)
        return STOP

    def _release_tokens(self, f: Fragment) -> None:
        for depth in range(len(f.stack) - 1, -1, -1):
            token = f.stack[depth]
            if token.want and token.got == token.want:
                self.resume(Convoy(f.warp.cta, token.pc, [Fragment(f.warp, token.want, f.stack[:depth])]))
                return
            if token.want:
                return

    def _end(self, cta: Cta) -> None:
        self.program.cta_ended(cta)
        cluster = cta.cluster
        cluster.live -= 1
        if cluster.live == 0:
            self.live_clusters.remove(cluster)
            self.done_clusters += 1
            if self.progress is not None:
                self.progress(self.done_clusters, self.total_clusters)

    # -- asynchronous operations

    def queue(self, stream: Any, operation: Operation) -> Operation:
        self.sequence += 1
        operation.sequence = self.sequence
        found = self.streams.get(stream)
        if found is None:
            found = self.streams[stream] = deque()
        found.append(operation)
        if self.schedule == "eager":
            while stream in self.streams:
                self._complete(stream)
        return operation

    def _complete(self, stream: Any) -> None:
        operations = self.streams[stream]
        operation = operations.popleft()
        if not operations:
            del self.streams[stream]
        self.idle_polls = 0
        before = getattr(self, "current", None)
        self.current = operation  # type: ignore[assignment]
        try:
            operation.apply()
        except OutOfBounds as error:
            raise Fault("bounds", f"{operation.label or operation.kind} leaves memory: {error}.") from None
        self.current = before  # type: ignore[assignment]
        if self.log_events:
            self.report.events.append(
                Event(
                    operation.issued,
                    operation.cta.index,
                    operation.warp.index,
                    operation.kind,
                    operation.label,
                    self.time,
                )
            )

    def complete_one(self) -> None:
        """Let one asynchronous operation take effect: the oldest, or any head of a stream when drawn at random."""
        if self.schedule == "random":
            keys = list(self.streams)
            self._complete(keys[self.random.randrange(len(keys))])
            return
        self._complete(min(self.streams, key=lambda k: self.streams[k][0].sequence))

    def drain(self, stream: Any, keep: int = 0) -> None:
        """Complete a stream's operations until at most `keep` are left: something waits for them."""
        while stream in self.streams and len(self.streams[stream]) > keep:
            self._complete(stream)

    # -- findings

    def event(self, c: Convoy, kind: str, detail: str) -> None:
        if self.log_events:
            for w in c.shape.warps:
                self.report.events.append(Event(self.time, c.cta.index, w.index, kind, detail))

    def finding(
        self,
        check: str,
        message: str,
        at: Any = None,
        pc: int | None = None,
        key: Any = None,
        fatal: bool = False,
    ) -> None:
        """Record what is wrong, once per check and place. `at` is the convoy or operation, or a CTA.

        What ends the run (`fatal`) is recorded even where its check is switched off: there is no result.
        """
        if check not in self.checks and not fatal:
            return
        cta, role = None, ""
        if isinstance(at, Convoy):
            cta, pc = at.cta, at.pc if pc is None else pc
            role = self.describe_warps(at.shape.warps)
        elif isinstance(at, Operation):
            cta, pc = at.cta, at.pc if pc is None else pc
            role = f"{at.kind} issued by {self.describe_warps([at.warp])}"
        elif isinstance(at, Warp):
            cta, role = at.cta, self.describe_warps([at])
        elif isinstance(at, Cta):
            cta = at
        signature = (check, pc, key)
        if (
            signature in self.reported
            or sum(f.check == check for f in self.report.findings) >= self.max_findings
        ):
            return
        self.reported.add(signature)
        line, text, source = self.program.place(pc)
        self.report.findings.append(
            Finding(
                check, message, self.report.kernel, cta.position if cta else None, role, line, text, source
            )
        )

    def describe_warps(self, warps: list[Warp]) -> str:
        return self.program.describe_warps(warps)

    def _deadlock(self) -> None:
        self.program.deadlock()
