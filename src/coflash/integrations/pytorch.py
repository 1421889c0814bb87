"""`torch.nn.functional.scaled_dot_product_attention`, computed by coflash.

`sdpa` is the function itself, with PyTorch's semantics to the letter: its causal mask is aligned to the top
left (coflash's own `causal` is aligned to the bottom right), a boolean mask is True where a query may look,
a floating-point mask is added to the scaled scores, all of it broadcast over any number of batch dimensions.

`use_coflash_sdpa()` and `enable_sdpa()` make PyTorch's own function take this one. Where PyTorch has a
registry of attention implementations (`torch.nn.attention`) both go through it, under the name "coflash":
after `register_sdpa()`, `torch.nn.attention.activate_flash_attention_impl("coflash")` does the same.

What is replaced is the dispatcher's kernel of `scaled_dot_product_attention` for CPU and CUDA tensors: calls
from C++, from `torch.nn.MultiheadAttention` and from compiled graphs traced meanwhile are served too.
Left to PyTorch: nested tensors, other devices, calls under `torch.vmap` (PyTorch decomposes the function
before the replacement is reached), and the fused inference path of `torch.nn.TransformerEncoder`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from coflash.interface import Backend, flash_attn_func

NAME = "coflash"

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Scaled dot product attention with the meaning PyTorch gives each argument.

    Args:
        query: `(..., nheads_q, seqlen_q, head_dim)`. Without a heads dimension, `(batch, seqlen_q, head_dim)`
            or `(seqlen_q, head_dim)`.
        key: `(..., nheads_kv, seqlen_k, head_dim)`. Leading dimensions broadcast against the query's.
        value: `(..., nheads_kv, seqlen_k, head_dim_v)`.
        attn_mask: broadcastable to `(..., nheads_q, seqlen_q, seqlen_k)`. Boolean: True where a query may
            look at a key. Floating point (the query's type or float32): added to the scaled scores; it may
            require a gradient.
        dropout_p: probability that a weight is dropped; applied whenever it is positive, as PyTorch does.
        is_causal: query `i` sees key `j` when `j <= i`, whatever the two lengths are.
        scale: factor of the scores; `head_dim ** -0.5` when None.
        enable_gqa: let groups of consecutive query heads share a key/value head.
        backend: as in `coflash.flash_attn_func`.

    Returns:
        `(..., nheads_q, seqlen_q, head_dim_v)`. A query that may look at nothing gets zeros, as in PyTorch.

    Raises:
        ValueError: shapes that don't fit, or `attn_mask` together with `is_causal`.
        TypeError: an `attn_mask` that is neither boolean nor of an accepted floating-point type.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True were both given; SDPA accepts one of the two")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; at least (seqlen, head_dim) is needed")
    batch_shape, q, k, v = _with_heads(query, key, value, enable_gqa)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]

    window: tuple[int | None, int | None] = (None, None)
    if is_causal:
        # Keys past the last query are seen by nobody; dropping them leaves seqlen_k <= seqlen_q, where the
        # top-left diagonal lies seqlen_q - seqlen_k to the right of the bottom-right one.
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]
        window = (None, seqlen_q - k.shape[1])

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    if attn_mask is not None:
        mask = _mask_4d(attn_mask, batch_shape, (q.shape[2], seqlen_q, seqlen_k))
        if mask.dtype == torch.bool:
            mask_mod = mask_mod_of(mask)
        elif mask.dtype in (query.dtype, torch.float32):
            score_mod = score_mod_of(mask)
        else:
            raise TypeError(
                f"attn_mask has dtype {mask.dtype}; accepted are torch.bool, torch.float32 and the query's "
                f"{query.dtype}"
            )

    attended = flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scale,
        window_size=window,
        score_mod=score_mod,
        mask_mod=mask_mod,
        dropout_p=dropout_p,
        backend=backend,
    )
    out = cast(Tensor, attended).transpose(1, 2)
    return out.reshape(*batch_shape, *(out.shape[1:] if query.dim() > 2 else out.shape[2:]))


def _with_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The three operands as (batch, seqlen, nheads, head_dim), and the batch dimensions they had.

    The last dimension before the sequence counts as heads; what precedes it is broadcast and flattened.
    """
    operands = [t if t.dim() > 2 else t[None] for t in (query, key, value)]
    try:
        batch_shape = torch.broadcast_shapes(*(t.shape[:-3] for t in operands))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"the batch dimensions of query, key and value don't broadcast: {shapes}") from None
    heads = [t.shape[-3] for t in operands]
    if enable_gqa:
        if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
            raise ValueError(
                f"enable_gqa needs key and value with the same number of heads, a divisor of the query's; "
                f"got {heads[0]} query, {heads[1]} key and {heads[2]} value heads"
            )
    else:
        # Broadcasting over heads: a single key/value head is shared without being copied.
        try:
            (common,) = torch.broadcast_shapes(*((h,) for h in heads))
        except RuntimeError:
            raise ValueError(
                f"query, key and value have {heads[0]}, {heads[1]} and {heads[2]} heads, which don't "
                "broadcast; enable_gqa=True lets query heads share key/value heads"
            ) from None
        kv_heads = 1 if heads[1] == heads[2] == 1 else common
        heads = [common, kv_heads, kv_heads]
    batch = math.prod(batch_shape)
    q, k, v = (
        t.expand(*batch_shape, h, *t.shape[-2:]).reshape(batch, h, *t.shape[-2:]).transpose(1, 2)
        for t, h in zip(operands, heads, strict=True)
    )
    return batch_shape, q, k, v


def _mask_4d(attn_mask: Tensor, batch_shape: tuple[int, ...], last: tuple[int, int, int]) -> Tensor:
    """`attn_mask` as four dimensions, each full or of size 1; broadcast dimensions aren't copied."""
    full = (*batch_shape, *last)
    shape = (1,) * (len(full) - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != len(full) or any(m not in (1, n) for m, n in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}, which doesn't broadcast to {full}")
    lead = shape[: len(batch_shape)]
    if all(m == 1 for m in lead):
        return attn_mask.reshape(1, *shape[-3:])
    return attn_mask.reshape(shape).expand(*batch_shape, *shape[-3:]).reshape(-1, *shape[-3:])


def _reader(mask: Tensor) -> MaskMod:
    """`mask` of four dimensions as a function of the four indices; a dimension of size 1 is broadcast."""
    broadcast = [size == 1 for size in mask.shape]

    def read(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        index = (b, h, q_idx, kv_idx)
        return mask[tuple(torch.zeros_like(i) if one else i for i, one in zip(index, broadcast, strict=True))]

    return read


def mask_mod_of(mask: Tensor) -> MaskMod:
    """A boolean mask (batch, nheads_q, seqlen_q, seqlen_k), any of them 1, as a `mask_mod`."""
    return _reader(mask)


def score_mod_of(bias: Tensor) -> ScoreMod:
    """An additive mask (batch, nheads_q, seqlen_q, seqlen_k), any of them 1, as a `score_mod`."""
    read = _reader(bias)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + read(b, h, q_idx, kv_idx).to(score.dtype)

    return add_bias


class _Registration:
    """The dispatcher entries of one activation; `remove` takes them out again."""

    # Autograd keys so that coflash's own derivative is used, the plain ones for inference mode.
    KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for key in self.KEYS:
            self._library.impl("scaled_dot_product_attention", _dispatched, key, allow_override=True)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=_backend)


def register_sdpa() -> None:
    """Make "coflash" known to PyTorch's registry of attention implementations, without activating it."""
    import torch.nn.attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"torch {torch.__version__} has no registry of attention implementations; "
            "use_coflash_sdpa() and enable_sdpa() work without it"
        )
    registry.register_flash_attention_impl(NAME, register_fn=_Registration)


_unlisted: _Registration | None = None  # the active replacement where PyTorch has no registry
_backend: Backend = "auto"  # of calls that come through PyTorch's function


def enable_sdpa(backend: Backend = "auto") -> None:
    """From now on `torch.nn.functional.scaled_dot_product_attention` is computed by coflash, process-wide.

    Args:
        backend: as in `coflash.flash_attn_func`. With "auto", a call on a GPU with kernels that none of them
            can do (one with an `attn_mask`, so far) raises; with "portable" it is computed, slowly.
    """
    import torch.nn.attention as registry

    global _unlisted, _backend
    _backend = backend
    if hasattr(registry, "register_flash_attention_impl"):
        if registry.current_flash_attention_impl() != NAME:
            register_sdpa()
            registry.activate_flash_attention_impl(NAME)
    elif _unlisted is None:
        _unlisted = _Registration()


def disable_sdpa() -> None:
    """Undo `enable_sdpa`: PyTorch's own implementation again. Does nothing when coflash isn't active."""
    import torch.nn.attention as registry

    global _unlisted
    if hasattr(registry, "register_flash_attention_impl"):
        if registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
    elif _unlisted is not None:
        _unlisted.remove()
        _unlisted = None


@contextlib.contextmanager
def use_coflash_sdpa(backend: Backend = "auto") -> Iterator[None]:
    """Within the context `torch.nn.functional.scaled_dot_product_attention` is computed by coflash.

    Like every dispatcher registration it holds for the whole process, not for one thread. On leaving, the
    implementation that was active before (PyTorch's own, or one from its registry) is active again.
    `backend` is that of `enable_sdpa`.
    """
    import torch.nn.attention as registry

    global _backend
    current: Callable[[], str | None] = getattr(registry, "current_flash_attention_impl", lambda: None)
    before = NAME if _unlisted is not None else current()
    backend_before = _backend
    enable_sdpa(backend)
    try:
        yield
    finally:
        _backend = backend_before
        if before != NAME:
            disable_sdpa()
            if before is not None:
                registry.activate_flash_attention_impl(before)
