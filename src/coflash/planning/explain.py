"""A plan in words: what runs, why, what it needs, what it should cost, and what was measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from coflash.planning.device import CHIPS
from coflash.planning.plan import Plan
from coflash.problem import Problem

MEASURED = Path(__file__).with_name("measured.json")


def explain(plan: Plan, *, predicted: bool = False) -> str:
    """The plan as text. `predicted`: for a GPU that isn't here, so that every figure is a prediction."""
    lines = [("call", _call(plan.problem))]
    if plan.path != "kernel" or plan.device is None:
        lines += [("path", "portable (PyTorch operations)"), ("why", plan.reason)]
        return _table(lines)
    config, cost = plan.config, plan.cost
    assert cost is not None
    lines += [
        ("path", f"kernel {plan.kernel} on {plan.device.name} ({plan.arch}, {plan.device.num_sms} SMs)"),
        ("why", plan.reason),
        *(_hopper(config) if plan.arch == "sm_90a" else _blackwell(config)),
        ("cycles", f"of one multiprocessor for one block of keys, {cost.block_clocks:.0f} in all:"),
    ]
    scale = max(cost.units.values())
    for unit, clocks in cost.units.items():
        bar = "#" * round(30 * clocks / scale)
        lines.append(("", f"{unit:14} {clocks:6.0f} {bar}{'  <- binds' if unit == cost.binds else ''}"))
    mark = "predicted" if predicted else "expected"
    lines.append((mark, f"{_seconds(cost.seconds)}, {cost.tflops:.0f} TFLOP/s, {cost.tiles} tiles"))
    measured = lookup(plan.problem, CHIPS[plan.arch].name)
    if measured is not None:
        lines.append(("measured", f"{measured:.0f} TFLOP/s on {CHIPS[plan.arch].name}"))
    return _table(lines)


def _table(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:10} {text}".rstrip() for name, text in lines)


def _call(p: Problem) -> str:
    dim = str(p.head_dim) if p.head_dim == p.head_dim_v else f"{p.head_dim}/{p.head_dim_v}"
    heads = str(p.nheads_q) if p.nheads_q == p.nheads_kv else f"{p.nheads_q}/{p.nheads_kv}"
    options = [name for name in p.options if name != "return_lse"]
    return (
        f"{str(p.dtype).removeprefix('torch.')}, batch {p.batch}, {heads} heads, head dim {dim}, "
        f"{p.seqlen_q} queries x {p.seqlen_k} keys"
        + (f", {', '.join(options)}" if options else "")
        + (", with gradients" if p.needs_grad else "")
    )


def _hopper(c: Any) -> list[tuple[str, str]]:
    load, compute = c.registers
    packed = f", {c.pack_heads} heads a tile" if c.pack_heads > 1 else ""
    return [
        ("tile", f"{c.tile_m} rows x {c.tile_n} keys, {c.warpgroups} warpgroups of 64 rows{packed}"),
        ("stages", f"Q {c.q_stages}, K {c.k_stages}, V {c.v_stages}"),
        ("registers", f"{compute} a computing thread, {load} a loading one"),
        ("shared", f"{c.shared_bytes} bytes = {c.shared_sum()}"),
        ("softmax", _SOFTMAX[c.softmax] + ", beside the products"),
        (
            "scheduler",
            "tiles from a counter, longest first" if c.dynamic else "blocks stride through the tiles",
        ),
    ]


_SOFTMAX = {
    "held": "the first block's maximum held, guarded, exact fallback",
    "online": "running maximum",
}


def _blackwell(c: Any) -> list[tuple[str, str]]:
    softmax, epilogue, other = c.registers
    packed = f", {c.pack_heads} heads a tile" if c.pack_heads > 1 else ""
    pair = ", by a pair of CTAs" if c.ctas == 2 else ""
    how = "reference held, guarded by the sum" if c.softmax == "held" else "running maximum"
    by = "cluster launch control" if c.dynamic else "every cluster strides the tiles"
    return [
        ("tile", f"{c.q_tiles} x 128 rows x 128 keys{pair}{packed}"),
        ("stages", f"Q {c.q_stages}, K and V {c.kv_stages} in one ring"),
        ("registers", f"{softmax} a softmax thread, {epilogue} an epilogue one, {other} others"),
        ("shared", f"{c.shared_bytes} bytes = {c.shared_sum()}"),
        ("tensor", f"{c.tensor_columns} columns = {c.tensor_sum()}"),
        ("softmax", f"{how}, {c.polynomial} of 16 exponentials by polynomial"),
        ("scheduler", by),
    ]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3f} ms" if value >= 1e-4 else f"{value * 1e6:.1f} us"


def signature(p: Problem) -> str:
    """The name under which a call's measurement is kept."""
    left, right = p.window
    mask = f"{left},{right}"
    extra = "".join(
        name
        for name, used in (("+sink", p.has_sink), ("+softcap", p.softcap != 0), ("+varlen", p.packed_q))
        if used
    )
    dtype = str(p.dtype).removeprefix("torch.")
    return (
        f"{dtype} b{p.batch} h{p.nheads_q}/{p.nheads_kv} d{p.head_dim}/{p.head_dim_v} "
        f"s{p.seqlen_q}/{p.seqlen_k} w{mask}{extra}"
    )


@cache
def _measured() -> dict[str, dict[str, float]]:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def lookup(problem: Problem, chip: str) -> float | None:
    """TFLOP/s of the forward that `coflash bench` measured on a chip, if it did."""
    return _measured().get(chip, {}).get(signature(problem))
