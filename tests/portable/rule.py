"""The error rule, applied to one call: forward and every gradient.

Against the dense formula in float64, the largest error is at most twice that of the dense formula in the
inputs' own dtype, plus one rounding.  A gradient is a sum of terms that may cancel, and is zero where they
cancel fully; "one rounding" is one of the largest sum of the terms' absolute values.  And the mean error is at
most 1.25 times that of the classic online softmax, which rescales whenever the maximum grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tests.portable.reference import Options, magnitudes, sequence
from torch import Tensor

from coflash.portable import Numerics, using

ORDERS = 4
FEW = 64
MANY = 2048  # elements from which on a mean says something
Rows = Callable[[Tensor, int], Tensor]


@dataclass
class Call:
    """A call of coflash, and how the reference finds each sequence in its tensors."""

    run: Callable[[dict[str, Tensor], Options], tuple[Tensor, Tensor]]  # -> out, lse, as tokens and heads lie
    tensors: dict[str, Tensor]  # q, k, v, and sink, alibi_slopes, captured0, ... where used
    options: Options
    batch: int
    queries: Rows  # the queries of sequence b in a tensor like q or out
    keys: Rows
    lse_rows: Callable[[Tensor, int], Tensor]  # (nheads, seqlen_q) of sequence b in the lse
    make_score_mod: Callable[..., Callable] | None = None  # from captured tensors
    gradients: bool = True
    notes: dict = field(default_factory=dict)

    def with_mod(self, captured: list[Tensor]) -> Options:
        if self.make_score_mod is None:
            return self.options
        return replace(self.options, score_mod=self.make_score_mod(*captured))


def _captured(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [t for name, t in tensors.items() if name.startswith("captured")]


def _leaves(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}


def _ours(call: Call, douts: Tensor, dlses: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_(call.gradients) for name, t in call.tensors.items()}
    out, lse = call.run(leaves, call.with_mod(_captured(leaves)))
    found = {"out": out.detach(), "lse": lse.detach()}
    if call.gradients:
        finite = torch.where(lse.isfinite(), lse * dlses.to(lse.dtype), 0.0)
        ((out * douts.to(out.dtype)).sum() + finite.sum()).backward()
        for name, leaf in leaves.items():
            found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def _dense(
    call: Call, dtype: torch.dtype, douts: Tensor, dlses: Tensor, order: int = 0
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Results by the dense formula, and the scale of each one's rounding (in float64).

    `order` draws an order in which the products of q and k are summed.
    """
    leaves = _leaves(call.tensors, dtype)
    captured = _captured(leaves)
    options = call.with_mod(captured)
    out = torch.zeros(douts.shape, dtype=dtype)
    lse = torch.full(dlses.shape, -torch.inf, dtype=dtype)
    scales: dict[str, float] = {}
    for b in range(call.batch):
        q, k, v = call.queries(leaves["q"], b), call.keys(leaves["k"], b), call.keys(leaves["v"], b)
        if order:
            dims = torch.randperm(q.shape[-1], generator=torch.Generator().manual_seed(order))
            q, k = q[..., dims], k[..., dims]
        s = sequence(q, k, v, b, options, leaves.get("sink"), leaves.get("alibi_slopes"))
        call.queries(out, b).copy_(s.out.detach())
        call.lse_rows(lse, b).copy_(s.lse.detach())
        seen = torch.where(s.lse.isfinite(), s.lse.detach().abs(), 0.0) + 1
        if s.raw.numel():
            products = (q.detach().abs().transpose(0, 1) @ s.keys.detach().abs().mT) * abs(s.scale)
            seen = torch.maximum(seen, products.amax(-1))
        if seen.numel():
            scales["lse"] = max(scales.get("lse", 0.0), float(seen.max()))
        if s.raw.numel() == 0 and "sink" not in leaves:
            continue
        dout, dlse = call.queries(douts, b).to(dtype), call.lse_rows(dlses, b).to(dtype)
        dlse = torch.where(s.lse.isfinite(), dlse, 0.0)
        if call.gradients:
            loss = (s.out * dout).sum() + (s.lse.masked_fill(~s.lse.isfinite(), 0.0) * dlse).sum()
            loss.backward(retain_graph=True)
        if dtype == torch.float64:
            found = magnitudes(s, q, q.shape[1] // k.shape[1], dout, dlse, options, captured)
            found["out"] = (s.weights.detach() @ s.values.detach().abs()) * (2 if s.kept is None else 4)
            for name, value in found.items():
                most, before = (float(value.max()) if value.numel() else 0.0), scales.get(name, 0.0)
                # Gradients of what all sequences share are sums over them.
                shared = name not in ("q", "k", "v", "out")
                scales[name] = before + most if shared else max(before, most)
    found = {"out": out, "lse": lse}
    for name, leaf in leaves.items():
        found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found, scales


def _errors(ours: Tensor, truth: Tensor) -> Tensor:
    """Absolute errors; zero where both are the same infinity."""
    return torch.where(ours.double() == truth, 0.0, (ours.double() - truth).abs())


def check(call: Call, mean_rule: bool = True) -> None:
    """Raise AssertionError where a result breaks the rule."""
    dtype = call.tensors["q"].dtype
    q, v = call.tensors["q"], call.tensors["v"]
    with torch.no_grad():
        out, lse = call.run(call.tensors, call.with_mod(_captured(call.tensors)))
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    generator = torch.Generator().manual_seed(1)
    douts = torch.randn(out.shape, generator=generator).to(dtype)
    dlses = torch.randn(lse.shape, generator=generator).to(dtype)

    truth, scales = _dense(call, torch.float64, douts, dlses)
    # The largest error of a few results is a matter of luck; over several orders of summation, less so.
    plain = [_dense(call, dtype, douts, dlses, order)[0] for order in range(ORDERS)]
    ours = _ours(call, douts, dlses)
    classic = None
    if mean_rule and dtype != torch.float64:
        with using(Numerics(rescale_threshold=0.0)):
            classic = _ours(call, douts, dlses)

    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        eps *= 32  # the truth is rounded itself
    for name, result in ours.items():
        if result.numel() == 0:
            continue
        assert result.shape == truth[name].shape, name
        error = _errors(result, truth[name])
        allowed = max(float(_errors(p[name], truth[name]).max()) for p in plain)
        # The largest of a few errors scatters widely, ours as well as plain PyTorch's: one more rounding there.
        rounding = eps * scales.get(name, 0.0) * (2 if result.numel() < FEW else 1)
        limit = 2 * allowed + rounding
        assert not error.isnan().any(), f"{name}: NaN where the dense formula has none"
        assert error.max() <= limit, (
            f"{name}: largest error {error.max():.3e}, plain PyTorch {allowed:.3e}, rounding {rounding:.3e}"
        )
        if classic is not None and result.numel() >= MANY:
            mean, usual = error.mean(), _errors(classic[name], truth[name]).mean()
            assert mean <= 1.25 * usual + 0.05 * rounding, (
                f"{name}: mean error {mean:.3e}, classic online softmax {usual:.3e}"
            )
