"""Calls of the Hopper forward kernel, their operands, and attention in float64 to hold them against."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from coflash.kernels.sm90.config import ForwardConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call: what the config leaves dynamic, beside the config's fields in `options`."""

    lengths_q: tuple[int, ...]  # of each sequence
    lengths_k: tuple[int, ...]
    heads_q: int = 2
    heads_kv: int = 1
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    inputs: str = "normal"  # see `keys_and_queries`
    scale: float | None = None
    slack: int = 0  # extra room behind the lengths where seqused says how much of it exists
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> ForwardConfig:
        options = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, **self.options, **more}
        if options["dtype"] == "fp16":
            options.setdefault("softmax", "online")
        return ForwardConfig(
            bounded_left=self.window_left is not None,
            bounded_right=self.window_right is not None,
            softcap=self.softcap != 0.0,
            **options,
        )


@dataclass
class Call:
    """The operands of a case by argument name, and how to find each sequence in them."""

    case: Case
    config: ForwardConfig
    arguments: dict[str, Any]

    def sequence(self, name: str, b: int) -> torch.Tensor:
        """(length, heads, dim) of one sequence."""
        case, x = self.case, self.arguments[name]
        queries = name in ("q", "out")
        lengths = case.lengths_q if queries else case.lengths_k
        if self.config.packed_q if queries else self.config.packed_k:
            first = self.arguments["cu_seqlens_q" if queries else "cu_seqlens_k"][b]
            return x[first : first + lengths[b]]
        return x[b, : lengths[b]]

    def lse(self, b: int) -> torch.Tensor:
        """(heads, length) of one sequence."""
        x = self.arguments["lse"]
        if self.config.packed_q:
            first = self.arguments["cu_seqlens_q"][b]
            return x[:, first : first + self.case.lengths_q[b]]
        return x[b, :, : self.case.lengths_q[b]]


def make(case: Case, config: ForwardConfig, seed: int = 0, device: str = "cpu", blocks: int = 132) -> Call:
    """Operands, with NaN wherever the kernel must not look and in what it must write."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[config.dtype]
    batch = len(case.lengths_q)

    def place(lengths, heads, dim, packed, used, fill):
        """A tensor with `fill(b)` in each sequence's rows and NaN elsewhere, and its cumulative lengths."""
        spans = [n + (case.slack if used else 0) for n in lengths]
        if packed:
            starts = [0, *torch.tensor(spans).cumsum(0).tolist()]
            x = torch.full((starts[-1], heads, dim), math.nan, dtype=dtype)
            for b, n in enumerate(lengths):
                x[starts[b] : starts[b] + n] = fill(b)
            return x, torch.tensor(starts, dtype=torch.int32), max(spans, default=0)
        x = torch.full((batch, max(spans, default=0), heads, dim), math.nan, dtype=dtype)
        for b, n in enumerate(lengths):
            x[b, :n] = fill(b)
        return x, None, max(spans, default=0)

    drawn = [keys_and_queries(case, config, b, generator) for b in range(batch)]
    q, cu_q, max_q = place(
        case.lengths_q,
        case.heads_q,
        config.head_dim,
        config.packed_q,
        config.seqused_q,
        lambda b: drawn[b][0],
    )
    k, cu_k, max_k = place(
        case.lengths_k,
        case.heads_kv,
        config.head_dim,
        config.packed_k,
        config.seqused_k,
        lambda b: drawn[b][1],
    )
    v, _, _ = place(
        case.lengths_k,
        case.heads_kv,
        config.head_dim_v,
        config.packed_k,
        config.seqused_k,
        lambda b: torch.randn(case.lengths_k[b], case.heads_kv, config.head_dim_v, generator=generator),
    )
    out = torch.full((*q.shape[:-1], config.head_dim_v), math.nan, dtype=dtype)
    lse_shape = (case.heads_q, q.shape[0]) if config.packed_q else (batch, case.heads_q, q.shape[1])
    everything = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": torch.full(lse_shape, math.nan),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "seqused_q": torch.tensor(case.lengths_q, dtype=torch.int32),
        "seqused_k": torch.tensor(case.lengths_k, dtype=torch.int32),
        "sink": torch.randn(case.heads_q, generator=generator),
        "tile_counter": torch.zeros(4, dtype=torch.int32),
    }
    arguments = {n: x if x is None else x.to(device) for n, x in everything.items()}
    arguments.update(
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=case.scale or config.head_dim**-0.5,
        window_left=case.window_left,
        window_right=case.window_right,
        softcap=case.softcap,
        num_blocks=blocks,
    )
    return Call(case, config, arguments)


def keys_and_queries(case: Case, config: ForwardConfig, b: int, generator: torch.Generator):
    """Queries and keys of a sequence, drawn in the way `case.inputs` names.

    normal: independent.  rising N: from one block of 64 keys to the next *toward the start*, the order in which
    the kernel goes, the largest score grows by N (natural-log units).  late: one key at the very start scores 60
    above all others.  huge: scores in the thousands.  flat: all scores equal."""
    q = torch.randn(case.lengths_q[b], case.heads_q, config.head_dim, generator=generator)
    k = torch.randn(case.lengths_k[b], case.heads_kv, config.head_dim, generator=generator)
    kind, _, amount = case.inputs.partition(" ")
    scale = case.scale or config.head_dim**-0.5
    if kind == "rising":
        # dimension 0 of q is 8, so that a key's dimension 0 adds 8 * scale times itself to every score
        q[..., 0] = 8.0
        blocks = torch.arange(case.lengths_k[b] - 1, -1, -1) // 64
        k[..., 0] = (float(amount) * blocks / (8.0 * scale))[:, None]
    elif kind == "late":
        q[..., 0] = 8.0
        k[..., 0] = 0.0
        k[:1, :, 0] = float(amount or 60) / (8.0 * scale)
    elif kind == "huge":
        q, k = q * 30, k * 30
    elif kind == "flat":
        k = k[:1].expand_as(k).clone() if len(k) else k
    elif kind != "normal":
        raise ValueError(kind)
    return q, k


def masked_scores(call: Call, b: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (heads, queries, keys) of sequence b, -inf where unseen, and V (heads, keys, dim)."""
    case, config = call.case, call.config
    q, k, v = (call.sequence(n, b).to(dtype).transpose(0, 1) for n in ("q", "k", "v"))
    group = case.heads_q // case.heads_kv
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * call.arguments["softmax_scale"]
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    n_q, n_k = q.shape[1], k.shape[1]
    i = torch.arange(n_q, device=q.device)[:, None] + n_k - n_q
    j = torch.arange(n_k, device=q.device)[None]
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    if case.window_right is not None:
        seen &= j <= i + case.window_right
    if case.window_left is not None:
        seen &= j >= i - case.window_left
    scores = scores.masked_fill(~seen, -math.inf)
    if config.sink:
        sink = call.arguments["sink"].to(dtype)[:, None, None].expand(-1, n_q, 1)
        scores = torch.cat([scores, sink], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    elif n_k == 0:  # a key that nobody sees, so that maxima exist
        scores = torch.full((*scores.shape[:-1], 1), -math.inf, dtype=dtype, device=q.device)
        v = torch.zeros((v.shape[0], 1, v.shape[2]), dtype=dtype, device=q.device)
    return scores, v


def reference(call: Call, b: int, dtype: torch.dtype = torch.float64):
    """Attention of sequence b by plain operations in `dtype`: out (queries, heads, dim) and lse (heads, queries)."""
    scores, v = masked_scores(call, b, dtype)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return (weights @ v).transpose(0, 1), lse


def classic(call: Call, b: int) -> torch.Tensor:
    """The classic softmax in the kernel's precision: float32 scores and sums, P = exp(score - maximum) in 16 bits."""
    dtype = DTYPES[call.config.dtype]
    scores, v = masked_scores(call, b, torch.float32)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    out = (p.to(dtype).float() @ v) / torch.where(total == 0, 1.0, total)
    return out.to(dtype).transpose(0, 1)


@dataclass
class Errors:
    """How far a result is off; up to 1 is allowed of the first two, up to 1e-4 of the last."""

    largest: float  # |out - exact| over twice plain PyTorch's in the input type plus one rounding
    mean: float  # mean |out - exact| over 1.25 times the classic softmax's
    lse: float

    @property
    def ok(self) -> bool:
        return self.largest <= 1 and self.mean <= 1 and self.lse <= 1e-4


def errors(call: Call) -> Errors:
    result = Errors(0.0, 0.0, 0.0)
    mine, theirs, rows = 0.0, 0.0, 0
    for b in range(len(call.case.lengths_q)):
        if not call.case.lengths_q[b]:
            continue
        exact, lse = reference(call, b)
        plain, _ = reference(call, b, DTYPES[call.config.dtype])
        got = call.sequence("out", b).double()
        if not torch.isfinite(got).all():
            return Errors(math.inf, math.inf, math.inf)
        rounding = torch.finfo(DTYPES[call.config.dtype]).eps / 2
        allowed = 2 * (plain.double() - exact).abs().max() + rounding * exact.abs().max() + 1e-7
        result.largest = max(result.largest, ((got - exact).abs().max() / allowed).item())
        mine += (got - exact).abs().sum().item()
        rows += got.shape[0] * got.shape[1]
        theirs += (classic(call, b).double() - exact).abs().sum().item()
        if call.config.lse:
            stored = call.lse(b).double()
            off = (stored - lse).abs() / lse.abs().clamp(min=1.0)
            off = torch.where(stored == lse, 0.0, off)
            result.lse = max(result.lse, off.nan_to_num(nan=math.inf).max().item())
    luck = 1 + rows**-0.5 if rows else 1.0  # of a few rows' roundings
    result.mean = mine / (1.25 * luck * theirs + 1e-9)
    return result


def replace(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)
