"""What a Blackwell forward should cost, from counts: a prediction, since no figure of ours comes from a Blackwell.

Clocks of each unit for a block follow from what the softmax warps' machine code issues (`tools/count_machine_code.py`).
Two constants, and a third for kernels that launch a CTA for each item, are fitted to four published figures of
flash-attn-4, with its own counts; its other eight are met within 3 % (`tests/kernels/sm100/test_cost.py` fits and
checks).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coflash.planning import tiles
from coflash.planning.device import CHIPS, Chip, DeviceInfo
from coflash.problem import Problem

KEYS = ROWS = 128  # of a block of scores
OVERLAP = 2.36  # fitted: units join as the OVERLAP-norm of their clocks; infinity would be perfect overlap
ITEM_CLOCKS = 4480.0  # fitted: of a work item's start and end, what a persistent kernel doesn't hide


@dataclass(frozen=True)
class Work:
    """Of a softmax warp for its 32 rows of a block, without the exponentials themselves."""

    slots: float  # instructions
    multiply_adds: float  # clocks of the float32 pipe: two of a packed instruction, one of another
    integer: float  # instructions of the other pipe: maxima, conversions, compares, integers

    def __add__(self, other: Work) -> Work:
        return Work(
            self.slots + other.slots,
            self.multiply_adds + other.multiply_adds,
            self.integer + other.integer,
        )

    def times(self, count: float) -> Work:
        return Work(self.slots * count, self.multiply_adds * count, self.integer * count)


# Counted in machine code, all exponentials on the special-function unit.
HELD = Work(368, 257, 68)  # a block that is seen whole, the reference held
ONLINE = Work(431, 259, 132)  # the same with a maximum
MASKED = Work(617, 260, 305)
FIRST = Work(65, 0, 65)  # more for an item's first whole block where the reference is held: its maximum
PAIR = Work(6.4, 10, 2)  # more for a pair of exponentials by polynomial
SOFTCAP = Work(5, 3, 0)  # more for an element
SHARED_ROWS = Work(67, 25, 30)  # more where both warpgroups share every row


def softmax(config: Any, *, masked: bool, first: bool) -> Work:
    """What a warp does for its rows of a block."""
    held = config.softmax == "held"
    work = MASKED if masked else HELD if held else ONLINE
    if first and held and not masked:
        work += FIRST
    if config.q_tiles == 1:
        work += SHARED_ROWS
    pairs = 0 if masked else KEYS // 2 * config.polynomial / 16
    return work + PAIR.times(pairs) + SOFTCAP.times(KEYS * config.softcap)


def units(config: Any, chip: Chip, *, masked: bool, first: bool = False) -> dict[str, float]:
    """Clocks of each unit of one multiprocessor for a block of scores of each of two Q tiles (or two blocks of one)."""
    work = softmax(config, masked=masked, first=first)
    pairs = 0 if masked else KEYS // 2 * config.polynomial / 16
    exponentials = KEYS - 2 * pairs + 2 * KEYS * config.softcap
    d, dv = config.tile_d, config.tile_d_v
    operands = 2 * (ROWS * d + KEYS * (d + dv) / config.ctas)
    copies = 2 * KEYS * (d + dv) / config.ctas / config.q_tiles
    warps = 2  # of the two softmax warpgroups, on each of four schedulers
    return {
        "tensor cores": 2 * 2 * ROWS * KEYS * (d + dv) / chip.mma_flop,
        "exponentials": 2 * ROWS * exponentials / chip.mufu,
        "issue": warps * work.slots,
        "multiply-adds": warps * work.multiply_adds * 128 / chip.lanes,
        "integer": warps * work.integer * 2 * 128 / chip.lanes,  # at half the rate
        "shared memory": 2 * (operands + copies) / chip.shared_bytes,
    }


def together(clocks: Iterable[float], overlap: float = OVERLAP) -> float:
    """Clocks of units that work side by side, in part."""
    return sum(c**overlap for c in clocks) ** (1 / overlap)


def block_clocks(config: Any, chip: Chip, *, masked: bool, first: bool = False) -> float:
    """Clocks for a block of each of two Q tiles. Shared memory is a limit of its own: operands flow while products
    run."""
    found = units(config, chip, masked=masked, first=first)
    shared = found.pop("shared memory")
    return max(together(found.values()), shared)


def seconds(problem: Problem, config: Any, device: DeviceInfo) -> tuple[float, int]:
    """Predicted time of a call, and its number of work items."""
    chip = CHIPS[device.arch]
    whole, masked = (block_clocks(config, chip, masked=m) / 2 for m in (False, True))
    start = block_clocks(config, chip, masked=False, first=True) / 2 - whole
    positions = ROWS * config.ctas // config.pack_heads  # of the rows of one product
    clocks, count = 0.0, 0
    longest = shortest = 0.0
    for row, number in tiles.rows(problem, positions, KEYS).items():
        tile = (row.blocks - row.masked) * whole + row.masked * masked
        if row.blocks > row.masked:
            tile += start
        clocks += number * tile
        count += number
        longest = max(longest, tile)
        shortest = tile if not shortest else min(shortest, tile)
    heads = problem.batch * problem.nheads_q / config.pack_heads
    items = math.ceil(math.ceil(count / config.q_tiles) * heads)
    slots = max(1, device.num_sms // config.ctas)
    if not items:
        return 0.0, 0
    total = clocks * heads + items * ITEM_CLOCKS
    if longest - shortest < 0.1 * longest:
        spent = math.ceil(items / slots) * (total / items)  # equal items run in waves
    else:
        spent = max(
            total / slots, longest * config.q_tiles + ITEM_CLOCKS
        )  # longest first: the end is ragged by little
    return spent / (chip.clock_ghz * 1e9), items
