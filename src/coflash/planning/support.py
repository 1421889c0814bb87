"""What each kernel takes. What it doesn't is refused by name; no call is quietly made slow or wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from coflash.problem import Problem


def refusals(problem: Problem, arch: str) -> list[str]:
    """Why the forward kernel of an architecture can't take a call; empty where it can."""
    return list(_sm90(problem) if arch == "sm_90a" else _sm100(problem))


def _common(p: Problem) -> Iterator[str]:
    if p.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype {str(p.dtype).removeprefix('torch.')} (it takes bfloat16 and float16)"
    for name, dim in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
        if dim % 8 or not 8 <= dim <= 256:
            yield f"{name}={dim} (it takes multiples of 8 up to 256)"
    for name, used in (
        ("page_table", p.paged),
        ("cache_batch_idx", p.has_cache_batch_idx),
        ("cache_leftpad", p.has_leftpad),
        ("score_mod", p.score_mod is not None),
        ("mask_mod", p.mask_mod is not None),
        ("block_mask", p.block_mask_size is not None),
        ("alibi_slopes", p.has_alibi),
        ("dropout_p", p.dropout_p > 0.0),
    ):
        if used:
            yield name


_sm90 = _common
_sm100 = _common
