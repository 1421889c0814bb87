"""The virtual GPU: runs the PTX of Hopper and Blackwell kernels on NumPy, and says what is wrong.

    launches = vgpu.record("kernel.so", ptx="kernel.ptx")(q, k, v, out)
    for launch in launches:
        report = vgpu.Machine(arch="sm_100a").run(launch)
        assert report.ok, report

It needs NumPy only, and imports nothing else of coflash.
"""

from __future__ import annotations

from .check import Verdict, check
from .launch import Buffer, Launch
from .machine import Machine
from .ptx import PtxError
from .recorder import RecorderError, record
from .report import CHECKS, Event, Finding, Report

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
