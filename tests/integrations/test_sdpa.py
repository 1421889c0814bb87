"""`sdpa` against PyTorch's own function, and the switch that replaces it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from coflash.integrations import disable_sdpa, enable_sdpa, pytorch, sdpa, use_coflash_sdpa


def stock(*args, **kwargs):
    """PyTorch's plain implementation, which takes every combination."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def operands(q_shape, k_shape, v_shape=None, dtype=torch.float64, grad=True):
    shapes = (q_shape, k_shape, v_shape or k_shape)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def compare(tensors, mask=None, tolerance=1e-10, **options):
    """Outputs and all gradients of both implementations."""
    inputs = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    ours = sdpa(*tensors, mask, **options)
    theirs = stock(*tensors, mask, **options)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    weights = torch.randn_like(theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((7, 8), (9, 8)),
        ((3, 7, 8), (3, 9, 8)),
        ((2, 3, 7, 8), (2, 3, 9, 8)),
        ((2, 1, 3, 7, 8), (2, 1, 3, 9, 8)),
        ((2, 2, 2, 3, 7, 8), (2, 2, 2, 3, 9, 8)),
    ],
    ids=["no batch", "3-D", "4-D", "5-D", "6-D"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_number_of_dimensions(q_shape, k_shape, is_causal):
    compare(operands(q_shape, k_shape), is_causal=is_causal)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_causal_is_aligned_to_the_top_left(seqlen_q, seqlen_k):
    compare(operands((2, 3, seqlen_q, 8), (2, 3, seqlen_k, 8)), is_causal=True)


@pytest.mark.parametrize(
    "shape", [(6, 9), (1, 9), (6, 1), (3, 6, 9), (3, 1, 9), (2, 1, 6, 9), (2, 1, 1, 9), (1, 1)]
)
@pytest.mark.parametrize("kind", ["boolean", "additive", "additive with gradient"])
def test_masks_broadcast(shape, kind):
    tensors = operands((2, 3, 6, 8), (2, 3, 9, 8))
    if kind == "boolean":
        mask = torch.rand(shape) < 0.7
        mask[..., 0] = True
    else:
        mask = torch.randn(shape, dtype=torch.float64, requires_grad="gradient" in kind)
    compare(tensors, mask)


def test_mask_broadcasts_over_several_batch_dimensions():
    tensors = operands((2, 4, 3, 6, 8), (2, 4, 3, 9, 8))
    compare(tensors, torch.rand(4, 1, 6, 9) < 0.8)
    compare(tensors, torch.randn(2, 1, 3, 1, 9, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_sees_nothing_gets_zeros(boolean):
    q, k, v = operands((1, 2, 4, 8), (1, 2, 5, 8))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    if not boolean:
        mask = torch.zeros(4, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    out = sdpa(q, k, v, mask)
    torch.testing.assert_close(out, stock(q, k, v, mask))
    assert (out[:, :, 2] == 0).all()
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    assert (q.grad[:, :, 2] == 0).all()


def test_float32_mask_with_half_precision_operands():
    q, k, v = operands((1, 2, 6, 16), (1, 2, 6, 16), dtype=torch.bfloat16)
    mask = torch.randn(6, 6)
    exact = stock(*(t.double() for t in (q, k, v)), mask.double())
    torch.testing.assert_close(sdpa(q, k, v, mask).double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(is_causal):
    compare(operands((2, 6, 7, 8), (2, 2, 9, 8)), is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 1, 4), (1, 4, 4)])
def test_heads_broadcast(heads):
    compare(operands(*((2, h, 5, 8) for h in heads)))


def test_batch_dimensions_broadcast():
    compare(operands((2, 1, 3, 5, 8), (1, 4, 3, 6, 8), (3, 6, 8)))


def test_scale_and_value_head_dim():
    compare(operands((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 12)), scale=0.3)


@pytest.mark.parametrize("q_shape,k_shape", [((0, 2, 3, 8), (0, 2, 3, 8)), ((1, 2, 0, 8), (1, 2, 3, 8))])
def test_empty(q_shape, k_shape):
    q, k, v = operands(q_shape, k_shape)
    out = sdpa(q, k, v)
    assert out.shape == q.shape
    out.sum().backward()


def test_dropout_keeps_the_mean_and_follows_the_seed():
    q, k, v = operands((1, 2, 64, 16), (1, 2, 64, 16), dtype=torch.float32, grad=False)
    torch.manual_seed(1)
    first = sdpa(q, k, v, dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(first, sdpa(q, k, v, dropout_p=0.3))
    assert not torch.equal(first, sdpa(q, k, v, dropout_p=0.3))
    ones = torch.ones_like(v)
    dropped = sdpa(q, k, ones, dropout_p=0.3)  # each row: the kept weights' sum, scaled by 1 / 0.7
    assert dropped.std() > 0.01
    assert abs(dropped.mean() - 1) < 0.05


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(attn_mask=torch.ones(3, 3).bool(), is_causal=True), ValueError, "attn_mask and is_causal"),
        (dict(attn_mask=torch.ones(3, 4).bool()), ValueError, "attn_mask has shape \\(3, 4\\)"),
        (dict(attn_mask=torch.ones(1, 1, 1, 3, 3).bool()), ValueError, "attn_mask has shape"),
        (dict(attn_mask=torch.ones(3, 3).int()), TypeError, "attn_mask has dtype torch.int32"),
        (dict(query=torch.randn(8)), ValueError, "query has shape"),
        (dict(query=torch.randn(3, 2, 3, 8)), ValueError, "batch dimensions"),
        (dict(query=torch.randn(1, 4, 3, 8)), ValueError, "enable_gqa=True"),
        (dict(query=torch.randn(1, 5, 3, 8), enable_gqa=True), ValueError, "enable_gqa needs"),
    ],
)
def test_bad_arguments(change, error, words):
    arguments = dict(
        query=torch.randn(2, 2, 3, 8), key=torch.randn(2, 2, 3, 8), value=torch.randn(2, 2, 3, 8)
    )
    with pytest.raises(error, match=words):
        sdpa(**{**arguments, **change})


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls that reach coflash."""
    seen = []
    original = pytorch.flash_attn_func

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(pytorch, "flash_attn_func", counted)
    return seen


def test_context_manager_replaces_and_restores(calls):
    q, k, v = operands((2, 4, 6, 8), (2, 2, 9, 8), dtype=torch.float32)
    expected = stock(q, k, v, is_causal=True, enable_gqa=True)
    with use_coflash_sdpa():
        assert current_flash_attention_impl() == "coflash"
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert len(calls) == 1
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 9).bool(), enable_gqa=True)
        with torch.inference_mode():
            F.scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)
        assert len(calls) == 3
        with use_coflash_sdpa():
            pass
        assert current_flash_attention_impl() == "coflash"
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))
    )
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert len(calls) == 3
    assert current_flash_attention_impl() is None


def test_context_manager_restores_after_an_error(calls):
    with pytest.raises(RuntimeError, match="stop"), use_coflash_sdpa():
        raise RuntimeError("stop")
    F.scaled_dot_product_attention(*operands((1, 1, 2, 4), (1, 1, 2, 4)))
    assert not calls


def test_switch(calls):
    tensors = operands((1, 2, 4, 8), (1, 2, 4, 8))
    enable_sdpa()
    try:
        enable_sdpa()
        F.scaled_dot_product_attention(*tensors)
    finally:
        disable_sdpa()
    disable_sdpa()
    F.scaled_dot_product_attention(*tensors)
    assert len(calls) == 1


def test_backend_of_the_switch(calls):
    tensors = operands((1, 2, 4, 8), (1, 2, 4, 8))
    with use_coflash_sdpa("portable"):
        F.scaled_dot_product_attention(*tensors)
        with use_coflash_sdpa(), pytest.raises(ValueError, match="backend"):
            enable_sdpa("nonsense")
            F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(*tensors)
    assert [call["backend"] for call in calls] == ["portable", "nonsense", "portable"]


def test_multihead_attention_uses_it(calls):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    with use_coflash_sdpa():
        out = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert len(calls) == 1
    torch.testing.assert_close(out, expected)


def test_autocast_reaches_it_in_low_precision():
    tensors = operands((1, 2, 4, 8), (1, 2, 4, 8), dtype=torch.float32)
    with use_coflash_sdpa(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(*tensors).dtype == torch.bfloat16


def test_compiled_without_graph_break(calls):
    tensors = operands((1, 2, 16, 8), (1, 2, 16, 8), dtype=torch.float32)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    with use_coflash_sdpa():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        gradients = torch.autograd.grad(compiled(*tensors), tensors)
    assert calls
    torch.testing.assert_close(gradients, expected)
