"""A progress bar for many compilations: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import IO

from coflash.compiler.builder import Job
from coflash.compiler.cache import Entry

WIDTH = 30


class Progress:
    """Call it with each job that is done."""

    def __init__(self, total: int, stream: IO[str] | None = None) -> None:
        self._total = total
        self._done = 0
        self._stream = stream or sys.stderr
        self._started = time.perf_counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream.isatty():
            self._stream.write("\n")

    def __call__(self, job: Job, entry: Entry) -> None:
        with self._lock:
            self._done += 1
            passed = time.perf_counter() - self._started
            filled = WIDTH * self._done // self._total
            bar = "#" * filled + "." * (WIDTH - filled)
            line = f"[{bar}] {self._done}/{self._total} {passed:.0f} s  {job.kernel} {job.arch}"
            if self._stream.isatty():
                self._stream.write(f"\r\033[K{line}")
            else:
                self._stream.write(line + "\n")
            self._stream.flush()
