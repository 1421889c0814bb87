"""Lists of calls to compile for ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from coflash.problem import Problem

NAMES = {
    "minimal": "bfloat16, head dims 64, 128 and 256, full and causal",
    "common": "bfloat16 and float16; head dims 64, 96, 128, 192/128 and 256; full and causal; with and "
    "without gradients; packed sequences; decoding with grouped heads; window 128 with a sink",
}

_BASE = Problem(torch.bfloat16, "cuda", 128, 128, 16, 16, 2, 4096, 4096)


# Planning tells few queries of a grouped head from many, and on Blackwell few tiles from many.
LENGTHS = (1024, 16384)
FEW_QUERIES = 1


def problems(name: str) -> Iterator[Problem]:
    """The calls of a preset, at every kind of length: where the same kernel does several, it appears as often."""
    if name not in NAMES:
        raise ValueError(f"preset {name!r}: one of {', '.join(NAMES)}")
    for call in _minimal() if name == "minimal" else _common():
        for length in LENGTHS:
            for queries in (FEW_QUERIES, length) if call.group_size > 1 else (length,):
                yield replace(call, seqlen_q=queries, seqlen_k=length)


def _minimal() -> Iterator[Problem]:
    for dim in (64, 128, 256):
        for causal in (False, True):
            yield replace(_BASE, head_dim=dim, head_dim_v=dim, causal=causal)


def _common() -> Iterator[Problem]:
    for dtype in (torch.bfloat16, torch.float16):
        for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            call = replace(_BASE, dtype=dtype, head_dim=dim, head_dim_v=dim_v)
            for causal in (False, True):
                for grad in (False, True):
                    yield replace(call, causal=causal, needs_grad=grad)
                    yield replace(call, causal=causal, needs_grad=grad, packed_q=True, packed_k=True)
        for dim in (64, 128):
            for group in (4, 8):  # new tokens of each sequence, against a cache of its own length
                cached = replace(_BASE, dtype=dtype, head_dim=dim, head_dim_v=dim, has_seqused_k=True)
                for causal in (False, True):
                    yield replace(cached, nheads_q=8 * group, nheads_kv=8, causal=causal)
        for grad in (False, True):
            windowed = replace(_BASE, dtype=dtype, head_dim=64, head_dim_v=64, nheads_q=64, nheads_kv=8)
            yield replace(windowed, causal=True, window_left=127, has_sink=True, needs_grad=grad)
