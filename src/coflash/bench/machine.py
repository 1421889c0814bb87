"""The machine under the figures: what it is, its own ceilings, and its clock and power while it was
measured.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import threading
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from coflash.bench import timing

CEILING_N = 8192
COPY_BYTES = 2**30


def describe(device: torch.device) -> dict[str, Any]:
    """What is installed, and on what."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "packages": {},
    }
    for name in ("coflash", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "flash-attn-4", "fa3-fwd"):
        try:
            found["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _smi("driver_version"),
            "power_limit_w": _smi("power.limit"),
        }
    else:
        found |= {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return found


def _smi(query: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run(
        [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def ceilings(device: torch.device) -> dict[str, float]:
    """TFLOP/s of a large matrix product on random data, and TB/s of a copy: what this machine does today."""
    if device.type == "cuda":
        n, dtype, size, repeats = CEILING_N, torch.bfloat16, COPY_BYTES, 10
    else:
        n, dtype, size, repeats = 1024, torch.float32, 2**26, 3
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    product = statistics.median(timing.series(lambda: torch.mm(a, b, out=out), device, repeats))
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = statistics.median(timing.series(lambda: target.copy_(source), device, repeats))
    return {"matmul_tflops": 2 * n**3 / product / 1e12, "copy_tb_s": 2 * size / copy / 1e12}


@dataclass
class Sampler:
    """Clock, power and temperature of a GPU, sampled in the background from nvidia-smi."""

    device: torch.device
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        tool = shutil.which("nvidia-smi")
        if self.device.type == "cuda" and tool:
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
            which = f"--id=GPU-{uuid.removeprefix('GPU-')}"
            self._process = subprocess.Popen(
                [tool, which, query, "--format=csv,noheader,nounits", "-lms", "200"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process and self._process.stdout
        for line in self._process.stdout:
            try:
                clock, power, temperature = (float(part) for part in line.split(","))
            except ValueError:
                continue  # a figure this GPU doesn't give
            self.samples.append((clock, power, temperature))

    def __exit__(self, *_: object) -> None:
        if self._process and self._thread:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def since(self, start: int) -> dict[str, float] | None:
        """Medians of the samples from number `start` on."""
        recent = self.samples[start:]
        if not recent:
            return None
        names = ("clock_mhz", "power_w", "temperature_c")
        columns = zip(*recent, strict=True)
        return {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}
