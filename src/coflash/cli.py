"""The `coflash` command: one verb per module of `coflash.commands`.

A verb's module is imported only when the verb is used, and offers two functions:
`configure(parser)` adds its arguments, `run(args)` does the work and returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import coflash

VERBS = {
    "demo": "a pretrained model, a training run and the error of every option, with coflash",
    "doctor": "what is installed here, and which path typical calls take",
    "verify": "run kernels on the virtual GPU and check them",
    "compile": "build kernels ahead of time, for this machine or another",
    "bench": "measure against other attention packages",
    "explain": "which kernel one call would take, and why",
}


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog="coflash",
        description="Exact attention at close to the speed of a matrix product.",
        epilog="verbs:\n"
        + "\n".join(f"  {verb:{width}}  {what}" for verb, what in VERBS.items())
        + "\n\n`coflash VERB --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coflash {coflash.__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = _overview().parse_args(words[:1]).verb
    command = importlib.import_module(f"coflash.commands.{verb}")
    parser = argparse.ArgumentParser(prog=f"coflash {verb}", description=VERBS[verb])
    command.configure(parser)
    try:
        return int(command.run(parser.parse_args(words[1:])))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
