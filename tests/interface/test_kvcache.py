"""Pages, caches, appends and rotary, against the same call on keys laid out end to end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coflash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from coflash.portable import schedule


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """One `(tokens, heads, dim)` sequence, turned by complex multiplication."""
    half = cos.shape[1]
    turn = torch.complex(cos[positions], sin[positions])[:, None]
    head = x[..., : 2 * half].to(cos.dtype)
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    moved = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    moved = moved.flatten(-2) if interleaved else moved.mT.flatten(-2)
    return torch.cat((moved.to(x.dtype), x[..., 2 * half :]), dim=-1)


@st.composite
def caches(draw) -> dict:
    batch, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dim = draw(st.sampled_from((4, 8, 10)))
    page = draw(st.sampled_from((0, 0, 1, 3, 16)))
    new = draw(st.none() | st.integers(1, 4))
    room = draw(st.integers(12, 30))
    lengths = [draw(st.integers(0, room - 4)) for _ in range(batch)]
    pads = [draw(st.integers(0, n)) for n in lengths] if draw(st.booleans()) else None
    return {
        "batch": batch,
        "heads": heads,
        "group": group,
        "dim": dim,
        "dim_v": draw(st.sampled_from((dim, 6))),
        "page": page,
        "new": new,
        "room": room,
        "lengths": lengths,
        "pads": pads,
        "queries": draw(st.integers(1, 4)),
        "rotary": draw(st.none() | st.integers(1, dim // 2)),
        "interleaved": draw(st.booleans()),
        "shuffle": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from(((None, None), (5, None), (3, 2)))),
        "softcap": draw(st.sampled_from((0.0, 2.0))),
        "sink": draw(st.booleans()),
        "dtype": draw(st.sampled_from((torch.float32, torch.float64))),
        "tile": draw(st.sampled_from((4, 64))),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(c=caches())
def test_against_dense(c: dict) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SMALLEST_TILE", c["tile"])
        check(c)


def check(c: dict) -> None:
    generator = torch.Generator().manual_seed(c["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(c["dtype"])

    batch, heads, room, page = c["batch"], c["heads"], c["room"], c["page"]
    q = normal(batch, c["queries"], heads * c["group"], c["dim"])
    lengths = torch.tensor(c["lengths"], dtype=torch.int32)
    extra: dict = {"cache_seqlens": lengths}
    rows = torch.arange(batch)
    if page:
        pages = -(-room // page)
        table = torch.randperm(batch * pages + 2, generator=generator)[: batch * pages].view(batch, pages)
        k_cache = normal(batch * pages + 2, page, heads, c["dim"])
        v_cache = normal(batch * pages + 2, page, heads, c["dim_v"])
        extra["page_table"] = table.int()

        def row(cache: Tensor, b: int) -> Tensor:
            return cache[table[b]].flatten(0, 1)
    else:
        k_cache, v_cache = (
            normal(batch + 2, room, heads, c["dim"]),
            normal(batch + 2, room, heads, c["dim_v"]),
        )
        if c["shuffle"]:
            rows = torch.randperm(batch + 2, generator=generator)[:batch]
            extra["cache_batch_idx"] = rows.int()
        else:
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]

        def row(cache: Tensor, b: int) -> Tensor:
            return cache[rows[b]]

    pads = c["pads"] or [0] * batch
    if c["pads"]:
        extra["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    cos = sin = None
    if c["rotary"]:
        angles = torch.rand(room + 8, c["rotary"], generator=generator).to(c["dtype"]) * 3
        cos, sin = angles.cos(), angles.sin()
        extra |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": c["interleaved"]}
    new_k = new_v = None
    if c["new"]:
        new_k, new_v = normal(batch, c["new"], heads, c["dim"]), normal(batch, c["new"], heads, c["dim_v"])
        extra |= {"k": new_k, "v": new_v}
    options: dict = {"causal": c["causal"], "window_size": c["window"], "softcap": c["softcap"]}
    if c["sink"]:
        options["learnable_sink"] = normal(heads * c["group"])
    ordered = c["causal"] or c["window"] != (None, None)

    before_k, before_v = k_cache.clone(), v_cache.clone()
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, return_lse=True, **extra, **options)
    for b in range(batch):
        length, pad = c["lengths"][b], pads[b]
        keys, values, queries = row(before_k, b)[pad:length], row(before_v, b)[pad:length], q[b]
        first = length - pad
        if new_k is not None and new_v is not None:
            added = new_k[b]
            if cos is not None and sin is not None:
                added = rotated(added, cos, sin, first + torch.arange(c["new"]), c["interleaved"])
            keys, values = torch.cat((keys, added)), torch.cat((values, new_v[b]))
        if cos is not None and sin is not None:
            positions = first + torch.arange(c["queries"]) * int(ordered)
            queries = rotated(queries, cos, sin, positions, c["interleaved"])
        expected, expected_lse = flash_attn_func(
            queries[None], keys[None], values[None], return_lse=True, **options
        )
        torch.testing.assert_close(out[b], expected[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse[b], expected_lse[0], atol=2e-6, rtol=1e-5)
        # The cache holds the new tokens, and nothing else of this row has changed.
        total = length + (c["new"] or 0)
        torch.testing.assert_close(row(k_cache, b)[pad:total], keys, atol=1e-6, rtol=1e-6)
        assert torch.equal(row(v_cache, b)[pad:total], values)
        assert torch.equal(row(k_cache, b)[total:], row(before_k, b)[total:])
        assert torch.equal(row(k_cache, b)[:pad], row(before_k, b)[:pad])


def test_length_as_an_int_and_a_full_cache() -> None:
    q, cache = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8)
    part = flash_attn_func(q, cache[:, :5], cache[:, :5], causal=True)
    torch.testing.assert_close(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5, causal=True), part)
    full = flash_attn_func(q, cache, cache, causal=True)
    torch.testing.assert_close(flash_attn_with_kvcache(q, cache, cache, causal=True), full)


def test_gradients_through_a_dense_cache() -> None:
    q, k, v = (torch.randn(2, n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (3, 9, 9))
    rows = torch.tensor([1, 0], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=7, cache_batch_idx=rows)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    out = flash_attn_func(q, k[[1, 0], :7], v[[1, 0], :7])
    for ours, expected in zip(found, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_sequences_that_share_a_row_of_the_cache() -> None:
    """A prompt read by several sequences; its gradient is the sum over them."""
    q, k, v = (torch.randn(b, 5, 2, 4, dtype=torch.float64, requires_grad=True) for b in (3, 1, 1))
    rows = torch.zeros(3, dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_batch_idx=rows)
    found = torch.autograd.grad(out.sum(), (k, v))
    out = flash_attn_func(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    for ours, expected in zip(found, torch.autograd.grad(out.sum(), (k, v)), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("page", (1, 5, 64))
def test_packed_queries_over_pages(page: int) -> None:
    """Chunked prefill: packed queries of several lengths, keys in pages."""
    lens_q, lens_k = [3, 1, 6], [9, 20, 6]
    pages = -(-20 // page)
    k, v = (torch.randn(3 * pages, page, 2, 8, dtype=torch.float64) for _ in range(2))
    q = torch.randn(10, 4, 8, dtype=torch.float64)
    table = torch.randperm(3 * pages).view(3, pages).int()
    cu = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
    used = torch.tensor(lens_k, dtype=torch.int32)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, max_seqlen_q=6, seqused_k=used, page_table=table, causal=True
    )
    for b in range(3):
        keys, values = (x[table[b]].flatten(0, 1)[None, : lens_k[b]] for x in (k, v))
        queries = q[cu[b] : cu[b + 1]][None]
        assert queries.shape[1] == lens_q[b]
        expected = flash_attn_func(queries, keys, values, causal=True)
        torch.testing.assert_close(out[cu[b] : cu[b + 1]], expected[0])
