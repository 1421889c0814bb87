"""What a call should cost: clocks of each unit for one block of keys, which unit binds, and the whole call's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coflash.planning import blackwell, hopper, tiles
from coflash.planning.device import CHIPS, DeviceInfo
from coflash.problem import Problem

LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True)
class Cost:
    """An estimate of one forward call."""

    flop: float  # 2 * (head_dim + head_dim_v) for each visible pair of query and key
    units: dict[str, float]  # clocks of one multiprocessor for one unmasked block of keys
    binds: str  # the unit that needs the most of them
    block_clocks: float  # that the block should take
    tiles: int
    seconds: float

    @property
    def tflops(self) -> float:
        return self.flop / self.seconds / 1e12


def estimate(problem: Problem, config: Any, device: DeviceInfo) -> Cost:
    """The cost of a call with a kernel's config on a device."""
    chip = CHIPS[device.arch]
    model = hopper if device.arch == "sm_90a" else blackwell
    units = model.units(config, chip, masked=False)
    busy, count = model.seconds(problem, config, device)
    heads = problem.batch * problem.nheads_q
    tokens = problem.batch * (problem.nheads_q * problem.seqlen_q + problem.nheads_kv * problem.seqlen_k)
    dram = 2.0 * tokens * (problem.head_dim + problem.head_dim_v)  # every operand and the output once
    return Cost(
        flop=2.0 * (problem.head_dim + problem.head_dim_v) * tiles.visible_pairs(problem) * heads,
        units=units,
        binds=max(units, key=lambda name: units[name]),
        block_clocks=model.block_clocks(config, chip, masked=False),
        tiles=count,
        seconds=max(busy, dram / (chip.dram_tb_s * 1e12)) + LAUNCH_SECONDS,
    )
