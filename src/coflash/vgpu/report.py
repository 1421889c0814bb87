"""What a run found out: findings, counters, events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

CHECKS = {
    "bounds": "accesses outside every buffer, parameter, shared or tensor memory of the launch",
    "alignment": "addresses that are not a multiple of the access's size",
    "uninitialised": "reads of shared or tensor memory that nobody wrote",
    "races": "conflicting accesses that no barrier, fence or wait orders, across proxies too",
    "trap": "the kernel stops itself",
    "deadlock": "every warp waits, or polls memory that nobody changes, or loops for ever",
    "barriers": "misuse of named barriers, mbarriers and cluster barriers",
    "tensor_memory": "tensor memory not freed, used without allocation or after its release, overlapping",
    "registers": "register budgets: setmaxnreg beyond the pool, or out of its rules",
    "descriptors": "matrix descriptors, instruction descriptors and tensor maps that mean nothing",
    "pending_registers": "registers that an asynchronous instruction still owns (wgmma without wait_group)",
    "tensor_load_wait": "registers of a tcgen05.ld read before tcgen05.wait::ld",
    "tensor_fence": "tcgen05 operations of different threads without tcgen05.fence (in kernels that use it at all)",
    "exit": "a CTA that ends before asynchronous operations or other CTAs' accesses to its memory are over",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, told once per place in the program."""

    check: str
    message: str
    kernel: str
    cta: tuple[int, int, int] | None = None
    role: str = ""
    line: int = 0
    instruction: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f"kernel {self.kernel[:60]}"
        if self.cta is not None:
            where += f", CTA {self.cta}"
        if self.role:
            where += f", {self.role}"
        text = f"[{self.check}] {where}: {self.message}"
        if self.line:
            text += f" At PTX line {self.line}: {self.instruction[:160]}"
            text += f" (source {self.source})." if self.source else "."
        return text


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `time` counts the machine's steps; `end` is when an asynchronous one took effect."""

    time: int
    cta: int
    warp: int
    kind: str
    detail: str
    end: int = -1


@dataclass(slots=True)
class Report:
    """The outcome of one launch."""

    kernel: str
    arch: str
    schedule: str
    seed: int
    findings: list[Finding] = field(default_factory=list)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Work per warp role (and "total"): unit name to amount. See `counters.UNITS`."""
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    instructions: int = 0
    """Warp instructions executed."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def of(self, checks: str | Iterable[str]) -> list[Finding]:
        """The findings of some checks."""
        wanted = {checks} if isinstance(checks, str) else set(checks)
        return [f for f in self.findings if f.check in wanted]

    def __str__(self) -> str:
        head = (
            f"{self.kernel[:80]} on {self.arch}, schedule {self.schedule} (seed {self.seed}): "
            f"{self.instructions} warp instructions in {self.seconds:.2f} s, "
        )
        if not self.findings:
            return head + "no findings"
        return head + f"{len(self.findings)} findings\n" + "\n".join(f"  {f}" for f in self.findings)
