"""Progress on one line of a terminal, or on a few lines of a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Counts to `total`: redrawn ten times a second on a terminal, ten lines in all elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.started = self.drawn = time.perf_counter()
        self.terminal = sys.stdout.isatty()
        self.done = self.tenths = 0

    def __enter__(self) -> Progress:
        return self

    def step(self, note: str = "") -> None:
        self.done += 1
        now = time.perf_counter()
        last = self.done == self.total
        if self.terminal:
            if last or now - self.drawn > 0.1:
                self.drawn = now
                bar = "#" * (20 * self.done // self.total)
                print(
                    f"\r  {self.label:28} [{bar:20}] {self.done}/{self.total} {note}\033[K",
                    end="",
                    flush=True,
                )
        elif last or 10 * self.done // self.total > self.tenths:
            self.tenths = 10 * self.done // self.total
            print(f"  {self.label:28} {self.done}/{self.total} {note}", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.terminal:
            print()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started
