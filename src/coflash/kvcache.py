"""A key/value cache before attention reads it: rotate, append, and say how long each sequence is now."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coflash import checks
from coflash.checks import Options, Sizes
from coflash.operands import Operands

__all__ = ["Rotary", "extend"]


class Rotary(NamedTuple):
    """Tables of angles for positions, and which dimensions are a pair."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


def extend(
    operands: Operands,
    options: Options,
    cache_seqlens: int | Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    rotary: Rotary,
) -> Operands:
    """Append k and v to the cache, rotating k and q if tables are given: operands of the call that is left.

    Everything is checked before anything is written.
    """
    q = operands.q
    cos, sin, interleaved = rotary
    lengths = _lengths(q, cache_seqlens, k)
    if (k is None) != (v is None):
        checks.refuse("v" if v is None else "k", "None", "both k and v, or neither")
    if (cos is None) != (sin is None):
        missing = "rotary_sin" if sin is None else "rotary_cos"
        checks.refuse(missing, "None", "both rotary_cos and rotary_sin, or neither")
    if not isinstance(interleaved, bool):
        checks.refuse("rotary_interleaved", repr(interleaved), "True or False", TypeError)

    if k is None and cos is None:  # nothing to do here, and the call itself is checked like any other
        return operands._replace(seqused_k=lengths)
    new = 0
    if k is not None and v is not None:
        checks.check_tensor("k", k)
        checks.check_tensor("v", v)
        new = k.shape[1] if k.dim() == 4 else 0
    used = None if lengths is None else lengths + new if new else lengths
    operands = operands._replace(seqused_k=used)
    sizes = checks.describe(operands, options)
    if k is not None and v is not None:
        _check_new("k", k, operands.k, sizes)
        _check_new("v", v, operands.v, sizes)
        if k.shape[1] != v.shape[1]:
            checks.refuse("v", f"of {v.shape[1]} tokens", f"as many as k, {k.shape[1]}")
        checks.refuse_gradients(operands, options.entry, "through an append to the cache")
        checks.refuse_gradients(
            operands._replace(k=k, v=v), "flash_attn_func", "through an append to the cache"
        )
    if not torch.compiler.is_compiling():
        checks.check_values(operands, options, sizes)

    if cos is not None and sin is not None:
        rotated = _check_rotary(cos, sin, sizes.head_dim, q)
        # Without a cache length, the cache is full and its last tokens are where q stands.
        at = (
            torch.full((sizes.batch,), sizes.seqlen_k, device=q.device) if lengths is None else lengths.long()
        )
        if operands.cache_leftpad is not None:
            at = at - operands.cache_leftpad
        ordered = options.causal or any(side not in (None, -1) for side in options.window_size)
        steps = torch.arange(sizes.seqlen_q, device=q.device) * int(ordered)
        _check_room(at, max(new, sizes.seqlen_q if ordered else 1), cos)
        operands = operands._replace(q=_rotate(q, cos, sin, at[:, None] + steps, rotated, interleaved))
        if k is not None:
            k = _rotate(k, cos, sin, at[:, None] + torch.arange(new, device=q.device), rotated, interleaved)
    if k is not None and v is not None and lengths is not None:
        _append(operands, k, v, lengths.long())
    return operands


def _lengths(q: Tensor, given: int | Tensor | None, k: Tensor | None) -> Tensor | None:
    """cache_seqlens as a tensor."""
    checks.check_tensor("q", q)
    if given is None:
        if k is not None:
            checks.refuse("cache_seqlens", "None", "an int or int32 (batch,) whenever k is given")
        return None
    if isinstance(given, Tensor):
        batch = q.shape[0] if q.dim() else 0
        checks.check_index("cache_seqlens", given, (batch,), q.device, "(batch,)")
        return given
    if not isinstance(given, int) or isinstance(given, bool):
        checks.refuse("cache_seqlens", repr(given), "an int or int32 (batch,)", TypeError)
    if given < 0:
        checks.refuse("cache_seqlens", given, "0 or more")
    return torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)


def _check_new(name: str, x: Tensor, cache: Tensor, sizes: Sizes) -> None:
    shape = (sizes.batch, None, *cache.shape[2:])
    if x.dim() != 4 or any(n is not None and m != n for m, n in zip(x.shape, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        checks.refuse(
            name, f"of shape {tuple(x.shape)}", f"(batch, seqlen_new, nheads_kv, head_dim), here ({wanted})"
        )
    if x.dtype != cache.dtype:
        checks.refuse(name, x.dtype, f"the cache's dtype, {cache.dtype}", TypeError)
    if x.device != cache.device:
        checks.refuse(name, f"on {x.device}", f"the cache's device, {cache.device}")


def _check_rotary(cos: Tensor, sin: Tensor, head_dim: int, q: Tensor) -> int:
    """Dimensions that are rotated."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.check_tensor(name, table)
        if not table.is_floating_point():
            checks.refuse(name, table.dtype, "a floating dtype", TypeError)
        if table.dim() != 2 or not 1 <= table.shape[1] <= head_dim // 2:
            checks.refuse(
                name,
                f"of shape {tuple(table.shape)}",
                f"(seqlen_rotary, rotary_dim / 2) with rotary_dim up to head_dim, {head_dim}",
            )
        if table.device != q.device:
            checks.refuse(name, f"on {table.device}", f"the device of q, {q.device}")
    if sin.shape != cos.shape:
        checks.refuse(
            "rotary_sin", f"of shape {tuple(sin.shape)}", f"the shape of rotary_cos, {tuple(cos.shape)}"
        )
    return 2 * cos.shape[1]


def _check_room(at: Tensor, count: int, cos: Tensor) -> None:
    if torch.compiler.is_compiling() or at.is_cuda or at.numel() == 0 or count == 0:
        return  # on a GPU the table's own index check stands guard
    last = int(at.max()) + count
    if last > cos.shape[0]:
        checks.refuse(
            "rotary_cos", f"of {cos.shape[0]} positions", f"at least {last}, the last position used"
        )


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rotated: int, interleaved: bool
) -> Tensor:
    """x `(batch, seqlen, nheads, head_dim)` with its first `rotated` dimensions turned pair by pair."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].to(dtype)[:, :, None, :] for table in (cos, sin))
    head, tail = x[..., :rotated].to(dtype), x[..., rotated:]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (first * c - second * s, first * s + second * c)
    head = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((head.to(x.dtype), tail), dim=-1)


def _append(operands: Operands, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """Write the new tokens behind each sequence's last one."""
    at = lengths[:, None]
    if k.shape[1] != 1:
        at = at + torch.arange(k.shape[1], device=k.device)
    table = operands.page_table
    batch = torch.arange(at.shape[0], device=k.device)
    index: tuple[Tensor, Tensor]
    if table is not None:
        size = operands.k.shape[1]
        index = table[batch[:, None], at // size].long(), at % size
    else:
        row = batch if operands.cache_batch_idx is None else operands.cache_batch_idx.long()
        index = row[:, None].expand_as(at), at
    operands.k.index_put_(index, k)
    operands.v.index_put_(index, v)
