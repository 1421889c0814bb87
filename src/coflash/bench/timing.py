"""Clocks: device time by events, host time by the processor's clock, in rounds that interleave who is
timed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from coflash.bench.providers import Context

WARM_UP_SECONDS = 0.1


@dataclass(frozen=True)
class Timed:
    """Something to time, in the context it needs."""

    call: Callable[[], object]
    context: Context


def rounds(
    subjects: Mapping[str, Timed], device: torch.device, count: int, repeats: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of one call: for each subject one median for each round.

    Each round times every subject once, in an order drawn anew, so that a clock that drifts with
    temperature, or with the neighbour's power, meets all of them alike.
    """
    rng = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(count):
        order = list(subjects)
        rng.shuffle(order)
        for name in order:
            with subjects[name].context():
                found[name].append(statistics.median(series(subjects[name].call, device, repeats)))
    return found


def series(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one that isn't counted."""
    call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, end in zip(marks[::2], marks[1::2], strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [s.elapsed_time(e) * 1e-3 for s, e in zip(marks[::2], marks[1::2], strict=True)]


def host(call: Callable[[], object], device: torch.device, batches: int = 20, calls: int = 50) -> float:
    """Seconds of processor time until a call returns; the device must be faster than that to keep up.

    The median over batches, each short enough that the device's queue never fills and makes the call wait; after
    a warm-up long enough for the processor's clock to rise.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    until = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < until:
        call()
        synchronize()
    found = []
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - started) / calls)
        synchronize()
    return statistics.median(found)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster `ours` is: median, least and most over the rounds, paired within each."""
    each = [their / our for our, their in zip(ours, theirs, strict=True)]
    return statistics.median(each), min(each), max(each)
