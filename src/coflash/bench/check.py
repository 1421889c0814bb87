"""Is a result right? Before a provider is timed, a sample of its output is held against float64 attention.

The sample is of whole rows (for dq and the output) and whole columns (for dk and dv) of two heads, so that
a long sequence needs no quadratic memory. The rule is the package's own: at most twice the error that
plain PyTorch operations in the input's type make on the same rows, plus one rounding of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coflash.bench.shapes import Shape
from coflash.bench.tensors import Tensors

ROWS = 128
CHUNK = 2048  # query rows at a time, where all of them are needed


@dataclass(frozen=True)
class Verdict:
    """Largest errors of one tensor on the sample: a provider's, plain PyTorch's, and what is allowed."""

    error: float
    plain: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # NaN is never right


@dataclass(frozen=True)
class _Sequence:
    """One head of one sequence: its rows in the tensors, and its operands."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    rows: slice
    batch: int
    head: int


def forward(t: Tensors, out: Tensor) -> Verdict:
    """The output's verdict."""
    worst = Verdict(0.0, 0.0, math.inf)
    for s in _sample(t):
        rows = _some(s.q.shape[0], t.q.device)
        exact = _rows(t.shape, s, rows, torch.float64, t.scale)[0]
        plain = _rows(t.shape, s, rows, t.q.dtype, t.scale)[0]
        worst = _worse(worst, _verdict(_slice(t, out, s)[rows], exact, plain))
    return worst


def backward(t: Tensors, gradients: tuple[Tensor, Tensor, Tensor]) -> dict[str, Verdict]:
    """Verdicts of dq, dk and dv."""
    dq, dk, dv = gradients
    worst = {name: Verdict(0.0, 0.0, math.inf) for name in ("dq", "dk", "dv")}
    group = t.shape.heads // t.shape.heads_kv
    for s in _sample(t):
        rows = _some(s.q.shape[0], t.q.device)
        exact, plain = (_dq(t, s, rows, dtype) for dtype in (torch.float64, t.q.dtype))
        worst["dq"] = _worse(worst["dq"], _verdict(_slice(t, dq, s)[rows], exact, plain))
        columns = _some(s.k.shape[0], t.q.device)
        first = s.head // group * group
        heads = [_sequence(t, s.batch, head) for head in range(first, first + group)]
        exact_kv, plain_kv = (_dk_dv(t, heads, columns, dtype) for dtype in (torch.float64, t.q.dtype))
        for name, full, e, p in zip(("dk", "dv"), (dk, dv), exact_kv, plain_kv, strict=True):
            worst[name] = _worse(worst[name], _verdict(_slice(t, full, s, group)[columns], e, p))
    return worst


def _verdict(got: Tensor, exact: Tensor, plain: Tensor) -> Verdict:
    error = float((got.double() - exact).abs().max())
    baseline = float((plain.double() - exact).abs().max())
    rounding = float(exact.abs().max()) * torch.finfo(got.dtype).eps
    return Verdict(error, baseline, 2 * baseline + rounding)


def _worse(a: Verdict, b: Verdict) -> Verdict:
    """The one further beyond, or closer to, what is allowed."""
    return a if a.allowed != math.inf and a.error / a.allowed > b.error / b.allowed else b


def _sample(t: Tensors) -> list[_Sequence]:
    s = t.shape
    places = [(0, 0), (s.batch - 1, s.heads - 1)]
    return [_sequence(t, batch, head) for batch, head in dict.fromkeys(places)]


def _sequence(t: Tensors, batch: int, head: int) -> _Sequence:
    s = t.shape
    kv = head // (s.heads // s.heads_kv)
    if s.lengths:
        rows = slice(s.cu_seqlens[batch], s.cu_seqlens[batch + 1])
        q, k, v = t.q[rows, head], t.k[rows, kv], t.v[rows, kv]
    else:
        rows = slice(None)
        q, k, v = t.q[batch, :, head], t.k[batch, :, kv], t.v[batch, :, kv]
    sink = None if t.sink is None else t.sink[head]
    return _Sequence(q.detach(), k.detach(), v.detach(), sink, rows, batch, head)


def _slice(t: Tensors, full: Tensor, s: _Sequence, group: int = 1) -> Tensor:
    head = s.head // group
    return full[s.rows, head] if t.shape.lengths else full[s.batch, :, head]


def _some(length: int, device: torch.device) -> Tensor:
    """First and last places and random ones between."""
    if length <= ROWS:
        return torch.arange(length, device=device)
    generator = torch.Generator().manual_seed(length)
    middle = torch.randperm(length, generator=generator)[: ROWS // 2]
    ends = torch.cat([torch.arange(ROWS // 4), torch.arange(length - ROWS // 4, length)])
    return torch.cat([ends, middle]).unique().to(device)


def _rows(
    shape: Shape, s: _Sequence, rows: Tensor, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor]:
    """Output rows, and the weights they are made of, all in `dtype`."""
    scores = (s.q[rows].to(dtype) @ s.k.to(dtype).T) * scale
    scores = scores.masked_fill(~_visible(shape, s, rows), -math.inf)
    if s.sink is not None:
        scores = torch.cat([scores, s.sink.to(dtype).expand(len(rows), 1)], dim=1)
    weights = torch.softmax(scores, dim=1)[:, : s.k.shape[0]]
    return weights @ s.v.to(dtype), weights


def _visible(shape: Shape, s: _Sequence, rows: Tensor) -> Tensor:
    length_q, length_k = s.q.shape[0], s.k.shape[0]
    left, right = shape.window or (length_k + length_q, length_k + length_q)
    if shape.causal:
        right = min(right, 0)
    diagonal = rows[:, None] + (length_k - length_q)
    keys = torch.arange(length_k, device=rows.device)[None]
    return (keys <= diagonal + right) & (keys >= diagonal - left)


def _ds(t: Tensors, s: _Sequence, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradient of the scores, and dout of some rows."""
    out, weights = _rows(t.shape, s, rows, dtype, t.scale)
    dout = _slice(t, t.dout, s)[rows].to(dtype)
    delta = (dout * out).sum(1, keepdim=True)
    return weights, weights * (dout @ s.v.to(dtype).T - delta), dout


def _dq(t: Tensors, s: _Sequence, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return (_ds(t, s, rows, dtype)[1] @ s.k.to(dtype)) * t.scale


def _dk_dv(t: Tensors, heads: list[_Sequence], columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Some rows of dk and dv, summed over the query heads that share them."""
    keys = len(columns)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    dk = torch.zeros(keys, t.shape.head_dim, dtype=accumulate, device=t.q.device)
    dv = torch.zeros(keys, t.shape.head_dim_v, dtype=accumulate, device=t.q.device)
    for s in heads:
        for first in range(0, s.q.shape[0], CHUNK):
            rows = torch.arange(first, min(first + CHUNK, s.q.shape[0]), device=t.q.device)
            weights, ds, dout = _ds(t, s, rows, dtype)
            dk += (ds[:, columns].T @ s.q[rows].to(dtype)) * t.scale
            dv += weights[:, columns].T @ dout
    return dk.to(dtype), dv.to(dtype)
