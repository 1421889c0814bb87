"""`coflash compile`: build kernels ahead of time, for this machine or another. Needs no GPU."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from coflash.compiler.cache import Entry
from coflash.planning import arguments, presets


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", required=True, help="sm_90a, sm_100a or sm_103a; can be repeated"
    )
    parser.add_argument(
        "--preset", choices=presets.NAMES, help="; ".join(f"{k}: {v}" for k, v in presets.NAMES.items())
    )
    parser.add_argument("-o", "--output", type=Path, help="a folder to ship (default: this user's cache)")
    parser.add_argument("-j", "--jobs", type=int, help="compiler processes (default: one for each processor)")
    parser.add_argument(
        "--with-runtime",
        action="store_true",
        help="copy the DSL's runtime library into the folder, for machines without nvidia-cutlass-dsl",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the kernels and stop")
    arguments.add(parser)


def run(args: argparse.Namespace) -> int:
    from coflash import compiler, planning
    from coflash.compiler import cache, runtime
    from coflash.compiler.progress import Progress

    problems = list(presets.problems(args.preset)) if args.preset else [arguments.problem(args)]
    jobs: dict[compiler.Job, None] = {}  # in order, each once
    for arch in args.arch:
        for problem in problems:
            try:
                plan = planning.plan(problem, planning.typical(arch), backend="kernel")
            except (NotImplementedError, ValueError) as error:
                print(error, file=sys.stderr)
                return 1
            jobs[compiler.Job(plan.kernel, plan.config, arch)] = None
    if args.dry_run:
        for job in jobs:
            print(job.arch, job.config)
        return 0

    started = time.perf_counter()
    with Progress(len(jobs)) as progress:
        try:
            entries = compiler.build_many(jobs, root=args.output, processes=args.jobs, progress=progress)
        except compiler.CompileError as error:
            print(error, file=sys.stderr)
            return 1
    if args.output:
        shutil.rmtree(args.output / cache.LOCKS, ignore_errors=True)  # nobody writes to a shipped folder
    if args.output and args.with_runtime:
        library = runtime.dsl_runtime()
        assert library is not None  # it has just compiled
        shutil.copy2(library, args.output / runtime.NAME)
    place = args.output or entries[0].folder.parent
    size = sum(file.stat().st_size for entry in entries for file in entry.folder.iterdir())
    print(
        f"{len(entries)} kernels in {place}: {size / 2**20:.1f} MiB, {time.perf_counter() - started:.1f} s, "
        f"registers {min(_registers(entries))} to {max(_registers(entries))}, "
        f"{sum(_spills(entry) for entry in entries)} bytes spilled"
    )
    for entry in entries:
        for kernel in entry.resources:
            for loss in kernel["losses"] or ():
                print(f"{entry.folder.name}: {loss}", file=sys.stderr)
    if args.output:
        print(f"use it elsewhere with COFLASH_CACHE_READONLY={args.output.name}")
    return 0


def _registers(entries: list[Entry]) -> list[int]:
    return [kernel["registers"] for entry in entries for kernel in entry.resources]


def _spills(entry: Entry) -> int:
    return sum((kernel["spill_stores"] or 0) for kernel in entry.resources)
