"""flex_attention against PyTorch's own, on its functions, masks and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as theirs

from coflash import flex_attention
from coflash.portable import schedule

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SMALLEST_TILE", 16)
    monkeypatch.setattr(schedule, "TILE_SCORES", 512)


def inputs(
    batch: int = 2, heads: int = 4, heads_kv: int = 2, len_q: int = 70, len_k: int = 70
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, heads, len_q, 8), (batch, heads_kv, len_k, 8), (batch, heads_kv, len_k, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def dense(
    q: Tensor, k: Tensor, v: Tensor, score_mod=None, block_mask=None, scale=None
) -> tuple[Tensor, Tensor]:
    """The dense formula with functions under vmap: PyTorch's own has no backward on a CPU."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    indices = [torch.arange(n) for n in scores.shape]

    def everywhere(function, *first: Tensor) -> Tensor:
        lead = (0,) * len(first)
        for axis in (
            (None, None, None, 0),
            (None, None, 0, None),
            (None, 0, None, None),
            (0, None, None, None),
        ):
            function = torch.vmap(function, in_dims=lead + axis)
        return function(*first, *indices)

    if score_mod is not None:
        scores = everywhere(score_mod, scores)
    if block_mask is not None:
        scores = scores.masked_fill(~everywhere(block_mask.mask_mod), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return weights @ values, lse


def agree(leaves: list[Tensor], extra: list[Tensor] | None = None, **options) -> None:
    """Output and lse as PyTorch's, gradients of q, k, v and `extra` as the dense formula's."""
    out, lse = flex_attention(*leaves, return_lse=True, enable_gqa=True, **options)
    with torch.no_grad():
        expected = theirs(*[x.detach() for x in leaves], return_lse=True, enable_gqa=True, **options)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1].to(lse.dtype), atol=1e-5, rtol=1e-5)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        weights = torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)
        loss = (out * weights).sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        return torch.autograd.grad(loss, [*leaves, *(extra or [])])

    for ours, true in zip(gradients(out, lse), gradients(*dense(*leaves, **options)), strict=True):
        torch.testing.assert_close(ours, true)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def test_plain() -> None:
    agree(inputs())


def test_scale_and_unequal_lengths() -> None:
    agree(inputs(len_q=33, len_k=70), scale=0.3)


def test_captured_tensors_get_gradients() -> None:
    bias = torch.randn(4, 141, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * torch.sigmoid(gate[h]) + bias[h, i - j + 70]

    agree(inputs(), [bias, gate], score_mod=score_mod)


def test_a_function_that_needs_vmap() -> None:
    """Indices are scalars to the function: a row of a table times a row of another is a dot product."""
    left = torch.randn(70, 3, dtype=torch.float64, requires_grad=True)
    right = torch.randn(70, 3, dtype=torch.float64, requires_grad=True)
    agree(inputs(), [left, right], score_mod=lambda s, b, h, i, j: s + torch.dot(left[i], right[j]))


@pytest.mark.parametrize("block", (16, 32, (16, 48), 128))
@pytest.mark.parametrize("which", ("causal", "documents", "per head", "none"))
def test_block_masks(block: int | tuple[int, int], which: str) -> None:
    documents = torch.tensor([0] * 20 + [1] * 30 + [2] * 20)
    batch, heads, mask_mod = {
        "causal": (None, None, causal),
        "documents": (None, None, lambda b, h, i, j: documents[i] == documents[j]),
        "per head": (2, 4, lambda b, h, i, j: (i - j).abs() < 3 + 8 * h + 5 * b),
        "none": (None, None, lambda b, h, i, j: j < -1),
    }[which]
    mask = create_block_mask(mask_mod, batch, heads, 70, 70, device="cpu", BLOCK_SIZE=block)
    agree(inputs(), block_mask=mask)


def test_a_block_mask_for_longer_sequences() -> None:
    """One mask serves any shorter lengths, as PyTorch's does."""
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=16)
    q, k, v = inputs(len_q=40, len_k=50)
    out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    expected, expected_lse = dense(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_score_mod_and_block_mask() -> None:
    mask = create_block_mask(causal, None, None, 70, 70, device="cpu", BLOCK_SIZE=32)
    agree(inputs(), block_mask=mask, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j))


def test_blocks_alone() -> None:
    """A BlockMask made of blocks: what is not listed is not seen, whatever its mask_mod says."""
    num = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 0], [0, 1, 0], [1, 0, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=32, seq_lengths=(70, 70))
    q, k, v = inputs()
    seen = torch.zeros(96, 96, dtype=torch.bool)
    for row, columns in enumerate(([2], [0, 1], [1])):
        for column in columns:
            seen[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = True
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:70, :70])
    torch.testing.assert_close(out, expected)


def test_empty_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block-diagonal mask only the diagonal's tiles are computed, and full ones are not masked."""
    made = []
    mask = create_block_mask(
        lambda b, h, i, j: i // 16 == j // 16, None, None, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    original = schedule.Schedule._even_block

    def watch(self, *args):
        block = original(self, *args)
        made.extend(block.tiles)
        return block

    monkeypatch.setattr(schedule.Schedule, "_even_block", watch)
    monkeypatch.setattr(schedule.Schedule, "_tile_shape", lambda self: (16, 16))
    with torch.no_grad():
        flex_attention(*inputs(len_q=64, len_k=64), block_mask=mask, enable_gqa=True)
    assert {(int(t.queries[0]), t.low) for t in made} == {(16 * n, 16 * n) for n in range(4)}
    assert not any(t.blocked or t.banded for t in made)


def test_layout_and_strides() -> None:
    q, k, v = inputs(heads_kv=4)
    out = flex_attention(q, k, v)
    assert isinstance(out, Tensor) and out.shape == q.shape
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(flex_attention(*swapped), out)
