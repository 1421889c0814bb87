"""What a Hopper forward should cost: clocks of each unit counted from the tile's shape, and how far they overlap.

Only the overlap, the ends of a tile and the count of issue slots are fitted, to this kernel's forward tables on five
H200s: within 11 % of the last run everywhere, the machines themselves being 10 % apart.
"""

from __future__ import annotations

import math
from typing import Any

from coflash.planning import tiles
from coflash.planning.device import CHIPS, Chip, DeviceInfo
from coflash.problem import Problem

MMA_ROWS = 64  # query rows of one wgmma: each reads its K or V operand from shared memory

# Instructions of a computing thread for one score: scale and subtract, exponential, sum, half a conversion, ...
ELEMENT_HELD = 3.5
ELEMENT_ONLINE = 5.2  # ... and the maximum
ELEMENT_MASK = 2.0  # more, in a masked block
ELEMENT_SOFTCAP = 3.0
RESCALE = 1.2  # for an element of O, each block, where the maximum runs
ROW = 120.0  # for a row, each block: barriers, loop, descriptors

# Fitted. Products and softmax join as the root of the sum of their squares: they overlap, in part.
STRETCH = 1.25  # softmax as it passes, over the mean of its exponentials and its issue slots
TILE_CLOCKS = 2600.0  # of a tile's start and end, what nothing hides


def units(config: Any, chip: Chip, *, masked: bool) -> dict[str, float]:
    """Clocks of each unit of one multiprocessor for a tile's products and softmax with one block of keys."""
    m, n, d, dv = config.tile_m, config.tile_n, config.tile_d, config.tile_d_v
    held = config.softmax == "held"
    element = (
        (ELEMENT_HELD if held else ELEMENT_ONLINE) + ELEMENT_MASK * masked + ELEMENT_SOFTCAP * config.softcap
    )
    instructions = m * n * element + (0 if held else m * dv * RESCALE) + m * ROW
    # Q, and K and V once for each wgmma and once as the copy engine writes them; P comes from registers.
    shared = 2 * (m * d + (m / MMA_ROWS + 1) * n * (d + dv))
    return {
        "tensor cores": 2 * m * n * (d + dv) / chip.mma_flop,
        "exponentials": m * n * (1 + config.softcap) / chip.mufu,
        "issue": instructions / chip.lanes,
        "shared memory": shared / chip.shared_bytes,
        "L2": 2 * n * (d + dv) / chip.l2_bytes,
    }


def block_clocks(config: Any, chip: Chip, *, masked: bool) -> float:
    """Clocks that a tile should take for one block of keys."""
    found = units(config, chip, masked=masked)
    products = found["tensor cores"] / chip.sustained_mma
    softmax = STRETCH * (found["exponentials"] + found["issue"]) / 2
    return max(math.hypot(products, softmax), found["shared memory"], found["L2"])


def seconds(problem: Problem, config: Any, device: DeviceInfo) -> tuple[float, int]:
    """Expected time of a call on the multiprocessors, and its number of tiles."""
    chip = CHIPS[device.arch]
    whole, masked = (block_clocks(config, chip, masked=m) for m in (False, True))
    heads = problem.batch * problem.nheads_q / config.pack_heads
    sizes = []
    total = count = 0.0
    for row, number in tiles.rows(problem, config.positions * config.warpgroups, config.tile_n).items():
        clocks = TILE_CLOCKS + (row.blocks - row.masked) * whole + row.masked * masked
        sizes.append(clocks)
        total += clocks * number * heads
        count += number * heads
    if not count:
        return 0.0, 0
    if max(sizes) - min(sizes) < 0.1 * max(sizes):
        spent = math.ceil(count / device.num_sms) * max(sizes)  # equal tiles run in waves
    else:
        spent = max(total / device.num_sms + min(sizes) / 2, max(sizes))  # longest first: a short tail
    return spent / (chip.clock_ghz * 1e9), int(count)
