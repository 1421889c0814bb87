"""The virtual GPU: runs the PTX of Hopper and Blackwell kernels on NumPy, says what is wrong with it, counts its work.

    launches = vgpu.record("kernel.so", ptx="kernel.ptx")(q, k, v, out)
    for launch in launches:
        report = vgpu.Machine(arch="sm_100a").run(launch)
        assert report.ok, report

It needs NumPy only, and imports nothing else of coflash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .check import Verdict, check
from .launch import Buffer, Launch
from .machine import Machine
from .ptx import PtxError
from .report import CHECKS, Event, Finding, Report

if TYPE_CHECKING:
    from .recorder import RecorderError, record

__all__ = [
    "CHECKS",
    "Buffer",
    "Event",
    "Finding",
    "Launch",
    "Machine",
    "PtxError",
    "RecorderError",
    "Report",
    "Verdict",
    "check",
    "record",
]


def __getattr__(name: str) -> Any:
    # The recorder builds a small library when it is first used: import it only then.
    if name == "record":
        from .recorder import RecorderError, record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
