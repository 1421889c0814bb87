"""Attention by the dense formula, one sequence at a time, in any dtype: what every path is held against.

Written from the definition of the options alone; it shares no code with `coflash`.  In float64 it is the
truth; in the inputs' own dtype it is "plain PyTorch", whose error the error rule takes as its measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Options:
    """The options of one call, as the public functions name them."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    keep: Tensor | None = field(default=None, repr=False)  # (batch, nheads_q, seqlen_q, seqlen_k)

    def arguments(self) -> dict[str, Any]:
        names = ("softmax_scale", "causal", "window_size", "softcap", "score_mod", "mask_mod")
        found = {name: getattr(self, name) for name in names}
        if self.dropout_p:
            found |= {"dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed}
        return found


@dataclass
class Sequence:
    """One sequence's result, and how large the terms are whose sums its gradients are."""

    out: Tensor  # (seqlen_q, nheads_q, head_dim_v)
    lse: Tensor  # (nheads_q, seqlen_q)
    weights: Tensor  # (nheads_q, seqlen_q, seqlen_k)
    raw: Tensor
    transformed: Tensor
    relative: Tensor
    sink_weight: Tensor | None
    keys: Tensor  # (nheads_q, seqlen_k, head_dim)
    values: Tensor
    scale: float
    kept: Tensor | None


def sequence(
    q: Tensor, k: Tensor, v: Tensor, b: int, o: Options, sink: Tensor | None, alibi: Tensor | None
) -> Sequence:
    """`softmax(mask(transform(scale Q K^T))) V` for q, k, v of `(tokens, heads, dim)`."""
    len_q, heads, dim = q.shape
    len_k, group = k.shape[0], heads // k.shape[1]
    keys = k.repeat_interleave(group, dim=1).transpose(0, 1)
    values = v.repeat_interleave(group, dim=1).transpose(0, 1)
    scale = dim**-0.5 if o.softmax_scale is None else o.softmax_scale
    raw = (q.transpose(0, 1) @ keys.transpose(1, 2)) * scale

    h = torch.arange(heads)[:, None, None]
    i = torch.arange(len_q)[:, None]
    j = torch.arange(len_k)
    scores = raw
    if o.softcap:
        scores = o.softcap * torch.tanh(scores / o.softcap)
    relative = j - (i + len_k - len_q)
    if alibi is not None:
        slopes = (alibi if alibi.dim() == 1 else alibi[b]).to(scores.dtype)
        scores = scores - slopes[:, None, None] * relative.abs()
    if o.score_mod is not None and scores.numel():
        scores = o.score_mod(scores, torch.tensor(b), h, i, j).to(scores.dtype)
    transformed = scores

    seen = torch.ones(heads, len_q, len_k, dtype=torch.bool)
    left, right = (None if side == -1 else side for side in o.window_size)
    if o.causal:
        seen &= relative <= 0
    if left is not None:
        seen &= relative >= -left
    if right is not None:
        seen &= relative <= right
    if o.mask_mod is not None and seen.numel():
        seen &= o.mask_mod(torch.tensor(b), h, i, j)
    scores = scores.masked_fill(~seen, -math.inf)

    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(heads, len_q, 1)
        scores = torch.cat((column, scores), dim=-1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(blind, 0.0), -1) if scores.shape[-1] else raw.sum(-1)
    lse = lse.masked_fill(blind[..., 0], -math.inf)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    sink_weight = None
    if sink is not None:
        sink_weight, weights = weights[..., :1], weights[..., 1:]
    kept = None if o.keep is None else o.keep[b, :, :len_q, :len_k]
    dropped = weights if kept is None else weights * kept / (1 - o.dropout_p)
    out = (dropped @ values).transpose(0, 1)
    return Sequence(out, lse, weights, raw, transformed, relative, sink_weight, keys, values, scale, kept)


def magnitudes(
    s: Sequence, q: Tensor, group: int, dout: Tensor, dlse: Tensor, o: Options, captured: list[Tensor]
) -> dict[str, Tensor]:
    """Sums of absolute values of the terms that make up each gradient: the scale of its unavoidable rounding."""
    p = s.weights.detach()
    do = dout.transpose(0, 1)
    dp = (do @ s.values.detach().transpose(1, 2)).abs()
    dropped = p
    if s.kept is not None:
        factor = s.kept / (1 - o.dropout_p)
        dp, dropped = dp * factor, p * factor
    row = (do.abs() * s.out.detach().transpose(0, 1).abs()).sum(-1, keepdim=True) + dlse.abs()[..., None]
    ds = p * (dp + row)
    (slope,) = torch.autograd.grad(s.transformed.sum(), s.raw, retain_graph=True, allow_unused=True)
    draw = ds * (torch.zeros_like(ds) if slope is None else slope.abs()) * abs(s.scale)
    fold = (-1, group)
    dkeys = draw.transpose(1, 2) @ q.detach().abs().transpose(0, 1)
    found = {
        "q": (draw @ s.keys.detach().abs()).transpose(0, 1),
        "k": dkeys.unflatten(0, fold).sum(1).transpose(0, 1),
        "v": (dropped.transpose(1, 2) @ do.abs()).unflatten(0, fold).sum(1).transpose(0, 1),
        "alibi_slopes": (ds * s.relative.abs()).sum((1, 2)),
    }
    if s.sink_weight is not None:
        found["sink"] = (s.sink_weight.detach() * row).sum((1, 2))
    for n, tensor in enumerate(captured):
        (part,) = torch.autograd.grad(s.transformed, tensor, ds, retain_graph=True, allow_unused=True)
        found[f"captured{n}"] = torch.zeros_like(tensor) if part is None else part.abs()
    return found
