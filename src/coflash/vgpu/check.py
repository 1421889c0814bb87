"""The same launches under several schedules: every one must be clean, and all must leave the same memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .launch import Buffer, Launch
from .machine import SCHEDULES, Machine
from .report import Finding, Report

__all__ = ["Run", "Verdict", "check", "schedules"]


@dataclass(frozen=True)
class Run:
    """All launches once, under one schedule."""

    schedule: str
    seed: int
    reports: list[Report]
    seconds: float


@dataclass
class Verdict:
    """What the runs found, taken together."""

    runs: list[Run] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Each once, however many runs reported it; a result that depends on the schedule is one too."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def instructions(self) -> int:
        return sum(report.instructions for run in self.runs for report in run.reports)

    def __str__(self) -> str:
        tried = ", ".join(f"{run.schedule} {run.seed}" for run in self.runs)
        head = f"{len(self.runs)} runs ({tried}), {self.seconds:.1f} s: "
        if self.ok:
            return head + "no findings"
        return head + f"{len(self.findings)} findings\n" + "\n".join(f"  {f}" for f in self.findings)


def schedules(seeds: int) -> list[tuple[str, int]]:
    """Every mode once, then `random` with more seeds: at least one run, `seeds` of them in all."""
    fixed = [(name, 0) for name in SCHEDULES]
    return (fixed + [("random", seed) for seed in range(1, seeds)])[: max(seeds, 1)]


def check(
    launches: Sequence[Launch],
    *,
    tries: Iterable[tuple[str, int]] | None = None,
    arch: str | None = None,
    same_bits: bool = True,
    after_run: Callable[[Run], None] | None = None,
    **options: Any,
) -> Verdict:
    """Run the launches, in order, once for each (schedule, seed) in `tries` (default: every mode once).

    Memory is put back before each run; the last run's results stay. With `same_bits` a byte of memory that
    differs between two runs is a finding; leave it out where results are summed in no fixed order.
    `after_run` is called after each run, when its results are in memory. `options` go to the machine.
    """
    verdict = Verdict()
    buffers = _distinct(launches)
    before = [buffer.data.copy() for buffer in buffers]
    first: list[np.ndarray] | None = None
    for schedule, seed in tries if tries is not None else schedules(len(SCHEDULES)):
        for buffer, content in zip(buffers, before, strict=True):
            buffer.data[...] = content
        started = time.perf_counter()
        reports = [
            Machine(arch=arch or target(launch.ptx), schedule=schedule, seed=seed, **options).run(launch)
            for launch in launches
        ]
        run = Run(schedule, seed, reports, time.perf_counter() - started)
        verdict.runs.append(run)
        for report in reports:
            _add(verdict.findings, report.findings)
        if same_bits and first is None:
            first = [buffer.data.copy() for buffer in buffers]
        elif same_bits and first is not None:
            _add(verdict.findings, _differences(launches, buffers, first, run, verdict.runs[0]))
        if after_run:
            after_run(run)
    return verdict


def target(ptx: str) -> str:
    """The architecture a PTX text is for."""
    found = re.search(r"^\s*\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    if not found:
        raise ValueError("the PTX names no .target sm_*")
    return found[1]


def _distinct(launches: Sequence[Launch]) -> list[Buffer]:
    """The launches' buffers, memory that several of them name once."""
    by_memory = {(b.data.ctypes.data, b.nbytes): b for launch in launches for b in launch.buffers}
    return list(by_memory.values())


def _add(known: list[Finding], found: Iterable[Finding]) -> None:
    places = {(f.check, f.kernel, f.line, f.role) for f in known}
    for finding in found:
        place = (finding.check, finding.kernel, finding.line, finding.role)
        if place not in places:
            places.add(place)
            known.append(finding)


def _differences(
    launches: Sequence[Launch], buffers: list[Buffer], first: list[np.ndarray], run: Run, other: Run
) -> Iterable[Finding]:
    for buffer, content in zip(buffers, first, strict=True):
        different = np.flatnonzero(buffer.data != content)
        if different.size:
            yield Finding(
                check="schedule",
                message=(
                    f"{different.size} bytes of {buffer.name or hex(buffer.address)}, the first at offset "
                    f"{different[0]}, differ between schedule {run.schedule} (seed {run.seed}) and "
                    f"{other.schedule} (seed {other.seed}): the result depends on who runs first."
                ),
                kernel=launches[-1].name or launches[-1].kernel,
                role=buffer.name,
            )
