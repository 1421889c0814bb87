"""Results as a table, as what the bars say, and as the cost model's record."""

from __future__ import annotations

import math
from typing import Any


def table(result: dict[str, Any]) -> str:
    """Markdown tables: one for each suite and direction, the best of a row in bold."""
    blocks = []
    for suite, direction in dict.fromkeys((p["suite"], p["direction"]) for p in result["points"]):
        points = [p for p in result["points"] if (p["suite"], p["direction"]) == (suite, direction)]
        names = [
            name for name in result["providers"] if any(name in p["times"] or _wrong(p, name) for p in points)
        ]
        decode = all(p["shape"]["seqlen_q"] == 1 for p in points)
        figure, unit = ("kv_gb_s", "K/V read in GB/s") if decode else ("tflops", "TFLOP/s")
        rows = [f"| {suite}, {direction}, {unit} | " + " | ".join(names) + " | ahead of the fastest peer |"]
        rows.append("|---" * (len(names) + 2) + "|")
        for p in points:
            best = max((entry[figure] for entry in p["times"].values()), default=None)
            cells = [_cell(p, name, figure, best) for name in names]
            rows.append(f"| {p['name']} | " + " | ".join(cells) + f" | {_ahead(p)} |")
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _cell(point: dict[str, Any], name: str, figure: str, best: float | None) -> str:
    entry = point["times"].get(name)
    if entry is None:
        return "wrong" if _wrong(point, name) else "-"
    text = f"{entry[figure]:.0f}" if entry[figure] >= 10 else f"{entry[figure]:.3g}"
    return f"**{text}**" if entry[figure] == best else text


def _wrong(point: dict[str, Any], name: str) -> bool:
    return point["notes"].get(name, "").startswith("wrong")


def _ahead(point: dict[str, Any]) -> str:
    if not point["coflash_is_faster"]:
        return ""
    closest = min(point["coflash_is_faster"].values(), key=lambda each: each["median"])
    return f"{closest['median']:.3f} ({closest['least']:.3f} to {closest['most']:.3f})"


def summary(result: dict[str, Any]) -> str:
    """How the run stands: against the fastest peer of every point, and against the cost model."""
    lines = []
    for direction in ("forward", "backward"):
        ahead = [
            min(each["median"] for each in p["coflash_is_faster"].values())
            for p in result["points"]
            if p["direction"] == direction and p["coflash_is_faster"]
        ]
        if ahead:
            mean = math.exp(sum(map(math.log, ahead)) / len(ahead))
            lines.append(
                f"{direction}: at least the fastest peer at {sum(a >= 1 for a in ahead)} of {len(ahead)} "
                f"points, geometric mean {mean:.3f} times the fastest peer's"
            )
    near = [
        abs(p["expected"] / p["times"]["coflash"]["tflops"] - 1)
        for p in result["points"]
        if p.get("expected") and "coflash" in p["times"]
    ]
    if near:
        within = sum(error <= 0.15 for error in near)
        lines.append(f"cost model: within 15 % of the measurement at {within} of {len(near)} points")
    wrong = [
        f"{p['name']} {p['direction']}: {name}"
        for p in result["points"]
        for name, note in p["notes"].items()
        if note.startswith("wrong")
    ]
    if wrong:
        lines.append("wrong results: " + "; ".join(wrong))
    return "\n".join(lines)


def measurements(result: dict[str, Any]) -> dict[str, float]:
    """coflash's forward TFLOP/s under the names that `coflash explain` looks up."""
    from coflash.bench.shapes import Shape
    from coflash.planning.explain import signature

    found = {}
    for p in result["points"]:
        if p["direction"] == "forward" and "coflash" in p["times"]:
            fields: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in p["shape"].items()
            }
            problem = Shape(suite=p["suite"], name=p["name"], **fields).problem("cuda")
            found[signature(problem)] = round(p["times"]["coflash"]["tflops"], 1)
    return found
