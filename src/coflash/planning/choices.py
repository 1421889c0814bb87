"""The table of choices: which tile, stages and scheduler each kind of call gets.

Read a table from the top; the first row that fits is taken. Columns left at None fit anything. Measured
reasons are in docs/performance.md. For an experiment a caller overrides fields for one call; nothing reads
the environment. Lengths choose between two kernels at most (few queries or many), so a new length compiles
nothing once both exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from coflash.planning.device import DeviceInfo
from coflash.problem import Problem

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Choice:
    """One row: when it applies, and the fields of the kernel's config it decides."""

    head_dim: int  # at most
    head_dim_v: int  # at most
    masked: bool | None  # causal or windowed
    fields: Mapping[str, Any]


def _row(head_dim: int, head_dim_v: int, masked: bool | None = None, **chosen: Any) -> Choice:
    return Choice(head_dim, head_dim_v, masked, chosen)


# Hopper. A tile has 64 rows for each computing warpgroup. More of them share a block's K and V (less traffic from
# L2, more warps to hide exponentials) but leave a thread fewer registers, so narrower blocks of keys. Shared memory
# (227 KB) decides the stages: at head_dim 128 with masks, whose tiles are short, a third stage of K and V is worth more
# than a second one of Q.
SM90_FORWARD = (
    _row(
        64,
        64,
        warpgroups=4,
        tile_n=64,
        k_stages=4,
        v_stages=4,
        q_stages=2,
        v_ahead=1,
        in_place=False,
    ),
    _row(96, 96, warpgroups=3, tile_n=96, k_stages=3, v_stages=3, q_stages=2, in_place=False),
    _row(128, 128, masked=True, warpgroups=2, tile_n=128, k_stages=3, v_stages=3),
    _row(128, 128, warpgroups=2, tile_n=128, q_stages=2),
    _row(192, 128, warpgroups=2, tile_n=128, in_place=False),
    _row(192, 192, warpgroups=2, tile_n=64, k_stages=3, v_stages=3, in_place=False),
    _row(96, 256, warpgroups=2, tile_n=64, k_stages=3, v_stages=2),
    _row(256, 256, warpgroups=2, tile_n=64, k_stages=2, v_stages=3, q_registers=4),
)


def sm90_forward(problem: Problem, overrides: Mapping[str, Any]) -> Any:
    """The Hopper forward kernel's config for a call."""
    from coflash.kernels.sm90.config import ROWS, ForwardConfig, positions

    masked = problem.window != (None, None)
    chosen: dict[str, Any] = {
        **_first(SM90_FORWARD, problem, masked),
        "softmax": "held" if problem.dtype == torch.bfloat16 else "online",
    }
    held = overrides.get("softmax", chosen["softmax"]) == "held"
    if not held or problem.softcap != 0.0:
        # A running maximum has O wait for it; a softcap has exponentials of its own, and no registers to spare.
        chosen.pop("v_ahead", None)
    groups = chosen["warpgroups"]
    chosen["pack_heads"] = packed_heads(problem, ROWS * groups, groups * positions(problem.group_size))
    computes = _features(problem)
    _refuse_unknown(ForwardConfig, computes, overrides)
    return ForwardConfig(**{**computes, **chosen, **overrides})


def sm100_forward(problem: Problem, device: DeviceInfo, overrides: Mapping[str, Any]) -> Any:
    """The Blackwell forward kernel's config for a call; what lengths don't decide is chosen beside the kernel."""
    from coflash.kernels.sm100.config import ROWS, ForwardConfig, choose

    computes = _features(problem)
    group = problem.group_size
    pack = packed_heads(problem, 2 * ROWS, 0 if ROWS % group else 2 * ROWS // group)
    # Tiles of different sizes are handed out as CTAs become free, equal ones are strided through.
    uneven = problem.packed_q or problem.has_seqused_k or problem.window != (None, None)
    chosen: dict[str, Any] = {"pack_heads": pack, "dynamic": uneven}
    if max(problem.head_dim, problem.head_dim_v) <= 128:
        # A CTA pair takes 512 rows at a time: too many for short queries, or where pairs would not fill the chip.
        rows = problem.seqlen_q * pack
        pairs = math.ceil(rows / 512) * problem.batch * problem.nheads_q // pack
        if rows <= 256 or pairs < device.num_sms // 2:
            chosen["ctas"] = 1
    _refuse_unknown(ForwardConfig, computes, overrides)
    return choose(device.arch, **{**computes, **chosen, **overrides})


def packed_heads(problem: Problem, tile_rows: int, positions: int) -> int:
    """Query heads that share a tile's rows: the whole group where that saves a fifth of the tiles, else one.

    With few queries (decoding, a short question to a long cache) a tile of one head is mostly empty, and every
    head of a group reads the same keys anyway. `positions` are those of a tile that the group shares; 0: it can't.
    """
    group = problem.group_size
    if group == 1 or positions == 0:
        return 1
    apart = group * math.ceil(problem.seqlen_q / tile_rows)
    together = math.ceil(problem.seqlen_q / positions)
    return group if together <= 0.8 * apart else 1


def _features(problem: Problem) -> dict[str, Any]:
    """The fields of a config that say what is computed (`coflash.kernels.features`)."""
    left, right = problem.window
    return {
        "dtype": DTYPES[problem.dtype],
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "packed_q": problem.packed_q,
        "packed_k": problem.packed_k,
        "seqused_q": problem.has_seqused_q,
        "seqused_k": problem.has_seqused_k,
        "bounded_left": left is not None,
        "bounded_right": right is not None,
        "softcap": problem.softcap != 0.0,
        "sink": problem.has_sink,
        "lse": problem.needs_lse or problem.needs_grad,
    }


def _first(table: tuple[Choice, ...], problem: Problem, masked: bool) -> Mapping[str, Any]:
    for choice in table:
        fits = problem.head_dim <= choice.head_dim and problem.head_dim_v <= choice.head_dim_v
        if fits and choice.masked in (None, masked):
            return choice.fields
    raise AssertionError("the table's last row fits every head dim that a kernel takes")


def _refuse_unknown(kind: Any, computes: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    tunable = {f.name for f in fields(kind)} - computes.keys()
    unknown = overrides.keys() - tunable
    if unknown:
        raise ValueError(
            f"kernel_options {', '.join(sorted(unknown))}: can override {', '.join(sorted(tunable))}"
        )
