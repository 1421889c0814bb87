"""Bad input: an error whose message names the argument, what it was, and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coflash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention


def tensor(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Callable[[], Any]:
    q, k, v = (tensor(2, 6, 4, 8) if x is None else x for x in (q, k, v))
    return lambda: flash_attn_func(q, k, v, **options)


def packed(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Callable[[], Any]:
    q, k, v = (tensor(12, 4, 8) if x is None else x for x in (q, k, v))
    options = {"cu_seqlens_q": ints(0, 5, 12), "cu_seqlens_k": ints(0, 5, 12)} | options
    return lambda: flash_attn_varlen_func(q, k, v, **options)


def paged(**options: Any) -> Callable[[], Any]:
    """Pages of 4 tokens, 5 of them, 2 for each of 2 sequences."""
    options = {
        "q": tensor(2, 3, 4, 8),
        "k": tensor(5, 4, 2, 8),
        "v": tensor(5, 4, 2, 8),
        "page_table": ints(0, 1, 2, 3).view(2, 2),
        "seqused_k": ints(8, 5),
    } | options
    q, k, v = (options.pop(name) for name in "qkv")
    return lambda: flash_attn_varlen_func(q, k, v, **options)


def cached(**options: Any) -> Callable[[], Any]:
    options = {
        "q": tensor(2, 1, 4, 8),
        "k_cache": tensor(3, 16, 2, 8),
        "v_cache": tensor(3, 16, 2, 8),
        "cache_batch_idx": ints(2, 0),
    } | options
    return lambda: flash_attn_with_kvcache(
        options["q"],
        options["k_cache"],
        options["v_cache"],
        **{n: x for n, x in options.items() if n not in ("q", "k_cache", "v_cache")},
    )


def new(tokens: int = 2, heads: int = 2, dim: int = 8, **options: Any) -> Tensor:
    return tensor(2, tokens, heads, dim, **options)


def flex(**options: Any) -> Callable[[], Any]:
    options = {name: tensor(2, 4, 6, 8) for name in ("query", "key", "value")} | options
    return lambda: flex_attention(options.pop("query"), options.pop("key"), options.pop("value"), **options)


V, T, N = ValueError, TypeError, NotImplementedError
GRAD = {"requires_grad": True}

# (call, error, what the message says, the argument first)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "q is no tensor": (dense(q=[1.0]), T, ("q is list", "torch.Tensor")),
    "rank of q": (
        dense(q=tensor(6, 4, 8)),
        V,
        ("q is of shape (6, 4, 8)", "(batch, seqlen, nheads, head_dim)"),
    ),
    "rank of k": (
        dense(k=tensor(6, 4, 8)),
        V,
        ("k is of shape (6, 4, 8)", "(batch, seqlen, nheads, head_dim)"),
    ),
    "rank of packed q": (packed(q=tensor(1, 12, 4, 8)), V, ("q is of shape", "(total, nheads, head_dim)")),
    "integer q": (dense(q=torch.ones(2, 6, 4, 8, dtype=torch.int64)), T, ("q is torch.int64", "float16")),
    "complex q": (dense(q=tensor(2, 6, 4, 8) + 0j), T, ("q is torch.complex64", "float32")),
    "dtype of v": (dense(v=tensor(2, 6, 4, 8).half()), T, ("v is torch.float16", "torch.float32")),
    "device of k": (dense(k=tensor(2, 6, 4, 8, device="meta")), V, ("k is on meta", "cpu")),
    "batch of k": (dense(k=tensor(3, 6, 4, 8), v=tensor(3, 6, 4, 8)), V, ("k is of batch 3", "2")),
    "heads of k": (dense(k=tensor(2, 6, 3, 8), v=tensor(2, 6, 3, 8)), V, ("k is of 3 heads", "divisor", "4")),
    "no heads of k": (dense(k=tensor(2, 6, 0, 8), v=tensor(2, 6, 0, 8)), V, ("k is of 0 heads", "divisor")),
    "head_dim of k": (dense(k=tensor(2, 6, 4, 7)), V, ("k is of head_dim 7", "8")),
    "tokens of v": (dense(v=tensor(2, 5, 4, 8)), V, ("v is of shape (2, 5, 4, 8)", "(2, 6, 4, 8)")),
    "heads of v": (dense(v=tensor(2, 6, 2, 8)), V, ("v is of shape (2, 6, 2, 8)", "(2, 6, 4, 8)")),
    "head_dim 0": (dense(*[tensor(2, 6, 4, 0)] * 3), V, ("q is of head_dim 0", "1 to 512")),
    "head_dim 513": (dense(*[tensor(1, 1, 1, 513)] * 3), V, ("q is of head_dim 513", "1 to 512")),
    "head_dim_v 513": (dense(v=tensor(2, 6, 4, 513)), V, ("v is of head_dim_v 513", "1 to 512")),
    "window below -1": (dense(window_size=(-2, 0)), V, ("window_size is (-2, 0)", "-1")),
    "window of three": (dense(window_size=(1, 2, 3)), T, ("window_size is (1, 2, 3)", "pair")),
    "window of floats": (dense(window_size=(1.5, None)), T, ("window_size is (1.5, None)", "int")),
    "negative softcap": (dense(softcap=-1.0), V, ("softcap is -1.0", "0 (off)")),
    "infinite softcap": (dense(softcap=float("inf")), V, ("softcap is inf", "finite")),
    "softcap is a string": (dense(softcap="30"), T, ("softcap is '30'", "number")),
    "causal is a number": (dense(causal=1), T, ("causal is 1", "True or False")),
    "scale is a tensor": (dense(softmax_scale=torch.ones(())), T, ("softmax_scale is", "number")),
    "scale is NaN": (dense(softmax_scale=float("nan")), V, ("softmax_scale is nan", "finite")),
    "dropout of everything": (dense(dropout_p=1.0), V, ("dropout_p is 1.0", "[0, 1)")),
    "dropout seed of floats": (
        dense(dropout_p=0.5, dropout_seed=torch.ones(())),
        T,
        ("dropout_seed is torch.float32", "int64"),
    ),
    "dropout seed too large": (dense(dropout_p=0.5, dropout_seed=2**63), V, ("dropout_seed is", "64 bits")),
    "length of the sink": (dense(learnable_sink=tensor(3)), V, ("learnable_sink is of shape (3,)", "(4)")),
    "integer sink": (
        dense(learnable_sink=ints(1, 2, 3, 4)),
        T,
        ("learnable_sink is torch.int32", "floating"),
    ),
    "shape of alibi": (dense(alibi_slopes=tensor(3, 4)), V, ("alibi_slopes is of shape (3, 4)", "(2, 4)")),
    "score_mod is no function": (dense(score_mod=3), T, ("score_mod is int", "function")),
    "unknown backend": (dense(backend="cuda"), V, ("backend is 'cuda'", '"portable"')),
    "kernel on a CPU": (dense(backend="kernel"), N, ('backend="kernel" on cpu', 'backend="portable"')),
    "kernel options on a CPU": (dense(kernel_options={"tile_m": 64}), N, ("kernel_options is", "None")),
    "kernel options are a list": (dense(kernel_options=[1]), T, ("kernel_options is list", "mapping")),
    "cu_seqlens of int64": (
        packed(cu_seqlens_q=ints(0, 5, 12).long()),
        T,
        ("cu_seqlens_q is torch.int64", "int32"),
    ),
    "cu_seqlens of a list": (packed(cu_seqlens_k=[0, 5, 12]), T, ("cu_seqlens_k is list", "torch.Tensor")),
    "cu_seqlens not from 0": (packed(cu_seqlens_q=ints(1, 5, 12)), V, ("cu_seqlens_q is starting at 1", "0")),
    "cu_seqlens decreasing": (
        packed(cu_seqlens_k=ints(0, 13, 12)),
        V,
        ("cu_seqlens_k is decreasing", "12 at 2"),
    ),
    "cu_seqlens past the end": (
        packed(cu_seqlens_k=ints(0, 5, 13)),
        V,
        ("cu_seqlens_k is ending at 13", "12"),
    ),
    "cu_seqlens of two batches": (
        packed(cu_seqlens_k=ints(0, 12)),
        V,
        ("cu_seqlens_k is of shape (2,)", "(3)"),
    ),
    "cu_seqlens of rank 2": (
        packed(cu_seqlens_q=ints(0, 12)[None]),
        V,
        ("cu_seqlens_q is of shape", "batch + 1"),
    ),
    "empty cu_seqlens": (
        packed(cu_seqlens_q=ints(), cu_seqlens_k=ints()),
        V,
        ("cu_seqlens_q is of shape (0,)",),
    ),
    "max_seqlen too small": (packed(max_seqlen_q=6), V, ("max_seqlen_q is 6", "7")),
    "negative max_seqlen": (packed(max_seqlen_k=-1), V, ("max_seqlen_k is -1", "0 or more")),
    "max_seqlen of a float": (packed(max_seqlen_k=7.0), T, ("max_seqlen_k is 7.0", "int")),
    "seqused past the sequence": (packed(seqused_q=ints(5, 8)), V, ("seqused_q is 8 for sequence 1", "7")),
    "negative seqused": (packed(seqused_k=ints(-1, 2)), V, ("seqused_k is -1 for sequence 0", "0 to")),
    "page table out of range": (
        paged(page_table=ints(0, 1, 5, 3).view(2, 2)),
        V,
        ("page_table is 5 at (1, 0)", "0 to 4"),
    ),
    "negative page": (
        paged(page_table=ints(0, -1, 2, 3).view(2, 2)),
        V,
        ("page_table is -1 at (0, 1)", "0 to 4"),
    ),
    "page table of int64": (
        paged(page_table=torch.zeros(2, 2, dtype=torch.long)),
        T,
        ("page_table", "int32"),
    ),
    "page table of another batch": (
        paged(page_table=ints(0, 1, 2)[:, None]),
        V,
        ("page_table is of shape (3, 1)",),
    ),
    "pages without lengths": (paged(seqused_k=None), V, ("seqused_k is None", "page_table")),
    "lengths past the pages": (paged(seqused_k=ints(9, 5)), V, ("seqused_k is holding 9", "0 to 8")),
    "pages and cu_seqlens_k": (paged(cu_seqlens_k=ints(0, 4, 8)), V, ("cu_seqlens_k is given together",)),
    "q requires grad with pages": (
        paged(q=tensor(2, 3, 4, 8, **GRAD)),
        N,
        ("q requires grad", "paged", "torch.no_grad()"),
    ),
    "cache requires grad with pages": (paged(v=tensor(5, 4, 2, 8, **GRAD)), N, ("v requires grad", "paged")),
    "k without v": (cached(k=new(), cache_seqlens=3), V, ("v is None", "both")),
    "k without a length": (cached(k=new(), v=new()), V, ("cache_seqlens is None", "k is given")),
    "no room for k": (
        cached(k=new(4), v=new(4), cache_seqlens=13),
        V,
        ("cache_seqlens is holding 17", "0 to 16"),
    ),
    "heads of new k": (
        cached(k=new(2, 4), v=new(), cache_seqlens=3),
        V,
        ("k is of shape (2, 2, 4, 8)", "any, 2"),
    ),
    "dtype of new v": (
        cached(k=new(), v=new().half(), cache_seqlens=3),
        T,
        ("v is torch.float16", "float32"),
    ),
    "tokens of new v": (cached(k=new(2), v=new(3), cache_seqlens=3), V, ("v is of 3 tokens", "2")),
    "q requires grad with an append": (
        cached(q=tensor(2, 1, 4, 8, **GRAD), k=new(), v=new(), cache_seqlens=3),
        N,
        ("q requires grad", "append"),
    ),
    "new k requires grad": (
        cached(k=new(**GRAD), v=new(), cache_seqlens=3),
        N,
        ("k requires grad", "append"),
    ),
    "cache row out of range": (
        cached(cache_batch_idx=ints(0, 3)),
        V,
        ("cache_batch_idx is holding 3", "0 to 2"),
    ),
    "cache length a float": (cached(cache_seqlens=3.0), T, ("cache_seqlens is 3.0", "int")),
    "negative cache length": (cached(cache_seqlens=-1), V, ("cache_seqlens is -1", "0 or more")),
    "cache length past the cache": (cached(cache_seqlens=17), V, ("cache_seqlens is holding 17", "0 to 16")),
    "padding past the length": (
        cached(cache_seqlens=3, cache_leftpad=ints(0, 4)),
        V,
        ("cache_leftpad is 4 for sequence 1", "3"),
    ),
    "cos without sin": (cached(rotary_cos=tensor(16, 4)), V, ("rotary_sin is None", "both")),
    "rotary wider than the head": (
        cached(rotary_cos=tensor(16, 5), rotary_sin=tensor(16, 5)),
        V,
        ("rotary_cos is of shape (16, 5)", "head_dim, 8"),
    ),
    "rotary too short": (
        cached(rotary_cos=tensor(4, 4), rotary_sin=tensor(4, 4), cache_seqlens=4),
        V,
        ("rotary_cos is of 4 positions", "5"),
    ),
    "sin unlike cos": (
        cached(rotary_cos=tensor(16, 4), rotary_sin=tensor(15, 4)),
        V,
        ("rotary_sin is of shape (15, 4)", "(16, 4)"),
    ),
    "rank of query": (
        flex(query=tensor(4, 6, 8)),
        V,
        ("query is of shape (4, 6, 8)", "(batch, nheads, seqlen"),
    ),
    "fewer heads without enable_gqa": (
        flex(key=tensor(2, 2, 6, 8), value=tensor(2, 2, 6, 8)),
        V,
        ("key is of 2 heads", "enable_gqa=True"),
    ),
    "scale of flex is a string": (flex(scale="1"), T, ("scale is '1'", "number")),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, error, says = CASES[name]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(says[0]), message
    for words in says:
        assert words in message, message
    assert "accepted:" in message or error is NotImplementedError, message


def test_everything_after_v_is_keyword_only() -> None:
    q = tensor(1, 2, 1, 4)
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention):
        with pytest.raises(TypeError, match="positional"):
            function(q, q, q, 0.5)


def test_a_refused_append_writes_nothing() -> None:
    k_cache, v_cache = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn_with_kvcache(
            tensor(2, 1, 4, 8), k_cache, v_cache, k=new(2), v=new(2), cache_seqlens=ints(3, 7)
        )
    assert (k_cache == 0).all() and (v_cache == 0).all()


def test_entries_past_the_length_of_a_page_table_are_not_read() -> None:
    out = paged(page_table=ints(0, 1, 2, -7).view(2, 2), seqused_k=ints(8, 4))()
    assert out.isfinite().all()


def test_no_grad_makes_pages_acceptable() -> None:
    with torch.no_grad():
        assert paged(q=tensor(2, 3, 4, 8, **GRAD))().shape == (2, 3, 4, 8)


def test_a_block_mask_for_other_lengths_is_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 4, 4, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match=r"block_mask is for lengths .* accepted: .*\(6, 6\)"):
        flex(block_mask=mask)()
    mask = create_block_mask(lambda b, h, i, j: j <= i, 3, None, 6, 6, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match="block_mask is for batch 3"):
        flex(block_mask=mask)()
