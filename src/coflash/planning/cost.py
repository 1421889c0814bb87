"""What a call should cost: clocks of each unit for one block of keys, which unit binds, and the whole call's
time.

The units' clocks are counted from the tile's shape; only how far they overlap is fitted, to measured
kernels. The tensor cores run at the rate a large matrix product sustains, the power cap included; products
and softmax overlap in part, which the root of the sum of squares describes well enough on Hopper (both
kernels it was fitted to, head dims 64 to 256, within 5 %).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from coflash.planning import tiles
from coflash.planning.device import CHIPS, Chip, DeviceInfo
from coflash.problem import Problem

LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True)
class Model:
    """How a kernel's units work together; fitted to measurements."""

    element_online: float  # instructions for one score: scale, exponential, sum, conversion, and the maximum
    element_held: float  # without the maximum
    element_mask: float  # more, in a block that is masked
    element_softcap: float
    rescale: float  # instructions for one element of O, each block, where the maximum runs
    block: (
        float  # instructions of a warpgroup for each block: barriers, loop, descriptors (per lane, over 128)
    )
    softmax_stretch: float  # softmax clocks as they pass, over the mean of exponentials and issue
    power: float  # of the mean that joins products and softmax: 1 is one after the other, inf abreast
    tile_clocks: float  # start and end of a tile that nothing hides


# Fitted to flash-attn-4 b36 and its held-maximum variant on one H200 (d64, d128, d256; 16k full), within 5 %.
HOPPER = Model(5.2, 4.2, 3.0, 3.0, 1.2, 60.0, 1.43, 2.0, 2500.0)
# A prediction: the published kernel's 1600 TFLOP/s at d128, where products and exponentials take the same
# clocks.
BLACKWELL = Model(4.5, 3.5, 3.0, 3.0, 0.1, 40.0, 1.0, 5.0, 2500.0)

MODELS = {"sm_90a": HOPPER, "sm_100a": BLACKWELL, "sm_103a": BLACKWELL}


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
        return self.flop / self.seconds / 1e12 if self.seconds else 0.0


@dataclass(frozen=True)
class Tile:
    """A kernel's tile as the cost model sees it: the part of one multiprocessor, and one block of keys."""

    rows: int
    keys: int
    dim: int
    dim_v: int
    mma_rows: int  # query rows that share one reading of K or V from shared memory
    operand_share: float  # of K and V that this multiprocessor holds: half in a CTA pair
    positions: int  # query positions of a whole work item
    heads: int  # query heads of a work item
    multiprocessors: int  # that a work item occupies
    held: bool
    softcap: bool
    polynomial: float = 0.0  # share of the exponentials that the arithmetic units compute
    degree: int = 0


def tile(config: Any, arch: str) -> Tile:
    if arch == "sm_90a":
        return Tile(
            rows=config.tile_m,
            keys=config.tile_n,
            dim=config.tile_d,
            dim_v=config.tile_d_v,
            mma_rows=64,
            operand_share=1.0,
            positions=config.positions * config.warpgroups,
            heads=config.pack_heads,
            multiprocessors=1,
            held=config.softmax == "held",
            softcap=config.softcap,
        )
    return Tile(
        rows=config.rows // config.ctas,
        keys=128,
        dim=config.tile_d,
        dim_v=config.tile_d_v,
        mma_rows=128,
        operand_share=1 / config.ctas,
        positions=config.positions,
        heads=config.pack_heads,
        multiprocessors=config.ctas,
        held=True,  # the rescale is conditional and done by other warps: no instruction of the softmax warps
        softcap=config.softcap,
        polynomial=config.polynomial / 16,
        degree=config.degree,
    )


def estimate(problem: Problem, config: Any, device: DeviceInfo) -> Cost:
    """The cost of a call with a kernel's config on a device."""
    chip, model = CHIPS[device.arch], MODELS[device.arch]
    shape = tile(config, device.arch)
    units = block_units(shape, chip, model, masked=False)
    plain = _clocks(units, chip, model)
    masked = _clocks(block_units(shape, chip, model, masked=True), chip, model)

    heads = problem.batch * problem.nheads_q / shape.heads
    sizes = []
    total = count = 0.0
    for row, number in tiles.rows(problem, shape.positions, shape.keys).items():
        clocks = model.tile_clocks + (row.blocks - row.masked) * plain + row.masked * masked
        sizes.append(clocks)
        total += clocks * number * heads
        count += number * heads
    slots = device.num_sms // shape.multiprocessors
    if not count:
        makespan = 0.0
    elif max(sizes) - min(sizes) < 0.1 * max(sizes):
        makespan = math.ceil(count / slots) * max(sizes)  # equal tiles run in waves
    else:
        makespan = max(total / slots + min(sizes) / 2, max(sizes))  # longest first: a short tail

    pairs = tiles.visible_pairs(problem) * problem.batch * problem.nheads_q
    rows_q = problem.batch * problem.nheads_q * problem.seqlen_q
    rows_k = problem.batch * problem.nheads_kv * problem.seqlen_k
    dram = 2.0 * (rows_q + rows_k) * (problem.head_dim + problem.head_dim_v)
    return Cost(
        flop=2.0 * (problem.head_dim + problem.head_dim_v) * pairs,
        units=units,
        binds=max(units, key=lambda name: units[name]),
        block_clocks=plain,
        tiles=int(count),
        seconds=max(makespan / (chip.clock_ghz * 1e9), dram / (chip.dram_tb_s * 1e12)) + LAUNCH_SECONDS,
    )


def block_units(shape: Tile, chip: Chip, model: Model, *, masked: bool) -> dict[str, float]:
    """Clocks of each unit of one multiprocessor for a tile's products and softmax with one block of keys."""
    m, n, d, dv = shape.rows, shape.keys, shape.dim, shape.dim_v
    element = model.element_held if shape.held else model.element_online
    element += model.element_mask * masked + model.element_softcap * shape.softcap
    element += shape.polynomial * (shape.degree + 4)  # clamp, split, Horner, exponent
    rescale = 0.0 if shape.held else m * dv * model.rescale
    instructions = m * n * element + rescale + m * 2 * model.block
    # Operands of both products, with P from registers or tensor memory; K and V as the copy engine writes
    # them.
    readings = m / shape.mma_rows
    shared = 2 * (m * d + (readings + 1) * shape.operand_share * n * (d + dv))
    return {
        "tensor cores": 2 * m * n * (d + dv) / chip.mma_flop,
        "exponentials": m * n * (1 - shape.polynomial + shape.softcap) / chip.mufu,
        "issue": instructions / chip.lanes,
        "shared memory": shared / chip.shared_bytes,
        "L2": 2 * n * (d + dv) * shape.operand_share / chip.l2_bytes,
    }


def _clocks(units: dict[str, float], chip: Chip, model: Model) -> float:
    products = units["tensor cores"] / chip.sustained_mma
    softmax = model.softmax_stretch * (units["exponentials"] + units["issue"]) / 2
    together = (products**model.power + softmax**model.power) ** (1 / model.power)
    return max(together, units["shared memory"], units["L2"])
