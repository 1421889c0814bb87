"""Calls at the edge: nothing to see, nothing there, one token, huge and infinite values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coflash import flash_attn_func, flash_attn_varlen_func
from coflash.portable import schedule

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SMALLEST_TILE", 8)
    monkeypatch.setattr(schedule, "TILE_SCORES", 128)


def qkv(
    batch: int = 2, len_q: int = 20, len_k: int = 20, heads: int = 2, dim: int = 8, dtype=torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, n, heads, dim) for n in (len_q, len_k, len_k))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and lse by the dense formula in float64, with whatever NaN it has."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def finite_gradients(out: Tensor, lse: Tensor, *leaves: Tensor) -> list[Tensor]:
    loss = out.double().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    gradients = torch.autograd.grad(loss, leaves)
    assert all(g.isfinite().all() for g in gradients)
    return list(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    """More queries than keys, causal: the first queries stand before every key."""
    q, k, v = qkv(len_q=20, len_k=12, dtype=dtype)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out[:, :8] == 0).all() and (lse[..., :8] == -math.inf).all()
    assert lse[..., 8:].isfinite().all()
    dq, _, _ = finite_gradients(out, lse, q, k, v)
    assert (dq[:, :8] == 0).all() and (dq[:, 8:] != 0).any()


def test_rows_that_see_nothing_by_mask_mod() -> None:
    q, k, v = qkv()
    out, lse = flash_attn_func(q, k, v, mask_mod=lambda b, h, i, j: (i % 2 == 0) & (j >= 0), return_lse=True)
    assert (out[:, 1::2] == 0).all() and (lse[..., 1::2] == -math.inf).all()
    dq, _, _ = finite_gradients(out, lse, q, k, v)
    assert (dq[:, 1::2] == 0).all()


def test_rows_that_see_the_sink_alone() -> None:
    q, k, v = qkv(len_q=20, len_k=12)
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    assert (out[:, :8] == 0).all()
    torch.testing.assert_close(lse[:, :, :8], sink.detach()[None, :, None].expand(2, 2, 8))
    (dsink,) = torch.autograd.grad(lse[:, :, :8].sum(), sink)
    torch.testing.assert_close(dsink, torch.full((2,), 16.0))


@pytest.mark.parametrize("value", (-math.inf, 1e4, -1e4))
def test_extreme_sink(value: float) -> None:
    q, k, v = qkv()
    sink = torch.full((2,), value)
    out, lse = flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
    plain, plain_lse = flash_attn_func(q, k, v, return_lse=True)
    if value > 0:
        assert (out == 0).all() and (lse == value).all()
    else:
        torch.testing.assert_close(out, plain)
        torch.testing.assert_close(lse, plain_lse)


@pytest.mark.parametrize("lengths", ((0, 5), (5, 0), (0, 0)))
def test_no_queries_or_no_keys(lengths: tuple[int, int]) -> None:
    q, k, v = qkv(len_q=lengths[0], len_k=lengths[1])
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
    for g, x in zip(finite_gradients(out, lse, q, k, v), (q, k, v), strict=True):
        assert g.shape == x.shape and (g == 0).all()


def test_batch_0() -> None:
    q, k, v = qkv(batch=0)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.shape == (0, 20, 2, 8) and lse.shape == (0, 2, 20)
    finite_gradients(out, lse, q, k, v)


def test_zero_length_sequences_among_others() -> None:
    q, k, v = (x[0].detach().requires_grad_() for x in qkv(batch=1, len_q=12, len_k=15))
    cu_q = torch.tensor([0, 0, 5, 12, 12], dtype=torch.int32)
    cu_k = torch.tensor([0, 4, 4, 15, 15], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert (out[:5] == 0).all() and (lse[:, :5] == -math.inf).all()
    expected, _ = dense(q[None, 5:], k[None, 4:], v[None, 4:])
    torch.testing.assert_close(out[5:].double(), expected[0], atol=1e-6, rtol=1e-5)
    _, dk, _ = finite_gradients(out, lse, q, k, v)
    assert (dk[:4] == 0).all()


def test_no_sequences_at_all() -> None:
    q, k, v = (x[0].detach() for x in qkv(batch=1, len_q=0, len_k=0))
    cu = torch.zeros(1, dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert isinstance(out, Tensor) and out.shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token(dtype: torch.dtype) -> None:
    q, k, v = qkv(len_q=1, len_k=1, dtype=dtype)
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, v)


@pytest.mark.parametrize("lengths", ((7, 30), (30, 7)))
@pytest.mark.parametrize("causal", (False, True))
def test_unequal_lengths(lengths: tuple[int, int], causal: bool) -> None:
    q, k, v = qkv(len_q=lengths[0], len_k=lengths[1])
    out = flash_attn_func(q, k, v, causal=causal)
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    mask = j <= i + lengths[1] - lengths[0] if causal else None
    expected, _ = dense(q, k, v, mask)
    expected = expected.nan_to_num(0.0)  # rows that see nothing
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", (0, 10, 19))
def test_one_huge_score(dtype: torch.dtype, at: int) -> None:
    """A key that takes all the weight, in the first, a middle and the last tile."""
    q, k, v = qkv(dtype=dtype)
    with torch.no_grad():
        q.abs_()
        k[:, at] = 1000.0
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    torch.testing.assert_close(out, v[:, at : at + 1].expand_as(out), atol=2e-2, rtol=1e-2)
    finite_gradients(out, lse, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_scores_equal(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    with torch.no_grad():
        k.fill_(1.0)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    mean = v.double().mean(1, keepdim=True).expand(-1, 20, -1, -1)
    torch.testing.assert_close(
        out.double(), mean, atol=4 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps
    )
    _, dk, _ = finite_gradients(out, lse, q, k, v)
    assert dk.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_largest_float16(dtype: torch.dtype) -> None:
    """q and k at +-65504: scores of 1e10, whose exponentials must neither overflow nor vanish together.

    Of dimension 4, so that float32 holds every score exactly and equal scores stay equal.
    """
    q, k, v = qkv(dim=4, dtype=dtype)
    with torch.no_grad():
        q.copy_(q.sign() * 65504.0)
        k.copy_(k.sign() * 65504.0)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    expected, expected_lse = dense(q, k, v)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0.0)
    assert out.isfinite().all()


def test_values_at_65504() -> None:
    q, k, v = qkv(dtype=torch.float16)
    with torch.no_grad():
        v.fill_(65504.0)
    out = flash_attn_func(q, k, v)
    assert torch.equal(out, v)


@pytest.mark.parametrize("where", ("k", "v"))
@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("causal", (False, True))
def test_infinities_and_nan(where: str, value: float, causal: bool) -> None:
    """NaN only where the dense formula has NaN, and its values everywhere else."""
    q, k, v = qkv(dtype=torch.float32)
    with torch.no_grad():
        {"k": k, "v": v}[where][1, 13, 0, 2] = value
    i, j = torch.arange(20)[:, None], torch.arange(20)
    expected, expected_lse = dense(q, k, v, j <= i if causal else None)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert not (out.isnan() & ~expected.isnan()).any()
    assert not (lse.isnan() & ~expected_lse.isnan()).any()
    sound = ~expected.isnan()
    torch.testing.assert_close(out.double()[sound], expected[sound], atol=1e-6, rtol=1e-5)
    sound = ~expected_lse.isnan()
    torch.testing.assert_close(lse.double()[sound], expected_lse[sound], atol=1e-5, rtol=1e-5)


def test_nan_in_gradients_only_where_dense_has_it() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with torch.no_grad():
        k[1, 13, 0, 2] = math.nan
    i, j = torch.arange(20)[:, None], torch.arange(20)
    expected = torch.autograd.grad(dense(q, k, v, j <= i)[0].sum(), (q, k, v))
    found = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        assert not (ours.isnan() & ~theirs.isnan()).any()
        assert ours[0].isfinite().all()


def test_padding_may_hold_anything() -> None:
    """Tokens past a sequence's end are not read: NaN there reaches nothing."""
    q, k, v = (x.detach() for x in qkv(batch=2))
    used = torch.tensor([20, 11], dtype=torch.int32)
    for x in (q, k, v):
        x[1, 11:] = math.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = flash_attn_varlen_func(q, k, v, seqused_q=used, seqused_k=used, causal=True, return_lse=True)
    assert out.isfinite().all() and (out[1, 11:] == 0).all() and (lse[1, :, 11:] == -math.inf).all()
    for g in finite_gradients(out, lse, q, k, v):
        assert (g[1, 11:] == 0).all()


@pytest.mark.parametrize("dim", (1, 3, 17, 257, 512))
def test_any_head_dim(dim: int) -> None:
    q, k, v = qkv(batch=1, len_q=9, len_k=9, dim=dim)
    expected, _ = dense(q, k, v)
    torch.testing.assert_close(flash_attn_func(q, k, v).double(), expected, atol=1e-5, rtol=1e-4)


def test_zero_scale_and_negative_scale() -> None:
    q, k, v = qkv()
    mean = v.mean(1, keepdim=True).expand_as(v)
    torch.testing.assert_close(flash_attn_func(q, k, v, softmax_scale=0.0), mean)
    torch.testing.assert_close(
        flash_attn_func(q, k, v, softmax_scale=-0.5), flash_attn_func(-q, k, v, softmax_scale=0.5)
    )


def test_minus_1_is_an_unbounded_window() -> None:
    q, k, v = qkv()
    for window in ((-1, -1), (-1, 3), (4, -1)):
        same = tuple(None if side == -1 else side for side in window)
        assert torch.equal(
            flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, window_size=same)
        )


def test_backward_is_the_same_every_time() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    runs = [
        torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True).sum(), (q, k, v)) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_dropout_rate_and_seed() -> None:
    q, k, _ = (torch.zeros(1, 256, 2, 1) for _ in range(3))
    v = torch.eye(256)[None, :, None].expand(1, -1, 2, -1)

    def kept(**seed: int) -> Tensor:
        out = flash_attn_func(q, k, v, dropout_p=0.3, **seed)
        assert isinstance(out, Tensor)
        return out > 0

    rate = kept(dropout_seed=1).float().mean().item()
    assert abs(rate - 0.7) < 5 * math.sqrt(0.21 / (2 * 256 * 256))
    assert torch.equal(kept(dropout_seed=1), kept(dropout_seed=1))
    assert not torch.equal(kept(dropout_seed=1), kept(dropout_seed=2))
    torch.manual_seed(5)
    first = kept()
    torch.manual_seed(5)
    assert torch.equal(first, kept())
    assert not torch.equal(first, kept())
    heads = kept(dropout_seed=1)
    assert 0.5 < (heads[:, :, 0] == heads[:, :, 1]).float().mean() < 0.65  # 0.58 if independent
