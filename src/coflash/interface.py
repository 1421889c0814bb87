"""The public functions: arguments in, a checked and named call out.

The method is FlashAttention's: attention computed exactly, tile by tile, with the softmax normalised as it
goes, so that memory grows linearly with the sequence (Dao et al., arXiv:2205.14135 and arXiv:2307.08691), in
the form that FlashAttention-4 gave it: rescale only when the running maximum grows by more than a threshold,
and exponentials by polynomial where the hardware is short of them.

What all functions share:

- **Dtypes**: q, k, v of one dtype, float16, bfloat16, float32 or float64.  Scores and sums are float32
  (float64 for float64 inputs); under autocast, inputs are cast as PyTorch's own attention casts them.
- **Strides**: any.  A kernel reads operands in place when their last stride is 1 and base and rows are
  aligned to 16 bytes; otherwise the operand is copied once.
- **A score's way**: `softmax_scale * q·k`, softcap, alibi, `score_mod`, then the masks: causal, window,
  `mask_mod`, lengths; at last the sink joins the denominator.
- **A row that sees no key** has output 0, lse -inf (the sink's score with a sink) and gradients 0.
- **Results**: `out`, or `(out, lse)` with `return_lse=True`.  lse is the natural logarithm of the softmax's
  denominator, sink included, in float32 (float64 for float64 inputs), and is differentiable.
- **Errors**: `TypeError` for an argument of the wrong type or dtype, `ValueError` for a wrong value or shape,
  `NotImplementedError` for what the chosen path cannot do.  The message names the argument, what it was, and
  what is accepted.  The contents of `cu_seqlens`, lengths and page tables are checked on CPU tensors only: on
  a GPU that would wait for the device, and the caller vouches for them.

- **torch.compile** traces every function without a graph break.  score_mod and mask_mod must then be defined
  outside the function that is compiled.

Everything after q, k, v is keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from coflash import checks, functions, kvcache, torch_ops
from coflash.checks import Options
from coflash.operands import BlockTables, Operands

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention"]

Backend = Literal["auto", "portable", "kernel"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_UNBOUNDED: Window = (None, None)

# What `flash_attn_func` and `flash_attn_varlen_func` do for calls that they have seen, by everything of them but
# the tensors' contents and addresses; only such calls are here as need nothing else looked at.
_SHORTCUTS: dict[Any, Callable[..., Any]] = {}
_MOST_SHORTCUTS = 4096
_LENGTH = {Tensor, type(None)}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a batch of equally long sequences, differentiable in every floating argument.

    Args:
        q: queries, `(batch, seqlen_q, nheads_q, head_dim)`; head_dim from 1 to 512.
        k: keys, `(batch, seqlen_k, nheads_kv, head_dim)`; nheads_q is a multiple of nheads_kv, and query head
            h reads key head `h // (nheads_q // nheads_kv)`.  Keys are not copied for grouped heads.
        v: values, `(batch, seqlen_k, nheads_kv, head_dim_v)`; head_dim_v may differ from head_dim.
        softmax_scale: factor on q·k; default `head_dim ** -0.5`.
        causal: query i sees key j when `j <= i + seqlen_k - seqlen_q` (aligned to the bottom right).
        window_size: `(left, right)` in tokens: query i sees `i + off - left <= j <= i + off + right` with
            `off = seqlen_k - seqlen_q`; None (or -1) is unbounded; combines with causal.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 is off.
        learnable_sink: one score per query head, `(nheads_q,)`, any floating dtype, in units of the scaled
            scores; joins the denominator and carries no value.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, PyTorch FlexAttention's signature; captured
            tensors get gradients too.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True where the query may see the key.
        alibi_slopes: `(nheads_q,)` or `(batch, nheads_q)`, float32; adds `-slope * |i + off - j|`.
        dropout_p: probability in [0, 1) of dropping a weight after the softmax; the kept ones are scaled by
            `1 / (1 - dropout_p)`.
        dropout_seed: an integer, or an int64 tensor with one element, that fixes the dropped weights;
            default: drawn from the device's default generator, so that `torch.manual_seed` decides.
        deterministic: the backward gives the same bits every run.
        return_lse: also return the log-sum-exp, `(batch, nheads_q, seqlen_q)`.
        backend: "auto" (a kernel on the GPUs that have one, the portable path elsewhere), "portable",
            "kernel".
        kernel_options: for experiments: fields of the kernel's configuration to override.  Names and effect
            may change with any version; refused where no kernel runs.

    Returns:
        `(batch, seqlen_q, nheads_q, head_dim_v)` in q's dtype; with `return_lse` also the lse.
    """
    key = None
    if (
        not (torch_ops.is_watched() or _is_any_autocast_enabled())
        and learnable_sink is score_mod is mask_mod is alibi_slopes is kernel_options is None
    ):
        key, shortcut = _look_up(
            q, k, v, softmax_scale, causal, window_size, softcap, dropout_p, deterministic, return_lse, backend, ()
        )  # fmt: skip
        if shortcut is not None:
            return shortcut(q, k, v)
    return _attend(
        Operands(
            q,
            k,
            v,
            learnable_sink,
            alibi_slopes,
            (),
            _scale(q, softmax_scale),
            dropout_seed=_seed(q, dropout_p, dropout_seed),
        ),
        Options(
            "flash_attn_func",
            causal,
            window_size,
            softcap,
            score_mod,
            mask_mod,
            dropout_p,
            deterministic,
            return_lse,
            backend,
            kernel_options=_pairs(kernel_options),
        ),
        key,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over sequences of different lengths, packed end to end, padded, or in pages.

    Positions that masks and `score_mod` see are local to the sequence, and `off` in causal and window is the
    sequence's own `len_k - len_q`.

    Args:
        q: with `cu_seqlens_q`: `(total_q, nheads_q, head_dim)`, else `(batch, seqlen_q, nheads_q, head_dim)`.
        k: with `cu_seqlens_k`: `(total_k, nheads_kv, head_dim)`; with `page_table`:
            `(num_pages, page_size, nheads_kv, head_dim)`; else `(batch, seqlen_k, nheads_kv, head_dim)`.
        v: as k, with head_dim_v.
        cu_seqlens_q: int32 `(batch + 1,)`: sequence b's queries are rows `cu_seqlens_q[b]` up to
            `cu_seqlens_q[b + 1]`; starts at 0, does not decrease, ends at most at total_q.
        cu_seqlens_k: the same for k and v; not together with `page_table`.
        max_seqlen_q: the longest sequence's queries; default: read from `cu_seqlens_q` (on a GPU this waits
            for the device).
        max_seqlen_k: the same for keys.
        seqused_q: int32 `(batch,)`: only that many queries of each sequence exist; the other rows are 0 in
            the output, -inf in the lse.
        seqused_k: int32 `(batch,)`: only that many keys of each sequence exist.  Required with `page_table`.
        page_table: int32 `(batch, pages_per_sequence)`: page p of sequence b is `k[page_table[b, p]]`.
            Entries past `seqused_k` are not read.  No gradients: a tensor that requires grad is refused.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out shaped like q with head_dim_v; with `return_lse` also the lse, `(nheads_q, total_q)` for packed
        queries, else `(batch, nheads_q, seqlen_q)`.
    """
    key = None
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if (
        not (torch_ops.is_watched() or _is_any_autocast_enabled())
        and page_table is learnable_sink is score_mod is mask_mod is alibi_slopes is kernel_options is None
        and {Tensor} <= {*map(type, lengths)} <= _LENGTH
    ):
        more: tuple[Any, ...] = (max_seqlen_q, max_seqlen_k, type(max_seqlen_q), type(max_seqlen_k))
        for x in lengths:
            more += (None,) if x is None else (x.shape, x.stride(), x.dtype, x.get_device())
        key, shortcut = _look_up(
            q, k, v, softmax_scale, causal, window_size, softcap, dropout_p, deterministic, return_lse, backend, more
        )  # fmt: skip
        if shortcut is not None:
            return shortcut(q, k, v, *lengths)
    return _attend(
        Operands(
            q,
            k,
            v,
            learnable_sink,
            alibi_slopes,
            (),
            _scale(q, softmax_scale),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            page_table,
            dropout_seed=_seed(q, dropout_p, dropout_seed),
        ),
        Options(
            "flash_attn_varlen_func",
            causal,
            window_size,
            softcap,
            score_mod,
            mask_mod,
            dropout_p,
            deterministic,
            return_lse,
            backend,
            max_seqlen_q,
            max_seqlen_k,
            kernel_options=_pairs(kernel_options),
        ),
        key,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a key/value cache, appending new keys and values to it first if given.

    Args:
        q: `(batch, seqlen_q, nheads_q, head_dim)`.
        k_cache: `(batch_cache, seqlen_cache, nheads_kv, head_dim)`, or with `page_table`
            `(num_pages, page_size, nheads_kv, head_dim)`.  Written in place when `k` is given.
        v_cache: as k_cache, with head_dim_v.
        k: new keys `(batch, seqlen_new, nheads_kv, head_dim)`, written at `cache_seqlens` onwards.
        v: new values, `(batch, seqlen_new, nheads_kv, head_dim_v)`; given exactly when `k` is.
        rotary_cos: `(seqlen_rotary, rotary_dim / 2)`: rotates the first rotary_dim dimensions of q and of
            the new k.  Key position: its index in the sequence.  Query i's position: `cache_seqlens + i`
            with causal or a window, else `cache_seqlens`.
        rotary_sin: as rotary_cos.
        rotary_interleaved: pairs are dimensions (0, 1), (2, 3), ... (GPT-J) if True, else (0, r), (1, r + 1),
            ... with `r = rotary_dim / 2` (GPT-NeoX).
        cache_seqlens: tokens in the cache before the append: an int, or int32 `(batch,)`; default: the cache
            is full (required with `k` and with `page_table`).
        cache_batch_idx: int32 `(batch,)`: sequence b uses row `cache_batch_idx[b]` of the cache; not with
            `page_table`.  With `k`, rows must be distinct.
        cache_leftpad: int32 `(batch,)`: the sequence starts that many tokens into its row; counted in
            `cache_seqlens`.  Positions count from the first token after the padding.
        page_table: int32 `(batch, pages_per_sequence)`, as in `flash_attn_varlen_func`.

    The other arguments are those of `flash_attn_func`, with `seqlen_k` each sequence's length after the
    append.  Gradients flow to q and a dense cache; with pages or an append a tensor that requires grad is
    refused.

    Returns:
        `(batch, seqlen_q, nheads_q, head_dim_v)`; with `return_lse` also lse `(batch, nheads_q, seqlen_q)`.
    """
    operands = Operands(
        q,
        k_cache,
        v_cache,
        learnable_sink,
        alibi_slopes,
        softmax_scale=_scale(q, softmax_scale),
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )
    options = Options(
        "flash_attn_with_kvcache",
        causal,
        window_size,
        softcap,
        score_mod,
        mask_mod,
        return_lse=return_lse,
        backend=backend,
        kernel_options=_pairs(kernel_options),
    )
    rotary = kvcache.Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    return _attend(kvcache.extend(operands, options, cache_seqlens, k, v, rotary), options)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """PyTorch FlexAttention's call: `torch.nn.attention.flex_attention.flex_attention` with its layout.

    Args:
        query: `(batch, nheads_q, seqlen_q, head_dim)`.
        key: `(batch, nheads_kv, seqlen_k, head_dim)`.
        value: `(batch, nheads_kv, seqlen_k, head_dim_v)`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, as in `flash_attn_func`.
        block_mask: PyTorch's `BlockMask`: empty blocks are skipped, full blocks are not masked, and its
            `mask_mod` decides inside the others.
        scale: factor on the scores; default `head_dim ** -0.5`.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse: also return the log-sum-exp, `(batch, nheads_q, seqlen_q)`.
        backend, kernel_options: as in `flash_attn_func`.

    Returns:
        `(batch, nheads_q, seqlen_q, head_dim_v)`; with `return_lse` also the lse.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checks.check_tensor(name, tensor)
        if tensor.dim() != 4:
            checks.refuse(name, f"of shape {tuple(tensor.shape)}", "(batch, nheads, seqlen, head_dim)")
    if not enable_gqa and key.shape[1] != query.shape[1]:
        checks.refuse(
            "key",
            f"of {key.shape[1]} heads",
            f"query's {query.shape[1]} heads, or fewer with enable_gqa=True",
        )
    tables, size, mask_mod = None, None, None
    if block_mask is not None:
        tables, size, mask_mod = _block_mask(block_mask, query, key)
    result = _attend(
        Operands(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=_scale(query, scale),
            block_tables=tables,
        ),
        Options(
            "flex_attention",
            score_mod=score_mod,
            mask_mod=mask_mod,
            return_lse=return_lse,
            backend=backend,
            block_mask_size=size,
            kernel_options=_pairs(kernel_options),
        ),
    )
    if return_lse:
        out, lse = result
        return out.transpose(1, 2), lse
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


def _block_mask(
    block_mask: BlockMask, query: Tensor, key: Tensor
) -> tuple[BlockTables, tuple[int, int], Any]:
    """The tables, block size and mask function of PyTorch's BlockMask, checked against the operands."""
    tables = BlockTables(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    rows, columns = block_mask.BLOCK_SIZE
    batch, heads = tables.num.shape[:2]
    if batch not in (1, query.shape[0]) or heads not in (1, query.shape[1]):
        checks.refuse(
            "block_mask",
            f"for batch {batch} and {heads} heads",
            f"1 or {query.shape[0]} for the batch, 1 or {query.shape[1]} for the heads",
        )
    lengths = block_mask.seq_lengths
    if lengths[0] < query.shape[2] or lengths[1] < key.shape[2]:
        checks.refuse(
            "block_mask",
            f"for lengths {tuple(lengths)}",
            f"lengths of at least those of query and key, {(query.shape[2], key.shape[2])}",
        )
    if tables.num.device != query.device:
        checks.refuse("block_mask", f"on {tables.num.device}", f"the device of query, {query.device}")
    return tables, (rows, columns), block_mask.mask_mod


def _look_up(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    backend: str,
    more: tuple[Any, ...],
) -> tuple[Any, Callable[..., Any] | None]:
    """The key of a call, unless it must take the longer way, and its shortcut, if it has one.

    `more` is what else decides the call; the caller has asked whether anything is watching.
    """
    if not type(q) is type(k) is type(v) is Tensor:
        return None, None
    key = (
        q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        softmax_scale, causal, softcap, dropout_p, deterministic, return_lse, backend, more,
        window_size if window_size is _UNBOUNDED else repr(window_size),
        # 1 is no boolean, though it equals True.
        type(softmax_scale), type(causal), type(softcap), type(dropout_p), type(deterministic),
        type(return_lse),
    )  # fmt: skip
    try:
        shortcut = _SHORTCUTS.get(key)
    except TypeError:  # no argument that is taken fails to be a key; it will be refused
        return None, None
    return key, None if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 else shortcut


def _attend(operands: Operands, options: Options, key: Any = None) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call: straight from the table of prepared calls if its signature has been seen.

    With a key, calls that share it may take a shortcut from now on.
    """
    q = operands.q
    checks.check_tensor("q", q)
    if torch.is_autocast_enabled(q.device.type):
        operands = _autocast(operands)
    if torch_ops.needs_tracing(operands):
        out, lse = torch_ops.attend_traced(operands, options)
        return _results(out, lse, options)
    if callable(options.score_mod) and torch.is_grad_enabled():
        operands = operands._replace(captured=functions.captured(options.score_mod, q))
    call = torch_ops.prepare(operands, options)
    out, lse = torch_ops.attend(call, operands)
    if key is not None and key not in _SHORTCUTS:
        shortcut = torch_ops.shortcut(call, operands)
        if shortcut is not None:
            if len(_SHORTCUTS) >= _MOST_SHORTCUTS:
                _SHORTCUTS.clear()
            _SHORTCUTS[key] = shortcut
    return _results(out, lse, options)


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is not None:
        return softmax_scale
    return q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0


def _results(out: Tensor, lse: Tensor, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    if not options.return_lse:
        return out
    return out, lse if out.dtype == torch.float64 else lse.float()


def _pairs(kernel_options: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """kernel_options as something that can be part of a key."""
    if kernel_options is None:
        return None
    if not isinstance(kernel_options, Mapping):
        accepted = "a mapping of names to values, or None"  # type: ignore[unreachable]
        checks.refuse("kernel_options", type(kernel_options).__name__, accepted, TypeError)
    return tuple(sorted(kernel_options.items()))


def _autocast(operands: Operands) -> Operands:
    """q, k, v as PyTorch's own attention sees them under autocast."""
    device_type = operands.q.device.type
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in operands[:3]
    )
    return operands._replace(q=q, k=k, v=v)


def _seed(q: Tensor, dropout_p: float, seed: int | Tensor | None) -> Tensor | None:
    """The dropout seed as a tensor of one int64."""
    if not dropout_p or not isinstance(q, Tensor):
        return None
    device = q.device
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            checks.refuse("dropout_seed", seed.dtype, "torch.int64", TypeError)
        if seed.numel() != 1:
            checks.refuse("dropout_seed", f"of shape {tuple(seed.shape)}", "a tensor with one element")
        if seed.device != device:
            checks.refuse("dropout_seed", f"on {seed.device}", f"the device of q, {device}")
        return seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        checks.refuse(
            "dropout_seed", repr(seed), "an int, an int64 tensor with one element, or None", TypeError
        )
    if not -(2**63) <= seed < 2**63:
        checks.refuse("dropout_seed", seed, "an int of 64 bits")
    return torch.full((), seed, dtype=torch.int64, device=device)
