"""Results as pictures: for each suite and direction a row of panels, one for each head dim and mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {
    "coflash": "#d62728",
    "cudnn": "#76b900",
    "fa3": "#1f77b4",
    "fa4": "#17becf",
    "flex": "#9467bd",
    "fa2": "#8c8c8c",
    "sdpa": "#8c8c8c",
}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write one PNG for each suite and direction; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suite, direction in dict.fromkeys((p["suite"], p["direction"]) for p in result["points"]):
        points = [p for p in result["points"] if (p["suite"], p["direction"]) == (suite, direction)]
        panels: dict[str, list[dict[str, Any]]] = {}
        for p in points:
            panels.setdefault(_panel(p), []).append(p)
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
        for axis, (title, group) in zip(axes.flat, panels.items(), strict=False):
            _bars(axis, title, group, list(result["providers"]))
        for axis in list(axes.flat)[len(panels) :]:
            axis.axis("off")
        if "matmul_tflops" in result["ceilings"]["before"] and result["machine"].get("capability"):
            for axis in list(axes.flat)[: len(panels)]:
                if not _decode(points):
                    ceiling = result["ceilings"]["before"]["matmul_tflops"]
                    axis.axhline(ceiling, color="black", linewidth=0.8, linestyle=":")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
        figure.suptitle(
            f"{result['machine']['device']}: {suite}, {direction}", y=0.0, va="bottom", fontsize=9
        )
        figure.tight_layout(rect=(0, 0.03, 1, 0.94))
        path = folder / f"{suite}-{direction}.png"
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


def _decode(points: list[dict[str, Any]]) -> bool:
    return all(p["shape"]["seqlen_q"] == 1 for p in points)


def _panel(point: dict[str, Any]) -> str:
    """The point's name without its length."""
    by_length = point["suite"] in ("table", "gqa", "mla", "models")
    return point["name"].rpartition(" ")[0] if by_length else point["suite"]


def _bars(axis: Any, title: str, points: list[dict[str, Any]], providers: list[str]) -> None:
    figure, unit = ("kv_gb_s", "GB/s") if _decode(points) else ("tflops", "TFLOP/s")
    names = [name for name in providers if any(name in p["times"] for p in points)]
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        heights = [p["times"].get(name, {}).get(figure, 0.0) for p in points]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(points))]
        bars = axis.bar(places, heights, width, label=name, color=COLORS.get(name))
        if name == "coflash":
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
    labels = [p["name"].removeprefix(title + " ") for p in points]
    long = max(map(len, labels)) > 12
    axis.set_xticks(range(len(points)), labels, fontsize=7 if long else 8, rotation=20 if long else 0)
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(unit, fontsize=8)
