"""`coflash explain`: which kernel one call would take, why, and what it should cost."""

from __future__ import annotations

import argparse
import json

from coflash.planning import arguments


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser)
    parser.add_argument(
        "--arch", help="explain for sm_90a, sm_100a or sm_103a; default: this machine's GPU, else sm_90a"
    )
    parser.add_argument("--backend", choices=("auto", "portable", "kernel"), help="default: auto")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the kernel's config, to see what it would cost",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from coflash import planning
    from coflash.planning.explain import explain

    problem = arguments.problem(args)
    if args.arch is None and torch.cuda.is_available():
        device, predicted = planning.device_info(torch.device("cuda")), False
    else:
        device, predicted = planning.typical(args.arch or "sm_90a"), True
    # Someone who names an architecture asks about its kernel.
    backend = args.backend or ("kernel" if args.arch else "auto")
    try:
        plan = planning.plan(problem, device, parse_overrides(args.set), backend=backend)
    except (NotImplementedError, ValueError) as error:
        print(f"{'call':10} {error}")
        return 1
    print(explain(plan, predicted=predicted))
    return 0


def parse_overrides(words: list[str]) -> dict[str, object]:
    """FIELD=VALUE words as a dict; values are JSON where they can be, else strings."""
    found: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise SystemExit(f"--set {word}: FIELD=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
