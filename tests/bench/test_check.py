"""The check before the clock: right results pass, and each kind of wrong one is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coflash.bench import check, tensors
from coflash.bench.shapes import Shape

CPU = torch.device("cpu")
BASE = Shape("t", "t", 2, 4, 2, 32, 32, 150, 150, causal=True, dtype="fp32")
SHAPES = [
    BASE,
    replace(BASE, causal=False),
    replace(BASE, window=(20, 0)),
    replace(BASE, sink=True),
    replace(BASE, seqlen_q=40),
    replace(BASE, head_dim_v=16, dtype="bf16"),
    replace(BASE, batch=3, lengths=(150, 3, 60)),
]


def attention(t: tensors.Tensors) -> torch.Tensor:
    """Every sequence and head by plain operations in float32, and then in the tensors' type."""
    s = t.shape
    group = s.heads // s.heads_kv
    parts = [slice(a, b) for a, b in zip(s.cu_seqlens, s.cu_seqlens[1:], strict=False)] if s.lengths else None
    rows = [(t.q[p], t.k[p], t.v[p]) for p in parts] if parts else list(zip(t.q, t.k, t.v, strict=True))
    outs = []
    for q, k, v in rows:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * t.scale
        i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        j = torch.arange(k.shape[0])[None]
        left, right = s.window or (10**6, 10**6)
        seen = (j >= i - left) & (j <= i + (0 if s.causal else right))
        scores = scores.masked_fill(~seen, -torch.inf)
        if t.sink is not None:
            scores = torch.cat([scores, t.sink.float()[:, None, None].expand(-1, q.shape[0], 1)], 2)
        weights = scores.softmax(2)[..., : k.shape[0]]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype))
    return torch.cat(outs) if parts else torch.stack(outs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_results_pass(shape):
    t = tensors.make(shape, CPU, grad=True)
    out = attention(t)
    assert check.forward(t, out.detach()).right
    verdicts = check.backward(t, torch.autograd.grad(out, (t.q, t.k, t.v), t.dout))
    assert all(verdict.right for verdict in verdicts.values()), verdicts


def damaged(out: torch.Tensor, kind: str) -> torch.Tensor:
    out = out.clone()
    if kind == "scaled":
        return out * 1.05
    if kind == "nan":
        out[-1, -1, -1] = torch.nan
    elif kind == "zero":
        out.zero_()
    else:
        out[0, 0, 0] += 0.1
    return out


@pytest.mark.parametrize("kind", ["scaled", "nan", "zero", "one element"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]], ids=str)
def test_wrong_outputs_are_caught(shape, kind):
    t = tensors.make(shape, CPU, grad=False)
    assert not check.forward(t, damaged(attention(t), kind)).right


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kind", ["scaled", "nan", "zero", "one element"])
def test_wrong_gradients_are_caught(which, kind):
    t = tensors.make(BASE, CPU, grad=True)
    gradients = list(torch.autograd.grad(attention(t), (t.q, t.k, t.v), t.dout))
    gradients[which] = damaged(gradients[which], kind)
    verdicts = check.backward(t, tuple(gradients))
    assert [verdict.right for verdict in verdicts.values()] == [i != which for i in range(3)]


def test_another_mask_is_caught():
    t = tensors.make(replace(BASE, causal=False), CPU, grad=False)
    causal = tensors.make(BASE, CPU, grad=False)
    assert not check.forward(t, attention(causal)).right
