"""The run: every shape, every provider that takes it, checked and then timed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from coflash.bench import check, machine, tensors, timing
from coflash.bench.providers import Call, Provider, Unsupported, backend
from coflash.bench.shapes import Shape

Say = Callable[[str], None]
Note = Callable[[dict[str, Any]], None]

FORMAT = 1


def run(
    shapes: list[Shape],
    directions: list[str],
    providers: list[Provider],
    device: torch.device,
    *,
    rounds: int = 5,
    repeats: int = 10,
    slow: bool = False,
    say: Say = print,
    keep: Note = lambda result: None,
) -> dict[str, Any]:
    """Everything measured, as plain data; `keep` gets it after each point, for a run cut short."""
    result: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine.describe(device),
        "providers": {p.name: p.find() for p in providers},
        "settings": {"rounds": rounds, "repeats": repeats},
        "ceilings": {"before": machine.ceilings(device)},
        "points": [],
    }
    say(_ceilings(result["ceilings"]["before"]))
    with machine.Sampler(device) as sampler:
        for shape in shapes:
            for direction in directions:
                if direction == "backward" and shape.seqlen_q == 1:
                    continue
                point = _point(shape, direction, providers, device, rounds, repeats, slow, sampler)
                result["points"].append(point)
                say(line(point))
                keep(result)
    result["ceilings"]["after"] = machine.ceilings(device)
    say(_ceilings(result["ceilings"]["after"]))
    keep(result)
    return result


def _ceilings(found: dict[str, float]) -> str:
    return f"ceilings: product {found['matmul_tflops']:.4g} TFLOP/s, copy {found['copy_tb_s']:.3g} TB/s"


def _point(
    shape: Shape,
    direction: str,
    providers: list[Provider],
    device: torch.device,
    rounds: int,
    repeats: int,
    slow: bool,
    sampler: machine.Sampler,
) -> dict[str, Any]:
    first_sample = len(sampler.samples)
    t = tensors.make(shape, device, grad=direction == "backward")
    notes: dict[str, str] = {}
    checks: dict[str, dict[str, Any]] = {}
    subjects: dict[str, timing.Timed] = {}
    for provider in providers:
        try:
            if direction == "backward":
                if not slow:
                    _refuse_slow(provider, shape, device)
                subjects[provider.name] = _backward(provider, t, checks)
            else:
                subjects[provider.name] = _forward(provider, t, checks)
        except (Unsupported, NotImplementedError) as error:
            notes[provider.name] = str(error)
        except Exception as error:  # a peer that fails is a result, not the end of the run
            notes[provider.name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = [name for name in subjects if not all(entry["right"] for entry in checks[name].values())]
    for name in wrong:
        notes[name] = "wrong result, not timed"
        del subjects[name]

    seconds = timing.rounds(subjects, device, rounds, repeats)
    del subjects, t
    gc.collect()
    flop = shape.flop(direction)
    times: dict[str, dict[str, Any]] = {
        name: {
            "seconds": statistics.median(each),
            "rounds": each,
            "tflops": flop / statistics.median(each) / 1e12,
        }
        for name, each in seconds.items()
    }
    if shape.seqlen_q == 1:
        for entry in times.values():
            entry["kv_gb_s"] = shape.kv_bytes() / entry["seconds"] / 1e9
    versus = {
        name: dict(zip(("median", "least", "most"), timing.ratios(seconds["coflash"], each), strict=True))
        for name, each in seconds.items()
        if name != "coflash" and "coflash" in seconds
    }
    return {
        "suite": shape.suite,
        "name": shape.name,
        "direction": direction,
        "shape": {name: value for name, value in asdict(shape).items() if name not in ("suite", "name")},
        "flop": flop,
        "times": times,
        "coflash_is_faster": versus,
        "checks": checks,
        "notes": notes,
        "state": sampler.since(first_sample),
        "expected": expected(shape, direction, device),
    }


def expected(shape: Shape, direction: str, device: torch.device) -> float | None:
    """TFLOP/s by the cost model; None where it doesn't say."""
    if direction != "forward" or device.type != "cuda":
        return None
    from coflash import planning

    try:
        plan = planning.plan(shape.problem("cuda"), planning.device_info(device), backend=backend(device))
    except NotImplementedError:
        return None
    return plan.cost.tflops if plan.cost else None


def _refuse_slow(provider: Provider, shape: Shape, device: torch.device) -> None:
    if not provider.backward:
        raise Unsupported("no backward")
    if provider.name != "coflash" or device.type != "cuda":
        return
    from coflash import planning

    plan = planning.plan(
        shape.problem("cuda", grad=True), planning.device_info(device), backend=backend(device)
    )
    if plan.backward != "kernel":
        raise Unsupported("no backward kernel: gradients take the portable path (--slow times it)")


def _record(checks: dict[str, dict[str, Any]], provider: str, what: str, verdict: check.Verdict) -> None:
    checks.setdefault(provider, {})[what] = {
        "error": verdict.error,
        "plain": verdict.plain,
        "allowed": verdict.allowed,
        "right": verdict.right,
    }


def _forward(provider: Provider, t: tensors.Tensors, checks: dict[str, dict[str, Any]]) -> timing.Timed:
    call = provider.prepare(t)
    with torch.no_grad(), call.context():
        _record(checks, provider.name, "out", check.forward(t, call.output()))
    return timing.Timed(torch.no_grad()(call.forward), call.context)


def _backward(provider: Provider, t: tensors.Tensors, checks: dict[str, dict[str, Any]]) -> timing.Timed:
    call: Call = provider.prepare(t)
    with call.context():
        out = call.output()
    inputs = (t.q, t.k, t.v)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, t.dout, retain_graph=True)

    with call.context():
        dq, dk, dv = gradients()
    for name, verdict in check.backward(t, (dq, dk, dv)).items():
        _record(checks, provider.name, name, verdict)
    return timing.Timed(gradients, call.context)


def line(point: dict[str, Any]) -> str:
    """One point in one line."""
    decode = point["shape"]["seqlen_q"] == 1
    unit, figure = ("GB/s", "kv_gb_s") if decode else ("TFLOP/s", "tflops")
    times = point["times"]
    best = max(times, key=lambda name: times[name][figure], default=None)
    parts = [f"{'*' if name == best else ''}{name} {entry[figure]:.4g}" for name, entry in times.items()]
    parts += [f"{name}: {why}" for name, why in point["notes"].items() if "no " != why[:3]]
    peers = [entry["median"] for entry in point["coflash_is_faster"].values()]
    ahead = f"  [{min(peers):.3f} x the fastest peer]" if peers else ""
    return f"{point['direction']:8} {point['name']:34} {unit}: {', '.join(parts)}{ahead}"
