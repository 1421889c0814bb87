"""The calls of flash-attn-4 that the virtual GPU must get right, their inputs and their float64 answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tests.vgpu.peers.harness import Call, peer_session

BFLOAT16_EPS = 2.0**-8


@dataclass(frozen=True)
class Case:
    arch: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    nheads_q: int = 1
    nheads_kv: int = 1
    causal: bool = False
    cu_seqlens: tuple[int, ...] = ()
    backward: bool = False
    deterministic: bool = False
    exact: bool = False
    """Inputs whose softmax has a power of two of equal weights, so that any order of additions gives the
    same bits."""

    def __str__(self) -> str:
        words = [self.arch, "bwd" if self.backward else "fwd", f"d{self.head_dim}"]
        words.append(f"{self.seqlen_q}x{self.seqlen_k}")
        if self.nheads_q != self.nheads_kv:
            words.append(f"heads{self.nheads_q}over{self.nheads_kv}")
        words += [word for word, on in self._flags() if on]
        return "-".join(words)

    def _flags(self) -> list[tuple[str, bool]]:
        return [
            ("causal", self.causal),
            ("varlen", bool(self.cu_seqlens)),
            ("deterministic", self.deterministic),
            ("exact", self.exact),
        ]


def _for(arch: str) -> list[Case]:
    return [
        Case(arch, 64, 256, 256),
        Case(arch, 64, 200, 200, causal=True),
        Case(arch, 128, 256, 256),
        Case(arch, 128, 256, 256, exact=True),
        Case(arch, 128, 256, 384, causal=True),
        Case(arch, 128, 128, 256, 4, 1, causal=True),
        Case(arch, 128, 300, 300, 2, 1, causal=True, cu_seqlens=(0, 100, 228, 300)),
        Case(arch, 256, 128, 256),
        Case(arch, 256, 256, 256, causal=True),
        Case(arch, 64, 128, 256, backward=True),
        Case(arch, 64, 256, 256, 2, 1, causal=True, backward=True),
        Case(arch, 128, 128, 256, backward=True),
        Case(arch, 128, 256, 256, causal=True, backward=True, deterministic=True),
    ]


# 512 rows and more of head_dim 128 run as CTA pairs on sm_100a.
CASES = {
    "sm_90a": _for("sm_90a"),
    "sm_100a": [
        *_for("sm_100a"),
        Case("sm_100a", 128, 512, 512),
        Case("sm_100a", 128, 512, 512, backward=True),
        Case("sm_100a", 128, 512, 512, causal=True, backward=True, deterministic=True),
    ],
}


def _bfloat16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)


def inputs(case: Case, seed: int = 1) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    lead_q, lead_k = _leads(case)
    shapes = {
        "q": (*lead_q, case.nheads_q, case.head_dim),
        "k": (*lead_k, case.nheads_kv, case.head_dim),
        "v": (*lead_k, case.nheads_kv, case.head_dim),
        "dout": (*lead_q, case.nheads_q, case.head_dim),
    }
    if not case.exact:
        return {name: _bfloat16(rng.standard_normal(shape)) for name, shape in shapes.items()}
    made = {name: rng.integers(-8, 9, shape) for name, shape in shapes.items()}
    for name, seqlen in (("q", case.seqlen_q), ("k", case.seqlen_k)):
        # Row i is 64 times unit vector i mod head_dim: scores are 4096 for seqlen_k / head_dim keys, 0 for
        # the rest.
        hot = 64 * (np.arange(seqlen)[:, None] % case.head_dim == np.arange(case.head_dim))
        made[name] = np.broadcast_to(hot[None, :, None, :], shapes[name])
    return {name: _bfloat16(values) for name, values in made.items()}


def _leads(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if case.cu_seqlens:
        return (case.seqlen_q,), (case.seqlen_k,)
    return (1, case.seqlen_q), (1, case.seqlen_k)


def attention(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the type of its inputs, in plain PyTorch: out, and lse as (heads, tokens) or (1, heads,
    tokens)."""
    if case.cu_seqlens:
        whole = Case(case.arch, case.head_dim, 0, 0, case.nheads_q, case.nheads_kv, case.causal)
        pieces = [
            attention(whole, q[None, a:b], k[None, a:b], v[None, a:b])
            for a, b in zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False)
        ]
        return torch.cat([o[0] for o, _ in pieces]), torch.cat([lse[0] for _, lse in pieces], -1)
    group = case.nheads_q // case.nheads_kv
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.head_dim**-0.5
    if case.causal:
        offset = k.shape[1] - q.shape[1]
        hidden = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + offset
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def answers(case: Case, given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the call should give, computed in `dtype`."""
    q, k, v, dout = (given[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v", "dout"))
    out, lse = attention(case, q, k, v)
    if not case.backward:
        return {"out": out.detach(), "lse": lse.detach()}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))


def run(
    case: Case, given: dict[str, torch.Tensor], on_call: Callable[[Call], None]
) -> dict[str, torch.Tensor]:
    """Make the call, with outputs full of NaN beforehand."""
    q, k, v = given["q"], given["k"], given["v"]
    options: dict = {"causal": case.causal}
    if case.cu_seqlens:
        longest = max(b - a for a, b in zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False))
        for side in "qk":
            options[f"cu_seqlens_{side}"] = torch.tensor(case.cu_seqlens, dtype=torch.int32)
            options[f"max_seqlen_{side}"] = longest
    with peer_session(case.arch, on_call):
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        if not case.backward:
            lead, _ = _leads(case)
            out = torch.full_like(q, float("nan"))
            lse = torch.full((*lead[:-1], case.nheads_q, lead[-1]), float("nan"))
            _flash_attn_fwd(q, k, v, out=out, lse=lse, return_lse=True, **options)
            return {"out": out, "lse": lse}
        out, lse = attention(case, *(t.double() for t in (q, k, v)))
        made = {"d" + name: torch.full_like(given[name], float("nan")) for name in "qkv"}
        _flash_attn_bwd(
            q, k, v, out.to(q.dtype), given["dout"], lse.float().contiguous(),
            deterministic=case.deterministic, **made, **options,
        )  # fmt: skip
        return made


def allowed_error(case: Case, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """The design's rule: twice the error of plain PyTorch in the input type, plus one rounding of the
    result."""
    right, plain = answers(case, given, torch.float64), answers(case, given, torch.bfloat16)
    allowed = {}
    for name, value in right.items():
        if name == "lse":
            allowed[name] = 1e-4  # float32, through two approximate functions
        else:
            error = (plain[name].double() - value).abs().max().item()
            allowed[name] = 2 * error + BFLOAT16_EPS * value.abs().max().item()
    return allowed
