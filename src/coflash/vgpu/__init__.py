"""The virtual GPU: runs the PTX of Hopper and Blackwell kernels on NumPy, says what is wrong with it, counts its work.

    launches = vgpu.record("kernel.so", ptx="kernel.ptx")(q, k, v, out)
    for launch in launches:
        report = vgpu.Machine(arch="sm_100a").run(launch)
        assert report.ok, report

It needs NumPy only, and imports nothing else of coflash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .launch import Buffer, Launch
from .machine import Machine
from .ptx import PtxError
from .report import CHECKS, Event, Finding, Report

if TYPE_CHECKING:
    from .recorder import record

__all__ = ["CHECKS", "Buffer", "Event", "Finding", "Launch", "Machine", "PtxError", "Report", "check", "record"]


def __getattr__(name: str) -> Any:
    # The recorder builds a small library when it is first used: import it only then.
    if name == "record":
        from .recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(
    launches: Launch | list[Launch], arch: str, schedules: tuple[tuple[str, int], ...] = (("round-robin", 0),), **options: Any
) -> list[Report]:
    """Run launches under several (schedule, seed) pairs; the buffers end up as the last run left them.

    Every run starts from the buffers' present contents. A buffer that one run leaves with other bytes than the first is
    a finding ("schedule") of that run's last report: the kernel's answer depends on the interleaving. Sums of floats in
    an order the hardware does not fix differ too: compare such outputs with a tolerance yourself.
    """
    launches = [launches] if isinstance(launches, Launch) else list(launches)
    buffers = list({b.address: b for launch in launches for b in launch.buffers}.values())
    before = [b.data.copy() for b in buffers]
    first: list[Any] = []
    reports: list[Report] = []
    for schedule, seed in schedules:
        for b, data in zip(buffers, before, strict=True):
            b.data[...] = data
        for launch in launches:
            reports.append(Machine(arch, schedule=schedule, seed=seed, **options).run(launch))
        if not first:
            first = [b.data.copy() for b in buffers]
            continue
        for b, data in zip(buffers, first, strict=True):
            if (b.data != data).any():
                reports[-1].findings.append(
                    Finding(
                        "schedule",
                        f"{b.name or 'a buffer'} differs from what schedule {schedules[0][0]} (seed {schedules[0][1]}) left "
                        f"in it, in {int((b.data != data).sum())} bytes: the answer depends on the interleaving.",
                        reports[-1].kernel,
                    )
                )
    return reports
