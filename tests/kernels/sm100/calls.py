"""Calls of the Blackwell forward on the virtual GPU: the cases of the Hopper forward's tests with its configs."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from tests.kernels.sm90 import cases

from coflash import compiler, vgpu
from coflash.kernels.sm100.config import ForwardConfig, choose
from coflash.vgpu.check import schedules

KERNEL = "sm100.forward"
EVERY_MODE = schedules(4)


@dataclass(frozen=True)
class Case(cases.Case):
    def config(self, **more: Any) -> ForwardConfig:
        options = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "lse": True, **self.options, **more}
        return choose(
            "sm_100a",
            bounded_left=self.window_left is not None,
            bounded_right=self.window_right is not None,
            softcap=self.softcap != 0.0,
            **options,
        )


@functools.cache
def built(config: ForwardConfig, arch: str = "sm_100a"):
    return compiler.build(KERNEL, config, arch)


def prepare(case: Case, config: ForwardConfig, seed: int = 0, blocks: int = 4):
    """The call's operands and its recorded launch."""
    call = cases.make(case, config, seed, blocks=blocks)
    call.arguments["out"] = aligned(call.arguments["out"])
    entry = built(config)
    given = [call.arguments[name] for name in entry.arguments]
    return call, vgpu.record(entry.so, entry.ptx, names=entry.arguments)(*given)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy at an address as device memory has it; host tensors may start anywhere."""
    room = torch.empty(x.numel() + 64, dtype=x.dtype)
    first = -room.data_ptr() % 64 // x.element_size()
    return room[first : first + x.numel()].view(x.shape).copy_(x)


def verify(case: Case, tries=EVERY_MODE[:1], blocks: int = 4, seed: int = 0, **changes: Any) -> vgpu.Verdict:
    """Run a case, under every schedule in `tries`; assert that it is clean and as exact as the error rule asks."""
    config = case.config()
    if changes:
        config = dataclasses.replace(config, **changes)
    call, launches = prepare(case, config, seed, blocks)

    def check(run) -> None:
        found = cases.errors(call)
        assert found.ok, f"{run.schedule} {run.seed}: {found}"

    verdict = vgpu.check(launches, arch="sm_100a", tries=tries, after_run=check)
    assert verdict.ok, str(verdict)
    return verdict
