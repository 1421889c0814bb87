"""A stand-in for the compiler process: writes the files of an entry in a moment, or fails in the way asked
for.

Run as a script it builds one kernel through the real cache; several of them race in test_cache.py. Its
arguments are the seconds a compilation takes and the file that every compilation adds a line to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.compiler.scale_config import ScaleConfig

from coflash.compiler import builder, cache

KERNEL = "tests.compiler.scale_kernel:Scale"


class FakeWorker:
    """Has builder.Worker's interface."""

    seconds = 0.0
    log: Path | None = None
    fail: Exception | None = None

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, job: builder.Job, folder: Path, *, report: bool = False) -> None:
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        (folder / "kernel.so").write_bytes(b"so" * 1000)
        time.sleep(self.seconds)
        if self.fail:
            raise self.fail
        for name in ("kernel.ptx", "kernel.cubin"):
            (folder / name).write_bytes(name.encode() * 1000)
        description: dict[str, Any] = {
            "kernel": job.kernel,
            "arch": job.arch,
            "function": "f",
            "symbol": "s",
            "arguments": ["x", "y"],
            "resources": [],
        }
        (folder / cache.DESCRIPTION).write_text(json.dumps(description))
        cache.seal(folder)


def build(config: ScaleConfig | None = None) -> cache.Entry:
    return builder.build(KERNEL, config or ScaleConfig(), "sm_90a")


if __name__ == "__main__":
    FakeWorker.seconds, FakeWorker.log = float(sys.argv[1]), Path(sys.argv[2])
    builder.Worker = FakeWorker  # type: ignore[misc, assignment]
    print(build().folder)
