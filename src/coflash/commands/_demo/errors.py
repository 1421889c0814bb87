"""Forward and backward error of every option, against float64 and beside plain PyTorch in bfloat16.

The formula below is written without a look at coflash's own implementation: it is what the option means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import coflash
from coflash.commands._demo.progress import Progress

Tensors = dict[str, Tensor]
Function = Callable[..., Any]
BATCH, SEQLEN_Q, SEQLEN_K, HEADS, DIM = 2, 96, 128, 4, 64
DTYPE = torch.bfloat16
LENGTHS = [
    (17, 33),
    (40, 0),
    (0, 21),
    (39, 74),
]  # (queries, keys) of packed sequences; they add up to the above


@dataclass(frozen=True)
class Case:
    option: str
    inputs: Tensors  # float64; those named in `gradients` are differentiated
    ours: Function  # (inputs, backend) -> output
    plain: Function  # inputs -> output, in whatever precision the inputs have
    gradients: tuple[str, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Errors:
    """Largest errors against float64."""

    ours: float
    plain: float
    rounding: float  # of the result's largest element to bfloat16

    @property
    def within(self) -> bool:
        return self.ours <= 2 * self.plain + self.rounding

    @property
    def share(self) -> float:
        """The error as a share of what the rule allows."""
        allowed = 2 * self.plain + self.rounding
        return self.ours / allowed if allowed else float(self.ours > 0)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    kept: Tensor | None = None,
    with_lse: bool = False,
) -> Any:
    """softmax(scores + mask) V of (batch, seqlen, nheads, head_dim) tensors, the matrix of scores and all."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    batch, heads, rows, columns = scores.shape
    b = torch.arange(batch, device=q.device)[:, None, None, None]
    h = torch.arange(heads, device=q.device)[:, None, None]
    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(columns, device=q.device)
    offset = columns - rows
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[h] * (i + offset - j).abs()
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    left, right = window
    visible = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        visible &= j <= i + offset
    if left is not None:
        visible &= j >= i + offset - left
    if right is not None:
        visible &= j <= i + offset + right
    if mask_mod is not None:
        visible &= mask_mod(b, h, i, j)
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :columns]
    weights = weights.masked_fill(~visible, 0.0)
    if kept is not None:
        weights = weights * kept.to(weights.dtype)
    out = (weights @ v).transpose(1, 2)
    return (out, scores.logsumexp(-1)) if with_lse else out


# -------------------------------------------------------------------------------------------------- cases


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _qkv(heads: int = HEADS, heads_kv: int = HEADS, dim: int = DIM, dim_v: int = DIM) -> Tensors:
    return {
        "q": _random(BATCH, SEQLEN_Q, heads, dim),
        "k": _random(BATCH, SEQLEN_K, heads_kv, dim),
        "v": _random(BATCH, SEQLEN_K, heads_kv, dim_v),
    }


def _same(
    option: str, inputs: Tensors | None = None, ours: dict[str, Any] | None = None, **plain: Any
) -> Case:
    """A case of `flash_attn_func` whose options the formula names alike, or as `ours` says."""
    options = plain if ours is None else ours
    return Case(
        option,
        inputs or _qkv(),
        lambda x, backend: coflash.flash_attn_func(x["q"], x["k"], x["v"], backend=backend, **options),
        lambda x: formula(x["q"], x["k"], x["v"], **plain),
    )


def cases(device: torch.device) -> list[Case]:
    torch.manual_seed(0)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=device, dtype=torch.float32)

    def stripes(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + j) % 3 != 0

    sliding: dict[str, Any] = {"causal": True, "window": (32, None)}
    return [
        _same("none"),
        _same("softmax_scale", scale=0.3, ours={"softmax_scale": 0.3}),
        _same("causal", causal=True),
        _same("window_size", window=(24, 8), ours={"window_size": (24, 8)}),
        _same("causal, window_size", **sliding, ours={"causal": True, "window_size": (32, None)}),
        _same("softcap", softcap=2.0),
        _learnable_sink(),
        _score_mod(),
        _same("mask_mod", mask_mod=stripes),
        _same("alibi_slopes", slopes=slopes, ours={"alibi_slopes": slopes}),
        _same("grouped heads", _qkv(8, 2), causal=True),
        _same("head_dim 40, head_dim_v 24", _qkv(dim=40, dim_v=24)),
        _dropout(device),
        _lse(),
        _same("deterministic", causal=True, ours={"causal": True, "deterministic": True}),
        _packed(device),
        _seqused(device),
        _paged(device),
        _append_with_rotary(device),
        _together(),
    ]


def _learnable_sink() -> Case:
    return Case(
        "learnable_sink",
        {**_qkv(), "sink": _random(HEADS)},
        lambda x, backend: coflash.flash_attn_func(
            x["q"], x["k"], x["v"], learnable_sink=x["sink"], backend=backend
        ),
        lambda x: formula(x["q"], x["k"], x["v"], sink=x["sink"]),
        ("q", "k", "v", "sink"),
    )


def _score_mod() -> Case:
    """A learned bias for each distance, captured by the function, with its gradient."""

    def biased(x: Tensors) -> Callable[..., Tensor]:
        bias = x["bias"]
        return lambda score, b, h, i, j: score + bias[h, i - j + SEQLEN_K].to(score.dtype)

    return Case(
        "score_mod",
        {**_qkv(), "bias": _random(HEADS, SEQLEN_Q + SEQLEN_K)},
        lambda x, backend: coflash.flash_attn_func(
            x["q"], x["k"], x["v"], score_mod=biased(x), backend=backend
        ),
        lambda x: formula(x["q"], x["k"], x["v"], score_mod=biased(x)),
        ("q", "k", "v", "bias"),
    )


def _dropout(device: torch.device) -> Case:
    """With V the identity, the output is the matrix of weights: it shows which ones a seed drops."""
    options: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 7}
    inputs = _qkv()
    identity = torch.eye(SEQLEN_K, device=device)[None, :, None].expand(BATCH, -1, HEADS, -1)
    q, k = (inputs[name].to(device, torch.float32) for name in ("q", "k"))
    weights = coflash.flash_attn_func(q, k, identity, backend="portable", **options)
    kept = (cast(Tensor, weights) != 0).transpose(1, 2) / 0.75
    return _same("dropout_p", inputs, ours=options, kept=kept)


def _lse() -> Case:
    """Output and log-sum-exp in one tensor, so that gradients flow through both."""

    def ours(x: Tensors, backend: Any) -> Any:
        out, lse = coflash.flash_attn_func(
            x["q"], x["k"], x["v"], causal=True, return_lse=True, backend=backend
        )
        return torch.cat([out.to(lse.dtype), lse.transpose(1, 2)[..., None]], dim=-1)

    def plain(x: Tensors) -> Any:
        out, lse = formula(x["q"], x["k"], x["v"], causal=True, with_lse=True)
        return torch.cat([out, lse.transpose(1, 2)[..., None]], dim=-1)

    return Case("return_lse", _qkv(), ours, plain)


def _packed(device: torch.device) -> Case:
    ends = torch.tensor([[0, 0], *LENGTHS]).cumsum(0).to(device, torch.int32)
    cu_q, cu_k = ends[:, 0].contiguous(), ends[:, 1].contiguous()

    def ours(x: Tensors, backend: Any) -> Any:
        return coflash.flash_attn_varlen_func(
            x["q"],
            x["k"],
            x["v"],
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max(n for n, _ in LENGTHS),
            max_seqlen_k=max(n for _, n in LENGTHS),
            causal=True,
            backend=backend,
        )

    def plain(x: Tensors) -> Any:
        pieces = zip(
            *(x[n].split([a[m] for a in LENGTHS]) for n, m in (("q", 0), ("k", 1), ("v", 1))), strict=True
        )
        return torch.cat([formula(*(t[None] for t in piece), causal=True)[0] for piece in pieces])

    inputs = {name: t[0].contiguous() for name, t in _qkv().items()}
    return Case("cu_seqlens", inputs, ours, plain)


def _seqused(device: torch.device) -> Case:
    used = torch.tensor([50, 128], dtype=torch.int32, device=device)

    def ours(x: Tensors, backend: Any) -> Any:
        return coflash.flash_attn_varlen_func(x["q"], x["k"], x["v"], seqused_k=used, backend=backend)

    return Case("seqused_k", _qkv(), ours, lambda x: _each_used(x, [50, 128]))


def _each_used(x: Tensors, lengths: list[int], **options: Any) -> Tensor:
    """Each sequence by itself, with the first `lengths[b]` keys."""
    rows = [
        formula(x["q"][b : b + 1], x["k"][b : b + 1, :n], x["v"][b : b + 1, :n], **options)
        for b, n in enumerate(lengths)
    ]
    return torch.cat(rows)


def _paged(device: torch.device) -> Case:
    page = 16
    table = torch.randperm(BATCH * SEQLEN_K // page).view(BATCH, -1).to(device, torch.int32)
    used = torch.tensor([100, 120], dtype=torch.int32, device=device)

    def pages(t: Tensor) -> Tensor:
        scattered = torch.empty_like(t).view(-1, page, *t.shape[2:])
        scattered[table.flatten().long()] = t.reshape(-1, page, *t.shape[2:])
        return scattered

    def ours(x: Tensors, backend: Any) -> Any:
        return coflash.flash_attn_varlen_func(
            x["q"],
            pages(x["k"]),
            pages(x["v"]),
            seqused_k=used,
            page_table=table,
            causal=True,
            backend=backend,
        )

    return Case("page_table", _qkv(), ours, lambda x: _each_used(x, [100, 120], causal=True), ())


def _append_with_rotary(device: torch.device) -> Case:
    """New keys are rotated and written behind the cached ones; queries are rotated to the same positions."""
    cached, new = SEQLEN_K - SEQLEN_Q, SEQLEN_Q
    angles = torch.arange(SEQLEN_K)[:, None] * 100.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    angles = angles.to(device, torch.float64)

    def ours(x: Tensors, backend: Any) -> Any:
        dtype = x["q"].dtype
        return coflash.flash_attn_with_kvcache(
            x["q"],
            x["k"].clone(),
            x["v"].clone(),
            k=x["k"][:, cached:],
            v=x["v"][:, cached:],
            rotary_cos=angles.cos().to(dtype),
            rotary_sin=angles.sin().to(dtype),
            rotary_interleaved=False,
            cache_seqlens=cached,
            causal=True,
            backend=backend,
        )

    def rotate(t: Tensor) -> Tensor:
        cos, sin = (f(angles[cached : cached + new]).to(t.dtype)[:, None] for f in (torch.cos, torch.sin))
        first, second = t.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def plain(x: Tensors) -> Any:
        k = torch.cat([x["k"][:, :cached], rotate(x["k"][:, cached:])], dim=1)
        return formula(rotate(x["q"]), k, x["v"], causal=True)

    return Case("append with rotary", _qkv(), ours, plain, ())


def _together() -> Case:
    """Several options in one call."""
    options: dict[str, Any] = {"causal": True, "softcap": 3.0}

    def ours(x: Tensors, backend: Any) -> Any:
        return coflash.flash_attn_func(
            x["q"],
            x["k"],
            x["v"],
            window_size=(48, None),
            learnable_sink=x["sink"],
            backend=backend,
            **options,
        )

    return Case(
        "causal, window, softcap, sink, groups",
        {**_qkv(8, 2), "sink": _random(8)},
        ours,
        lambda x: formula(x["q"], x["k"], x["v"], window=(48, None), sink=x["sink"], **options),
        ("q", "k", "v", "sink"),
    )


# -------------------------------------------------------------------------------------------- measurement


def show(device: torch.device) -> bool:
    """Print the table; whether every error is within the rule."""
    print("\n3. Largest error against float64 in bfloat16, beside plain PyTorch in bfloat16")
    print("   (rule: at most twice plain PyTorch's, plus one rounding of the result)")
    rows = []
    everything = cases(device)
    with Progress("measuring", len(everything)) as progress:
        for case in everything:
            rows.append((case.option, *measure(case, device)))
            progress.step(case.option)
    print(f"  {'option':38} {'path':8}  {'output':>8} {'plain':>8}   {'gradients':>9} {'plain':>8}")
    for option, path, forward, backward in rows:
        line = f"  {option:38} {path:8}  {forward.ours:8.1e} {forward.plain:8.1e}"
        if backward is not None:
            line += f"   {backward.ours:9.1e} {backward.plain:8.1e}"
        within = forward.within and (backward is None or backward.within)
        print(line if within else f"{line}   OUTSIDE THE RULE")
    outside = [row[0] for row in rows if not (row[2].within and (row[3] is None or row[3].within))]
    print(f"  {len(rows) - len(outside)} of {len(rows)} within the rule")
    return not outside


def measure(case: Case, device: torch.device) -> tuple[str, Errors, Errors | None]:
    """The path taken, the output's errors, and those of the gradient that comes closest to the rule."""
    rounded = {name: t.to(device, DTYPE) for name, t in case.inputs.items()}
    exact = _evaluate(case, case.plain, {name: t.double() for name, t in rounded.items()})
    plain = _evaluate(case, case.plain, rounded)
    path = (
        "kernel"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        else "portable"
    )
    try:
        ours = _evaluate(case, lambda x: case.ours(x, "auto"), rounded)
    except NotImplementedError:
        path = "portable"
        ours = _evaluate(case, lambda x: case.ours(x, "portable"), rounded)
    errors = [_errors(*results) for results in zip(ours, plain, exact, strict=True)]
    return path, errors[0], max(errors[1:], key=lambda e: e.share, default=None)


def _evaluate(case: Case, function: Function, inputs: Tensors) -> list[Tensor]:
    """The output, then the gradients that the case has."""
    leaves = {name: t.detach().requires_grad_(name in case.gradients) for name, t in inputs.items()}
    out = function(leaves)
    if not case.gradients:
        return [out.detach()]
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(
        out, [leaves[n] for n in case.gradients], weights.to(out.device, out.dtype)
    )
    return [out.detach(), *gradients]


def _errors(ours: Tensor, plain: Tensor, exact: Tensor) -> Errors:
    return Errors(
        ours=(ours.double() - exact).abs().max().item(),
        plain=(plain.double() - exact).abs().max().item(),
        rounding=torch.finfo(DTYPE).eps / 2 * exact.abs().max().item(),
    )
