"""Host time of a call too small for the GPU to notice, and the first call in a fresh process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch

from coflash.bench import tensors, timing
from coflash.bench.providers import Provider, Unsupported, backend
from coflash.bench.shapes import Shape

TINY = Shape("host", "b1 h4 128 x 128 d64", 1, 4, 4, 64, 64, 128, 128)


ROUNDS = 3


def tiny_calls(providers: list[Provider], device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds until a forward call returns: without gradients, and recording them; the median of several rounds."""
    rounds: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        for provider in providers:
            for name, grad in (("no_grad", False), ("grad", True)):
                if grad and not provider.backward:
                    continue
                t = tensors.make(TINY, device, grad=grad)
                try:
                    call = provider.prepare(t)
                    with torch.set_grad_enabled(grad), call.context():
                        seconds = timing.host(call.forward, device)
                except (Unsupported, NotImplementedError):
                    continue
                rounds.setdefault(provider.name, {}).setdefault(name, []).append(seconds)
    return {
        provider: {name: statistics.median(each) for name, each in kinds.items()}
        for provider, kinds in rounds.items()
    }


_FIRST = """
import time, torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
started = time.perf_counter()
{imports}
q, k, v = (torch.randn(2, 1024, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
{call}
torch.cuda.synchronize()
print(time.perf_counter() - started)
"""

_FIRST_CALLS = {
    "coflash": ("import coflash", "coflash.flash_attn_func(q, k, v, causal=True, backend='{backend}')"),
    "cudnn": (
        "from torch.nn.attention import sdpa_kernel, SDPBackend",
        "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
    "fa4": ("from flash_attn.cute import flash_attn_func", "flash_attn_func(q, k, v, causal=True)"),
}


def first_calls(providers: list[Provider], device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds from `import torch` to a first result, each in a process of its own.

    coflash's disk cache is empty at first (cold: it compiles) and then filled (warm).
    """
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as empty:
        for provider in providers:
            if provider.name not in _FIRST_CALLS:
                continue
            imports, call = _FIRST_CALLS[provider.name]
            code = _FIRST.format(imports=imports, call=call.format(backend=backend(device)))
            kinds = ("cold", "warm") if provider.name == "coflash" else ("first",)
            env = {**os.environ, "COFLASH_CACHE": empty, "COFLASH_CACHE_READONLY": ""}
            for kind in kinds:
                done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
                if done.returncode == 0:
                    found.setdefault(provider.name, {})[kind] = float(done.stdout.split()[-1])
    return found


def say(found: dict[str, dict[str, float]], what: str, unit: str, scale: float) -> str:
    rows: list[Any] = [
        f"{name} " + ", ".join(f"{kind} {seconds * scale:.3g}" for kind, seconds in kinds.items())
        for name, kinds in found.items()
    ]
    return f"{what} ({unit}): " + "; ".join(rows)
