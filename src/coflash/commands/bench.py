"""`coflash bench`: measure against other attention packages, where they are installed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coflash.bench.shapes import SUITES, Shape

if TYPE_CHECKING:
    import torch


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite",
        action="append",
        choices=[*SUITES, "all"],
        help="which shapes; repeatable (default: table on a GPU, small elsewhere)",
    )
    parser.add_argument("--only", metavar="TEXT", help="only shapes whose name contains this")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="forward")
    parser.add_argument("--provider", action="append", metavar="NAME", help="repeatable (default: all here)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--rounds", type=int, default=5, help="each times every provider once, shuffled")
    parser.add_argument("--repeats", type=int, default=10, help="calls of a provider in a round")
    parser.add_argument("--slow", action="store_true", help="time a backward on the portable path too")
    parser.add_argument("--host", action="store_true", help="also host time and first-call time")
    parser.add_argument("--json", type=Path, help="write the results here, after every point")
    parser.add_argument("--table", type=Path, help="write markdown tables here")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write PNG plots here")
    parser.add_argument(
        "--record", action="store_true", help="keep the forward's figures for `coflash explain`"
    )
    parser.add_argument("--load", type=Path, metavar="JSON", help="measure nothing: report these results")
    parser.add_argument("--list", action="store_true", help="list shapes and providers, and stop")


def run(args: argparse.Namespace) -> int:
    from coflash.bench import plots, report

    result = json.loads(args.load.read_text()) if args.load else _measure(args)
    if not isinstance(result, dict):
        return int(result)
    print(report.summary(result))
    if args.table:
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_text(report.table(result) + "\n")
    if args.plots:
        for path in plots.draw(result, args.plots):
            print(path)
    if args.record:
        _record(result, report.measurements(result))
    return 1 if any(p["notes"].get("coflash", "").startswith("wrong") for p in result["points"]) else 0


def _measure(args: argparse.Namespace) -> dict[str, Any] | int:
    """The results, or an exit code where there is nothing to measure."""
    import torch

    from coflash.bench import host, measure, providers, shapes

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    suites = args.suite or (["table"] if device.type == "cuda" else ["small"])
    if "all" in suites:
        suites = [name for name in SUITES if name != "small"]
    chosen = [s for name in suites for s in shapes.suite(name) if args.only is None or args.only in s.name]
    here, absent = providers.available(device, args.provider)
    for name, reason in absent.items():
        print(f"without {name}: {reason}")
    if args.list:
        for provider in here:
            print(f"{provider.name:8} {provider.about} ({provider.find()})")
        for shape in chosen:
            print(f"{shape.suite:8} {shape.name}")
        return 0
    if not chosen or not here:
        print("nothing to measure")
        return 1

    def keep(result: dict[str, Any]) -> None:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    directions = ["forward", "backward"] if args.direction == "both" else [args.direction]
    if device.type == "cuda" and any(provider.name == "coflash" for provider in here):
        _compile(chosen, directions, device)
    result = measure.run(
        chosen,
        directions,
        here,
        device,
        rounds=args.rounds,
        repeats=args.repeats,
        slow=args.slow,
        say=lambda text: print(text, flush=True),
        keep=keep,
    )
    if args.host:
        result["host"] = host.tiny_calls(here, device)
        print(host.say(result["host"], "host time of a tiny call", "us", 1e6))
        if device.type == "cuda":
            result["first_call"] = host.first_calls(here, device)
            print(host.say(result["first_call"], "first call after import torch", "s", 1.0))
        keep(result)
    return result


def _compile(chosen: list[Shape], directions: list[str], device: torch.device) -> None:
    """Have all kernels of the run ready, compiled side by side: no shape then waits for a compiler."""
    from coflash import compiler, planning
    from coflash.bench.providers import backend
    from coflash.compiler.progress import Progress

    jobs: dict[compiler.Job, None] = {}  # in order, each once
    for shape in chosen:
        for direction in directions:
            try:
                problem = shape.problem("cuda", grad=direction == "backward")
                plan = planning.plan(problem, planning.device_info(device), backend=backend(device))
            except NotImplementedError:
                continue  # said where the shape is measured
            if plan.path == "kernel":
                jobs[compiler.Job(plan.kernel, plan.config, plan.arch)] = None
    with Progress(len(jobs)) as progress:
        compiler.build_many(jobs, progress=progress)


def _record(result: dict[str, Any], found: dict[str, float]) -> None:
    from coflash.planning.explain import MEASURED

    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    chip = result["machine"]["device"].removeprefix("NVIDIA ").split(" ")[0]
    known.setdefault(chip, {}).update(found)
    MEASURED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} figures kept in {MEASURED}")
