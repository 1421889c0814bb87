"""What a Blackwell forward should cost, from counts: a prediction, since no figure of ours comes from a Blackwell.

Clocks of each unit for a block follow from what the virtual GPU counts in the kernel's own softmax warps
(`tools/count_sm100_forward.py`).  Two constants, and a third for kernels that launch a CTA for each item, are fitted
to four published figures of flash-attn-4, with its own counts; its other eight are met within 4 %
(`tests/kernels/sm100/test_cost.py` fits and checks).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from coflash.planning import tiles
from coflash.planning.device import CHIPS, Chip, DeviceInfo
from coflash.problem import Problem

KEYS = ROWS = 128  # of a block of scores
OVERLAP = 2.16  # fitted: units join as the OVERLAP-norm of their clocks; infinity would be perfect overlap
ITEM_CLOCKS = 4500.0  # fitted: of a work item's start and end, what a persistent kernel doesn't hide

# Counted: warp instructions of the softmax warps for one row of warps and one block.
SLOTS = 417.0  # a whole block, without any polynomial
SLOTS_PAIR = 8.0  # more for a pair of exponentials by polynomial, and one for each degree
SLOTS_MASK = 277.0  # more for a masked block
SLOTS_SOFTCAP = 5.0  # more for an element
SHARED_ROWS = 2 * 30.0  # more where both warpgroups share every row


def units(config: Any, chip: Chip, *, masked: bool) -> dict[str, float]:
    """Clocks of each unit of one multiprocessor for a block of scores of each of two Q tiles (or two blocks of one)."""
    share = 0 if masked else config.polynomial
    pairs = KEYS // 2 * share / 16
    exponentials = KEYS - 2 * pairs + 2 * KEYS * config.softcap
    slots = SLOTS + pairs * (SLOTS_PAIR + config.degree) + SLOTS_MASK * masked
    slots += SLOTS_SOFTCAP * KEYS * config.softcap + SHARED_ROWS * (config.q_tiles == 1)
    d, dv = config.tile_d, config.tile_d_v
    operands = 2 * (ROWS * d + KEYS * (d + dv) / config.ctas)
    copies = 2 * KEYS * (d + dv) / config.ctas / config.q_tiles
    return {
        "tensor cores": 2 * 2 * ROWS * KEYS * (d + dv) / chip.mma_flop,
        "exponentials": 2 * ROWS * exponentials / chip.mufu,
        "issue": 2 * slots,  # each scheduler has one warp of either softmax warpgroup
        "shared memory": 2 * (operands + copies) / chip.shared_bytes,
    }


def together(clocks: Iterable[float], overlap: float = OVERLAP) -> float:
    """Clocks of units that work side by side, in part."""
    return sum(c**overlap for c in clocks) ** (1 / overlap)


def block_clocks(config: Any, chip: Chip, *, masked: bool) -> float:
    """Clocks for a block of each of two Q tiles. Shared memory is a limit of its own: operands flow while products
    run."""
    found = units(config, chip, masked=masked)
    shared = found.pop("shared memory")
    return max(together(found.values()), shared)


def seconds(problem: Problem, config: Any, device: DeviceInfo) -> tuple[float, int]:
    """Predicted time of a call, and its number of work items."""
    chip = CHIPS[device.arch]
    whole, masked = (block_clocks(config, chip, masked=m) / 2 for m in (False, True))
    positions = ROWS * config.ctas // config.pack_heads  # of the rows of one product
    clocks, count = 0.0, 0
    longest = shortest = 0.0
    for row, number in tiles.rows(problem, positions, KEYS).items():
        tile = (row.blocks - row.masked) * whole + row.masked * masked
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
