"""`attn_implementation="coflash"` for models of the transformers library.

`register_with_transformers()` adds two functions to the library's own tables: one that makes a model's mask
once per forward, one that each layer calls.

A mask of size seqlen_q x seqlen_k is never stored. transformers describes a mask by a function of indices;
the function here takes it apart into a band (causal, sliding window), documents packed into one row, and
padding, and notes where each sequence's tokens lie. A layer then attends over the packed tokens alone, so
that padding costs nothing and windows stay windows. What it can't take apart goes on as a `mask_mod`,
evaluated tile by tile. Queries that are padding themselves get zeros under a causal mask.

Only under tracing (`torch.compile`, `torch.export`), where lengths may not be read, the mask is the dense
boolean one that SDPA would get.

Not served, by name: attention weights, block tables, sinks of each query, sparse indices. And transformers
itself refuses chunked attention (Llama 4) past one chunk to every name with "flash" in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from coflash.integrations.pytorch import mask_mod_of, score_mod_of
from coflash.interface import Backend, flash_attn_func, flash_attn_varlen_func

# (batch, head, query, key) -> visible, of tensors that broadcast; positions count from the sequence's start
MaskFunction = Callable[..., Tensor]


def register_with_transformers(name: str = "coflash", *, backend: Backend = "auto") -> None:
    """Make `attn_implementation=name` use coflash in every model of the transformers library.

    Args:
        name: what models ask for. Keep "flash" in it: models then hand over lengths instead of dense masks.
        backend: as in `coflash.flash_attn_func`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers import modeling_flash_attention_utils as flash_utils

    AttentionInterface.register(name, partial(attention_forward, backend=backend))
    AttentionMaskInterface.register(name, make_mask)

    # transformers takes every name with "flash" in it for a package of kernels: it looks for the package when
    # a model is made, and replaces the name in models that list the kernels they were tried with.
    _also_for(name, backend, flash_utils, "_lazy_imports", _flash_functions)
    _also_for(name, backend, PreTrainedModel, "_check_and_adjust_attn_implementation", _keep_name)


def _also_for(name: str, backend: Backend, owner: Any, attribute: str, answer: Callable[..., Any]) -> None:
    """Let `owner.attribute(..., name, ...)` return `answer`'s result, and leave it alone for other names."""
    current = getattr(owner, attribute)
    if hasattr(current, "coflash_backends"):
        current.coflash_backends[name] = backend
        return
    backends = {name: backend}

    @functools.wraps(current)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        asked = [value for value in (*args, *kwargs.values()) if isinstance(value, str) and value in backends]
        return answer(*args, backend=backends[asked[0]], **kwargs) if asked else current(*args, **kwargs)

    wrapped.coflash_backends = backends  # type: ignore[attr-defined]
    setattr(owner, attribute, wrapped)


def _flash_functions(*_: Any, backend: Backend, **__: Any) -> tuple[Any, ...]:
    """What transformers finds in a flash attention package; models without the interface call it directly."""
    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    dense, varlen = (partial(f, backend=backend) for f in (flash_attn_func, flash_attn_varlen_func))
    paged_cache = None
    return dense, varlen, paged_cache, _pad_input, _unpad_input


def _keep_name(_model: Any, attn_implementation: str, *_: Any, backend: Backend, **__: Any) -> str:
    return attn_implementation


# ---------------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class Band:
    """What a mask function says, where it can be said in coflash's options: query i sees key j of the same
    document when `i - left <= j <= i + right`."""

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None  # (batch, seqlen): a number per token; tokens of one document share it

    def __and__(self, other: Band) -> Band | None:
        if self.documents is not None and other.documents is not None:
            return None
        return Band(
            left=_least(self.left, other.left),
            right=_least(self.right, other.right),
            documents=other.documents if self.documents is None else self.documents,
        )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def read_band(function: Any) -> Band | None:
    """Take a mask function of `transformers.masking_utils` apart; None for one that isn't known."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    held = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.split("."):
        case ["causal_mask_function"]:
            return Band(right=0)
        case ["bidirectional_mask_function"]:
            return Band()
        case ["sliding_window_overlay", *_]:
            return Band(left=held["sliding_window"] - 1)
        case ["sliding_window_bidirectional_overlay", *_]:
            return Band(left=held["sliding_window"], right=held["sliding_window"])
        case ["packed_sequence_mask_function", *_]:
            return Band(documents=held["packed_sequence_mask"])
        case ["remap_positions_for_packed_sequence", *_]:
            # Positions that start anew in each document. Within one they still differ as the indices do, and
            # the documents' own mask, which always comes along, hides the rest.
            return read_band(held["mask_function"])
        case ["and_masks", *_]:
            band: Band | None = Band()
            for part in held["mask_functions"]:
                one = read_band(part)
                band = None if band is None or one is None else band & one
            return band
    return None


@dataclass(frozen=True)
class Packing:
    """Where the tokens of each sequence lie; (row, position) indices, or None where every token counts."""

    queries: tuple[Tensor, Tensor] | None
    keys: tuple[Tensor, Tensor] | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Geometry:
    """The absolute positions a mask covers: queries and keys are `length` tokens from `offset` on."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int

    @property
    def q_end(self) -> int:
        return self.q_offset + self.q_length

    @property
    def kv_end(self) -> int:
        return self.kv_offset + self.kv_length

    @property
    def square(self) -> bool:
        return self.q_offset == self.kv_offset and self.q_length == self.kv_length


@dataclass(frozen=True)
class Layout:
    """A mask in the words of coflash: attend over the packed tokens, or over the first `num_keys` keys."""

    band: Band
    num_keys: int
    packing: Packing | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        options["causal"] = self.band.right == 0
        options["window_size"] = (self.band.left, None if self.band.right == 0 else self.band.right)
        if self.packing is None:
            return cast(Tensor, flash_attn_func(q, k[:, : self.num_keys], v[:, : self.num_keys], **options))
        pack = self.packing
        out = flash_attn_varlen_func(
            q.flatten(0, 1) if pack.queries is None else q[pack.queries],
            *(t.flatten(0, 1) if pack.keys is None else t[pack.keys] for t in (k, v)),
            cu_seqlens_q=pack.cu_seqlens_q,
            cu_seqlens_k=pack.cu_seqlens_k,
            max_seqlen_q=pack.max_seqlen_q,
            max_seqlen_k=pack.max_seqlen_k,
            **options,
        )
        out = cast(Tensor, out)
        if pack.queries is None:
            return out.unflatten(0, q.shape[:2])
        return out.new_zeros(*q.shape[:2], *out.shape[1:]).index_put(pack.queries, out)


def lay_out(band: Band, shape: Geometry, padding: Tensor | None) -> Layout | None:
    """Say a band and a padding mask (batch, positions) with coflash's options; None where these can't.

    coflash aligns the last query with the last key, so every case is brought to that.
    """
    causal = band.right == 0
    bounded = band.left is not None or band.right is not None
    if band.documents is not None:
        return _lay_out_documents(band, shape, padding)

    num_keys = shape.kv_length
    if causal:
        if not shape.kv_offset <= shape.q_offset < shape.q_end <= shape.kv_end:
            return None
        num_keys = shape.q_end - shape.kv_offset  # the rest is not written yet (a static cache)
    elif bounded and not shape.square:
        return None

    if padding is None:
        return Layout(band, num_keys)
    valid_keys = padding[:, shape.kv_offset : shape.kv_offset + num_keys]
    if valid_keys.shape[1] != num_keys:
        return None
    if bool(valid_keys.all()):
        return Layout(band, num_keys)

    valid_queries = None
    if bounded:
        # Queries and keys are the same tokens, and both are packed, so the diagonal stays where it was. A
        # window counts positions: it survives only where no padding lies between tokens.
        if (band.left is not None or not causal) and not _contiguous(valid_keys):
            return None
        valid_queries = padding[:, shape.q_offset : shape.q_end]
    return Layout(band, num_keys, _pack(shape, valid_queries, valid_keys))


def _lay_out_documents(band: Band, shape: Geometry, padding: Tensor | None) -> Layout | None:
    documents = band.documents
    if documents is None or padding is not None or not shape.square or shape.q_offset:
        return None
    documents = documents.expand(shape.batch, -1)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = starts.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([first, first.new_tensor([documents.numel()])]).to(torch.int32)
    longest = int(cu_seqlens.diff().max()) if first.numel() else 0
    packing = Packing(None, None, cu_seqlens, cu_seqlens, longest, longest)
    return Layout(Band(band.left, band.right), shape.kv_length, packing)


def _contiguous(valid: Tensor) -> bool:
    """Whether the True elements of each row form one run."""
    rises = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0]
    return bool((rises <= 1).all())


def _pack(shape: Geometry, valid_queries: Tensor | None, valid_keys: Tensor) -> Packing:
    keys, cu_seqlens_k, max_seqlen_k = _token_indices(valid_keys)
    if valid_queries is None:
        rows = torch.arange(shape.batch + 1, device=valid_keys.device, dtype=torch.int32)
        return Packing(None, keys, rows * shape.q_length, cu_seqlens_k, shape.q_length, max_seqlen_k)
    queries, cu_seqlens_q, max_seqlen_q = _token_indices(valid_queries)
    return Packing(queries, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _token_indices(valid: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, int]:
    lengths = valid.sum(1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    row, position = valid.nonzero(as_tuple=True)
    return (row, position), cu_seqlens, int(lengths.max()) if len(lengths) else 0


class UnstoredMask(Tensor):
    """A boolean mask (batch, 1, seqlen_q, seqlen_k) that holds what it means and not its elements.

    To transformers it is a tensor like any other mask. An operation on it (a model may slice its mask, or add
    to it) works on the dense mask, which is made for that.
    """

    meaning: Layout | None  # how coflash attends under it; None: only through `mask_mod`
    mask_mod: MaskFunction
    make_dense: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: Geometry,
        device: torch.device | str,
        layout: Layout | None,
        mask_mod: MaskFunction,
        make_dense: Callable[[], Tensor],
    ) -> UnstoredMask:
        size = (shape.batch, 1, shape.q_length, shape.kv_length)
        mask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=torch.device(device))
        mask.meaning, mask.mask_mod, mask.make_dense = layout, mask_mod, make_dense
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnstoredMask(shape={tuple(self.shape)}, meaning={self.meaning})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(UnstoredMask, lambda mask: mask.make_dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor:
    """The mask of one forward, in the signature of transformers' `AttentionMaskInterface`."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    # Only masks that are really there: None would leave it to the layer to guess.
    options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make_dense = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(attention_mask, FakeTensor):
        return cast(Tensor, make_dense())

    shape = Geometry(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    padding = attention_mask
    if padding is not None and padding.shape[1] < shape.kv_end:
        padding = torch.nn.functional.pad(padding, (0, shape.kv_end - padding.shape[1]))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = function(b, h, q_idx + shape.q_offset, kv_idx + shape.kv_offset)
        return visible if padding is None else visible & padding[b, kv_idx + shape.kv_offset]

    band = read_band(function)
    layout = None if band is None else lay_out(band, shape, padding)
    return UnstoredMask(shape, device, layout, mask_mod, make_dense)


# --------------------------------------------------------------------------------------------------- layers

# What some models pass that changes the result and isn't done here.
REFUSED = ("block_table", "head_mask", "indices", "block_indices", "sinks")


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    backend: Backend = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' `AttentionInterface`.

    query, key and value are `(batch, nheads, seqlen, head_dim)`, with fewer key/value heads for grouped
    heads; the result is `(batch, seqlen, nheads, head_dim_v)` and, weights never existing, None.
    """
    refused = [name for name in REFUSED if kwargs.get(name) is not None]
    if kwargs.get("output_attentions"):
        refused.append("output_attentions")
    if refused:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(refused)}, which attn_implementation='coflash' "
            "doesn't do; attn_implementation='eager' does"
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
        "dropout_p": dropout,
        "backend": backend,
    }
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))

    if isinstance(attention_mask, UnstoredMask):
        if attention_mask.meaning is not None and position_bias is None:
            return attention_mask.meaning.attend(q, k, v, **options), None
        options["mask_mod"] = attention_mask.mask_mod
    elif attention_mask is not None and attention_mask.dim() == 2:
        # Key padding, which models hand to "flash" attentions as it is.
        shape = Geometry(q.shape[0], q.shape[1], k.shape[1], k.shape[1] - q.shape[1] if is_causal else 0, 0)
        layout = lay_out(Band(right=0 if is_causal else None), shape, attention_mask.bool())
        if layout is None or position_bias is not None:
            raise NotImplementedError(
                f"a 2-dimensional attention_mask of shape {tuple(attention_mask.shape)} with {q.shape[1]} "
                f"queries, {k.shape[1]} keys and position_bias={position_bias is not None}; "
                "a 4-dimensional mask works"
            )
        return layout.attend(q, k, v, **options), None
    elif attention_mask is not None:
        mask = attention_mask[..., : k.shape[1]]
        if mask.dtype == torch.bool:
            options["mask_mod"] = mask_mod_of(mask)
        else:
            position_bias = mask if position_bias is None else mask + position_bias
    else:
        band = Band(right=0) if is_causal else Band()
        if sliding_window is not None and sliding_window < k.shape[1]:
            # transformers' own convention for flash attentions, symmetric for encoders
            band = Band(left=sliding_window - 1, right=0 if is_causal else sliding_window - 1)
        packing = _given_packing(q, position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if position_bias is None:
            return Layout(band, k.shape[1], packing).attend(q, k, v, **options), None
        if packing is not None:
            raise NotImplementedError(
                "position_bias together with packed sequences; pass a 4-dimensional mask"
            )
        options["window_size"] = (band.left, band.right)

    if position_bias is not None:
        options["score_mod"] = score_mod_of(position_bias[..., : k.shape[1]])
    return cast(Tensor, flash_attn_func(q, k, v, **options)), None


def _given_packing(
    q: Tensor,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | None,
    max_length_k: int | None,
) -> Packing | None:
    """Sequences packed by the caller: through cumulative lengths, or position ids that start at 0 again."""
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        cu_q, cu_k = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
        longest_q = int(cu_q.diff().max()) if max_length_q is None else int(max_length_q)
        longest_k = int(cu_k.diff().max()) if max_length_k is None else int(max_length_k)
        return Packing(None, None, cu_q, cu_k, longest_q, longest_k)
    if (
        position_ids is None
        or position_ids.dim() != 2
        or q.shape[0] != 1
        or position_ids.shape != q.shape[:2]
    ):
        return None
    starts = (position_ids[0] == 0).nonzero().flatten()
    if len(starts) < 2:
        return None
    cu = torch.nn.functional.pad(starts, (0, 1), value=q.shape[1]).to(torch.int32)
    cu[0] = 0
    longest = int(cu.diff().max())
    return Packing(None, None, cu, cu, longest, longest)
