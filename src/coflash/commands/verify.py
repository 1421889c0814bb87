"""`coflash verify`: run kernels on the virtual GPU, under several schedules, and check them. Needs no
GPU."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coflash.problem import Problem

if TYPE_CHECKING:
    from coflash.vgpu.check import Run, Verdict

ARCHITECTURES = ("sm_90a", "sm_100a")
MULTIPROCESSORS = 4  # of the pretended device: persistent kernels then walk several tiles each


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", choices=ARCHITECTURES, help="can be repeated (default: all)"
    )
    parser.add_argument(
        "--all", action="store_true", help="every case (default: one for each head dimension)"
    )
    parser.add_argument("--case", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument(
        "--seeds", type=int, default=4, help="runs of each case: every schedule, then more random ones (4)"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    stranger = parser.add_argument_group("any exported object")
    stranger.add_argument("--object", type=Path, help="what export_to_c wrote, linked (.so) or not (.o)")
    stranger.add_argument("--ptx", type=Path, help="its PTX (default: the object's name with .ptx)")
    stranger.add_argument("--function", help="the exported function, where there are several")
    stranger.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="SPEC",
        help="an argument: bfloat16[1,256,8,128] (random), int32[3]=0,100,256, float32[16]=0, 0.125, none",
    )
    stranger.add_argument("--any-order", action="store_true", help="results may differ between schedules")


def run(args: argparse.Namespace) -> int:
    from coflash.vgpu.recorder import RecorderError

    try:
        return _stranger(args) if args.object else _own(args)
    except (RecorderError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


# ---- The package's kernels ----------------------------------------------------------------------------

_BASE = Problem(torch.bfloat16, "cuda", 128, 128, 1, 1, 1, 256, 256, needs_lse=True)


def _shape(dim: int, dim_v: int = 0, **changes: Any) -> Problem:
    return replace(_BASE, head_dim=dim, head_dim_v=dim_v or dim, **changes)


CASES: dict[str, Problem] = {
    "d64": _shape(64),
    "d128 causal": _shape(128, causal=True),
    "d256": _shape(256, seqlen_q=128),
}
MORE_CASES: dict[str, Problem] = {
    "d64 causal": _shape(64, causal=True, seqlen_q=200, seqlen_k=200),
    "d96": _shape(96, seqlen_k=200),
    "d128": _shape(128),
    "d128 float16": _shape(128, dtype=torch.float16),
    "d128 two heads, batch 2": _shape(128, nheads_q=2, nheads_kv=2, batch=2, seqlen_q=128, seqlen_k=128),
    "d128 short queries": _shape(128, seqlen_q=70, seqlen_k=300, causal=True),
    "d128 grouped": _shape(128, nheads_q=4, seqlen_q=128, causal=True),
    "d128 decode": _shape(128, nheads_q=8, batch=2, seqlen_q=1, seqlen_k=200, has_seqused_k=True),
    "d128 window": _shape(128, window_left=60, window_right=20),
    "d128 softcap": _shape(128, softcap=15.0),
    "d64 sink": _shape(64, has_sink=True, causal=True),
    "d128 packed": _shape(128, batch=3, seqlen_q=128, packed_q=True, packed_k=True, causal=True),
    "d192/128": _shape(192, 128, causal=True),
    "d256 causal": _shape(256, causal=True),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    case: str
    shape: str
    tries: str = ""
    error: float = math.nan
    allowed: float = math.nan
    findings: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings and not self.problem and self.error <= self.allowed


def _own(args: argparse.Namespace) -> int:
    cases = {**CASES, **MORE_CASES} if args.all or args.case or args.list else CASES
    cases = {name: case for name, case in cases.items() if not args.case or args.case in name}
    if args.list:
        print("\n".join(f"{name:26} {_describe(case)}" for name, case in cases.items()))
        return 0
    archs = args.arch or ARCHITECTURES
    if not cases:
        raise ValueError(f"no case contains {args.case!r}; --list shows them")
    table = Table(max(map(len, cases)), max(len(_describe(case)) for case in cases.values()))
    progress = Progress(len(archs) * len(cases) * args.seeds)
    rows = []
    for arch in archs:
        for name, problem in cases.items():
            progress.name(f"{arch} {name}")
            rows.append(verify(arch, name, problem, args.seeds, progress.step))
            progress.clear()
            table.print(rows[-1])
    for row in rows:
        _print_details(row)
    return 0 if all(row.ok for row in rows) else 1


def verify(
    arch: str, name: str, problem: Problem, seeds: int, step: Callable[[], None] = lambda: None
) -> Row:
    """Compile the kernel that planning chooses for a problem, and run it `seeds` times."""
    from coflash import compiler, planning
    from coflash.compiler import cache
    from coflash.compiler.launch import Launch
    from coflash.operands import Operands
    from coflash.vgpu.check import check, schedules
    from coflash.vgpu.recorder import record

    started = time.perf_counter()
    row = Row(arch, name, _describe(problem))
    device = replace(planning.typical(arch), num_sms=MULTIPROCESSORS)
    try:
        plan = planning.plan(problem, device, backend="kernel")
        # In a folder of its own, where kernels know their source lines.
        (entry,) = compiler.build_many(
            [compiler.Job(plan.kernel, plan.config, plan.arch)], root=cache.writable_root() / "verified"
        )
    except (NotImplementedError, compiler.CompileError) as error:
        for _ in range(seeds):
            step()
        return replace(row, problem=str(error))
    operands = Operands(**random_operands(problem))
    out = torch.full((*operands.q.shape[:-1], problem.head_dim_v), math.nan, dtype=problem.dtype)
    lse = torch.full(_lse_shape(problem, operands.q), math.nan)
    recorded = record(
        entry.so, entry.ptx, function=entry.function, names=entry.arguments, multiprocessors=MULTIPROCESSORS
    )
    launches = Launch(recorded, entry.arguments, plan.scalars)(operands, out, lse)
    right, right_lse = attention(problem, operands, torch.float64)
    plain, _ = attention(problem, operands, problem.dtype)
    rounding = torch.finfo(problem.dtype).eps * right.abs().max().item()
    allowed = 2 * (plain.double() - right).abs().max().item() + rounding
    errors: list[float] = []
    wrong: dict[str, None] = {}  # each text once
    # A kernel may sum the weights as it multiplies them: rounded, each by half a unit at most.
    lse_allowed = torch.finfo(problem.dtype).eps / 4

    def compare(_: Run) -> None:
        errors.append((out.double() - right).abs().max().item())
        off = torch.where(right_lse.isfinite(), (lse.double() - right_lse).abs(), 0.0).max().item()
        if not off <= lse_allowed:  # NaN included
            wrong[f"[answer] the log-sum-exp is off by {off:.1e}, allowed are {lse_allowed:.1e}."] = None
        step()

    verdict = check(launches, tries=schedules(seeds), after_run=compare)
    return replace(
        row,
        kernel=f"{plan.kernel} {arch}",
        tries=_tries(verdict),
        error=max(errors, key=lambda e: math.inf if math.isnan(e) else e),
        allowed=allowed,
        findings=(*map(str, verdict.findings), *wrong),
        seconds=time.perf_counter() - started,
    )


def random_operands(problem: Problem) -> dict[str, Any]:
    """Random operands of a problem, host tensors."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(problem.dtype)

    made: dict[str, Any] = {"softmax_scale": problem.head_dim**-0.5}
    lengths_q, lengths_k = lengths(problem)
    lead = {}
    for side, packed, longest, each in (
        ("q", problem.packed_q, problem.seqlen_q, lengths_q),
        ("k", problem.packed_k, problem.seqlen_k, lengths_k),
    ):
        lead[side] = (sum(each),) if packed else (problem.batch, longest)
        if packed:
            starts = torch.tensor([0, *each]).cumsum(0)
            made[f"cu_seqlens_{side}"] = starts.to(torch.int32)
    if problem.has_seqused_k:
        made["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32)
    if problem.has_seqused_q:
        made["seqused_q"] = torch.tensor(lengths_q, dtype=torch.int32)
    made["q"] = normal(*lead["q"], problem.nheads_q, problem.head_dim)
    made["k"] = normal(*lead["k"], problem.nheads_kv, problem.head_dim)
    made["v"] = normal(*lead["k"], problem.nheads_kv, problem.head_dim_v)
    if problem.has_sink:
        made["sink"] = torch.randn(problem.nheads_q, generator=generator)
    return made


def lengths(problem: Problem) -> tuple[list[int], list[int]]:
    """How many queries and keys each sequence has: the longest first, then shorter ones."""

    def of(longest: int, varies: bool) -> list[int]:
        return [
            longest - (longest * 3 * i // (4 * problem.batch) if varies else 0) for i in range(problem.batch)
        ]

    return (
        of(problem.seqlen_q, problem.packed_q or problem.has_seqused_q),
        of(problem.seqlen_k, problem.packed_k or problem.has_seqused_k),
    )


def _lse_shape(problem: Problem, q: torch.Tensor) -> tuple[int, ...]:
    if problem.packed_q:
        return (problem.nheads_q, q.shape[0])
    return (problem.batch, problem.nheads_q, problem.seqlen_q)


def attention(problem: Problem, operands: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp in plain PyTorch in `dtype`: sequence by sequence, whole score matrices."""
    q, k, v = (t.to(dtype) for t in (operands.q, operands.k, operands.v))
    out = torch.zeros(*q.shape[:-1], problem.head_dim_v, dtype=dtype)
    lse = torch.full(_lse_shape(problem, q), -math.inf, dtype=dtype)
    start_q = start_k = 0
    for b, (length_q, length_k) in enumerate(zip(*lengths(problem), strict=True)):
        at_q = slice(start_q, start_q + length_q) if problem.packed_q else (b, slice(0, length_q))
        at_k = slice(start_k, start_k + length_k) if problem.packed_k else (b, slice(0, length_k))
        rows, sums = _one_sequence(problem, operands, q[at_q], k[at_k], v[at_k])
        out[at_q] = rows
        if problem.packed_q:
            lse[:, start_q : start_q + length_q] = sums
        else:
            lse[b, :, :length_q] = sums
        start_q += length_q
        start_k += length_k
    return out, lse


def _one_sequence(
    problem: Problem, operands: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (t.repeat_interleave(problem.group_size, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * operands.softmax_scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    left, right = problem.window
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if left is not None:
        hidden |= key < position - left
    if right is not None:
        hidden |= key > position + right
    scores = scores.masked_fill(hidden, -math.inf)
    if problem.has_sink:
        sink = operands.sink.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(scores, -1)


def _describe(problem: Problem) -> str:
    heads = f"{problem.nheads_q}" + (f"/{problem.nheads_kv}" if problem.group_size > 1 else "")
    return f"batch {problem.batch}, heads {heads}, {problem.seqlen_q}x{problem.seqlen_k}"


# ---- A stranger's object ------------------------------------------------------------------------------


def _stranger(args: argparse.Namespace) -> int:
    from coflash.vgpu.check import check, schedules
    from coflash.vgpu.recorder import RecorderError, record

    recorded = record(args.object, args.ptx, function=args.function)
    arguments = [parse_argument(spec, i) for i, spec in enumerate(args.arg)]
    try:
        launches = recorded(*arguments)
    except RecorderError as error:
        raise RecorderError(f"{error}\nGive the arguments in order, each with --arg.") from error
    progress = Progress(args.seeds)
    progress.name(args.object.name)
    verdict = check(
        launches,
        tries=schedules(args.seeds),
        same_bits=not args.any_order,
        after_run=lambda _: progress.step(),
    )
    progress.clear()
    for launch in launches:
        print(
            f"{launch.kernel}: grid {launch.grid}, block {launch.block}, cluster {launch.cluster}, ", end=""
        )
        print(f"{launch.shared_bytes} bytes of shared memory")
    print(f"{len(launches)} launches, {_tries(verdict)}, {verdict.seconds:.1f} s")
    _print_findings([str(finding) for finding in verdict.findings])
    return 0 if verdict.ok else 1


_TENSOR = re.compile(r"(\w+)\[([\d,\s]*)\](?:=(.*))?")


def parse_argument(spec: str, seed: int = 0) -> Any:
    """An argument of a compiled function, from the command line."""
    if spec.lower() == "none":
        return None
    tensor = _TENSOR.fullmatch(spec.strip())
    if not tensor:
        for kind in (int, float):
            try:
                return kind(spec)
            except ValueError:
                continue
        raise ValueError(f"--arg {spec}: neither a tensor like bfloat16[2,128], a number, nor none")
    dtype = getattr(torch, tensor[1], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--arg {spec}: {tensor[1]} is no PyTorch dtype")
    shape = [int(n) for n in tensor[2].split(",") if n.strip()]
    if tensor[3] is None:
        normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return normal.to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    values = [float(v) for v in tensor[3].split(",")]
    count = math.prod(shape)
    if len(values) not in (1, count):
        raise ValueError(f"--arg {spec}: {len(values)} values for {count} elements")
    return torch.tensor(values * (count if len(values) == 1 else 1)).reshape(shape).to(dtype)


# ---- What is printed ----------------------------------------------------------------------------------


def _tries(verdict: Verdict) -> str:
    names: dict[str, int] = {}
    for run_ in verdict.runs:
        names[run_.schedule] = names.get(run_.schedule, 0) + 1
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in names.items())


class Table:
    """Printed row by row, as the results come."""

    HEADER = ("kernel", "case", "shape", "schedules", "error", "allowed", "findings", "seconds", "")

    def __init__(self, case: int, shape: int):
        kernel, schedules = len("sm100.forward sm_100a"), len("round-robin random*9 lazy eager")
        self._widths = (kernel, max(case, 4), max(shape, 5), schedules, 7, 7, 8, 7, 6)
        self._line(self.HEADER)

    def print(self, row: Row) -> None:
        numbers = ("", "", "", "") if row.problem else (
            f"{row.error:.1e}", f"{row.allowed:.1e}", str(len(row.findings)), f"{row.seconds:.1f}"
        )  # fmt: skip
        self._line((row.kernel, row.case, row.shape, row.tries, *numbers, "ok" if row.ok else "FAILED"))

    def _line(self, cells: tuple[str, ...]) -> None:
        padded = (cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        print("  ".join(padded).rstrip(), flush=True)


def _print_details(row: Row) -> None:
    if row.problem:
        print(f"\n{row.kernel}, {row.case}: {row.problem}")
    elif row.findings:
        print(f"\n{row.kernel}, {row.case}:")
        _print_findings(row.findings)


def _print_findings(findings: Any) -> None:
    for finding in findings:
        print(textwrap.fill(finding, 110, initial_indent="- ", subsequent_indent="  "))


class Progress:
    """One line on a terminal's error stream that is rewritten, nothing elsewhere."""

    WIDTH = 30

    def __init__(self, total: int):
        self._total, self._done, self._name = max(total, 1), 0, ""
        self._started = time.perf_counter()
        self._shown = sys.stderr.isatty()

    def name(self, name: str) -> None:
        self._name = name
        self._draw()

    def step(self) -> None:
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        if self._shown:
            filled = self.WIDTH * self._done // self._total
            bar = "#" * filled + "." * (self.WIDTH - filled)
            passed = time.perf_counter() - self._started
            print(f"\r\033[K[{bar}] {passed:.0f} s  {self._name}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
