"""Time and memory of the portable path on a CPU, against PyTorch.

    python tools/portable_performance.py

Time: forward plus backward at (batch 2, 4096 tokens, 8 heads, head_dim 64), float32, causal, against
`scaled_dot_product_attention`; the two take turns, and the best of the rounds counts.  Memory: what a fresh
process's resident set grows by at its peak, forward plus backward at (1, 16384, 1, 64), against the dense formula.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coflash import flash_attn_func


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "coflash": ours,
    "sdpa": sdpa,
    "dense": dense,
}


def inputs(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def forward_and_backward(name: str, leaves: list[Tensor], gradient: Tensor) -> tuple[float, float]:
    """Wall time and processor time."""
    wall, busy = time.perf_counter(), time.process_time()
    torch.autograd.grad(FUNCTIONS[name](*leaves), leaves, gradient)
    return time.perf_counter() - wall, time.process_time() - busy


def compare_time(rounds: int) -> None:
    leaves = inputs(2, 4096, 8, 64)
    gradient = torch.randn(2, 4096, 8, 64)
    best: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name in ("coflash", "sdpa"):
            times = forward_and_backward(name, leaves, gradient)
            best[name] = [min(a, b) for a, b in zip(times, best.get(name, times), strict=True)]
    for which, kind in enumerate(("wall", "processor")):
        a, b = best["coflash"][which], best["sdpa"][which]
        print(f"forward + backward, {kind} time: coflash {a:.2f} s, sdpa {b:.2f} s, ratio {a / b:.2f}")


def memory(name: str) -> None:
    """Print by how much the peak of this process grows."""
    forward_and_backward(name, inputs(1, 64, 1, 64), torch.zeros(1, 64, 1, 64))  # libraries and thread pools
    leaves = inputs(1, 16384, 1, 64)
    gradient = torch.randn(1, 16384, 1, 64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    forward_and_backward(name, leaves, gradient)
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """KiB of this process's resident set: now (VmRSS), or at its peak (VmHWM).  Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def compare_memory() -> None:
    grown = {}
    for name in ("coflash", "dense"):
        command = [sys.executable, __file__, "--memory", name]
        grown[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
    ratio = grown["coflash"] / grown["dense"]
    print(
        f"peak memory at 16384 tokens: coflash {grown['coflash']:.0f} MiB, dense {grown['dense']:.0f} MiB, "
        f"ratio {ratio:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=FUNCTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    compare_time(arguments.rounds)
    compare_memory()


if __name__ == "__main__":
    main()
