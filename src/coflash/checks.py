"""Is this call well formed?  Every refusal names the argument, what it was, and what is accepted.

`describe` looks at types, dtypes, devices and shapes, and returns the sizes of the call; it runs under
tracing too.  `check_values` looks into index tensors (lengths, page tables).  It does so on a CPU only: on a
GPU reading them back would make every training step wait for the device, so there the caller vouches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from coflash.operands import Operands

__all__ = ["Options", "Sizes", "check_values", "describe", "refuse_gradients"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 512


class Options(NamedTuple):
    """What a caller chose, apart from tensors."""

    entry: str  # the public function, whose argument names messages use
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    score_mod: Any = None
    mask_mod: Any = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    backend: str = "auto"
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    block_mask_size: tuple[int, int] | None = None
    kernel_options: Any = None  # a mapping; kept as a sorted tuple of pairs, which can be a key


class Sizes(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads_q: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int


# What the functions call an operand, where it is not the operand's own name.
_NAMES = {
    "flash_attn_func": {"sink": "learnable_sink"},
    "flash_attn_varlen_func": {"sink": "learnable_sink"},
    "flash_attn_with_kvcache": {
        "sink": "learnable_sink",
        "k": "k_cache",
        "v": "v_cache",
        "seqused_k": "cache_seqlens",
    },
    "flex_attention": {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"},
}


def _name(entry: str, operand: str) -> str:
    return _NAMES.get(entry, {}).get(operand, operand)


def refuse(name: str, got: object, accepted: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name} is {got}; accepted: {accepted}")


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        refuse(name, type(x).__name__, "a torch.Tensor", TypeError)


def check_index(
    name: str, x: object, shape: tuple[int | None, ...], device: torch.device, words: str
) -> None:
    """An int32 tensor on the device of q, of the given shape (None: any extent)."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    if x.dtype != torch.int32:
        refuse(name, x.dtype, "torch.int32", TypeError)
    _check_shape(name, x, shape, words)
    _check_device(name, x, device)


def _check_shape(name: str, x: Tensor, shape: tuple[int | None, ...], words: str) -> None:
    fits = x.dim() == len(shape)
    if fits:
        for have, want in zip(x.shape, shape, strict=True):
            if want is not None and have != want:
                fits = False
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        refuse(name, f"of shape {tuple(x.shape)}", f"{words}, here ({wanted})")


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(name, f"on {x.device}", f"the device of q, {device}")


def _check_options(o: Options, operands: Operands) -> None:
    for name in ("causal", "deterministic", "return_lse"):
        value = getattr(o, name)
        if not isinstance(value, bool):
            refuse(name, repr(value), "True or False", TypeError)
    window = o.window_size
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse("window_size", repr(window), "a pair (left, right) of an int or None", TypeError)
    for side in window:
        if side is None:
            continue
        if not isinstance(side, int) or isinstance(side, bool):
            refuse("window_size", repr(window), "a pair (left, right) of an int or None", TypeError)
        if side < -1:
            refuse("window_size", repr(window), "sides from 0 up; None or -1 for an unbounded side")
    if not _is_number(o.softcap):
        refuse("softcap", repr(o.softcap), "a number", TypeError)
    if not (0 <= o.softcap < math.inf):
        refuse("softcap", o.softcap, "0 (off) or a positive finite number")
    if not _is_number(o.dropout_p):
        refuse("dropout_p", repr(o.dropout_p), "a number", TypeError)
    if not (0 <= o.dropout_p < 1):
        refuse("dropout_p", o.dropout_p, "a probability in [0, 1)")
    scale = operands.softmax_scale
    if not _is_number(scale):
        refuse(_name(o.entry, "softmax_scale"), repr(scale), "a number, or None", TypeError)
    if not (-math.inf < scale < math.inf):
        refuse(_name(o.entry, "softmax_scale"), scale, "a finite number, or None")
    for name in ("score_mod", "mask_mod"):
        function = getattr(o, name)
        if function is not None and not callable(function):
            refuse(name, type(function).__name__, "a function, or None", TypeError)
    if o.backend not in ("auto", "portable", "kernel"):
        refuse("backend", repr(o.backend), '"auto", "portable" or "kernel"')
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(o, name)
        if value is None:
            continue
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            refuse(name, repr(value), "an int, or None", TypeError)
        if value < 0:
            refuse(name, value, "0 or more")


def describe(operands: Operands, options: Options) -> Sizes:
    """Check everything but the contents of index tensors; the sizes of the call."""
    o, entry = operands, options.entry
    names = {x: _name(entry, x) for x in ("q", "k", "v", "sink", "seqused_k")}
    _check_options(options, operands)
    main = (("q", o.q), ("k", o.k), ("v", o.v))
    for x, tensor in main:
        check_tensor(names[x], tensor)
    if o.q.dtype not in DTYPES:
        refuse(names["q"], o.q.dtype, "float16, bfloat16, float32 or float64", TypeError)
    for x, tensor in main[1:]:
        if tensor.dtype != o.q.dtype:
            refuse(names[x], tensor.dtype, f"the dtype of {names['q']}, {o.q.dtype}", TypeError)
        _check_device(names[x], tensor, o.q.device)

    packed_q, packed_k, paged = (
        o.cu_seqlens_q is not None,
        o.cu_seqlens_k is not None,
        o.page_table is not None,
    )
    if packed_k and paged:
        refuse("cu_seqlens_k", "given together with page_table", "one of the two")
    if entry == "flex_attention":
        row = "(batch, nheads, seqlen, head_dim)"
    else:
        row = "(batch, seqlen, nheads, head_dim)"
    pack = "(total, nheads, head_dim) with cu_seqlens"
    page = "(num_pages, page_size, nheads, head_dim) with page_table"
    for x, tensor in main:
        packed = packed_q if x == "q" else packed_k
        if tensor.dim() != (3 if packed else 4):
            words = pack if packed else page if paged and x != "q" else row
            refuse(names[x], f"of shape {tuple(tensor.shape)}", words)
    _, _, nheads_q, head_dim = (0, *o.q.shape)[-4:]
    _, _, nheads_kv, head_dim_k = (0, *o.k.shape)[-4:]
    head_dim_v = o.v.shape[-1]
    if not (1 <= head_dim <= MAX_HEAD_DIM):
        refuse(names["q"], f"of head_dim {head_dim}", f"head_dim from 1 to {MAX_HEAD_DIM}")
    if not (1 <= head_dim_v <= MAX_HEAD_DIM):
        refuse(names["v"], f"of head_dim_v {head_dim_v}", f"head_dim_v from 1 to {MAX_HEAD_DIM}")
    if head_dim_k != head_dim:
        refuse(names["k"], f"of head_dim {head_dim_k}", f"the head_dim of {names['q']}, {head_dim}")
    if o.v.shape[:-1] != o.k.shape[:-1]:
        refuse(
            names["v"],
            f"of shape {tuple(o.v.shape)}",
            f"the shape of {names['k']}, {tuple(o.k.shape)}, up to head_dim_v",
        )
    if nheads_kv < 1 or nheads_q % nheads_kv != 0:
        refuse(names["k"], f"of {nheads_kv} heads", f"a divisor of {names['q']}'s {nheads_q} heads")

    if o.cu_seqlens_q is not None:
        check_index("cu_seqlens_q", o.cu_seqlens_q, (None,), o.q.device, "(batch + 1,)")
        batch = o.cu_seqlens_q.shape[0] - 1
    elif o.cu_seqlens_k is not None and o.q.dim() != 4:
        batch = o.cu_seqlens_k.shape[0] - 1
    else:
        batch = o.q.shape[0]
    if batch < 0:
        refuse("cu_seqlens_q", "of shape (0,)", "(batch + 1,), at least one element")
    if o.cu_seqlens_k is not None:
        check_index("cu_seqlens_k", o.cu_seqlens_k, (batch + 1,), o.q.device, "(batch + 1,)")
    for name, index in (
        ("seqused_q", o.seqused_q),
        (names["seqused_k"], o.seqused_k),
        ("cache_batch_idx", o.cache_batch_idx),
        ("cache_leftpad", o.cache_leftpad),
    ):
        if index is not None:
            check_index(name, index, (batch,), o.q.device, "(batch,)")
    if o.page_table is not None:
        check_index("page_table", o.page_table, (batch, None), o.q.device, "(batch, pages_per_sequence)")
        if o.k.shape[1] < 1:
            refuse(names["k"], f"of shape {tuple(o.k.shape)}", "pages of at least one token")
        if o.seqused_k is None:
            refuse(names["seqused_k"], "None", "int32 (batch,) whenever page_table is given")
        if o.cache_batch_idx is not None:
            refuse("cache_batch_idx", "given together with page_table", "one of the two")
    elif not packed_k and o.cache_batch_idx is None and o.k.shape[0] != batch:
        refuse(names["k"], f"of batch {o.k.shape[0]}", f"the batch of {names['q']}, {batch}")

    if o.sink is not None:
        check_tensor(names["sink"], o.sink)
        if not o.sink.is_floating_point():
            refuse(names["sink"], o.sink.dtype, "a floating dtype", TypeError)
        _check_shape(names["sink"], o.sink, (nheads_q,), "(nheads_q,)")
        _check_device(names["sink"], o.sink, o.q.device)
    if o.alibi_slopes is not None:
        check_tensor("alibi_slopes", o.alibi_slopes)
        if not o.alibi_slopes.is_floating_point():
            refuse("alibi_slopes", o.alibi_slopes.dtype, "a floating dtype", TypeError)
        if o.alibi_slopes.dim() == 2:
            _check_shape("alibi_slopes", o.alibi_slopes, (batch, nheads_q), "(batch, nheads_q)")
        else:
            _check_shape("alibi_slopes", o.alibi_slopes, (nheads_q,), "(nheads_q,) or (batch, nheads_q)")
        _check_device("alibi_slopes", o.alibi_slopes, o.q.device)

    seqlen_q = o.q.shape[1] if not packed_q else options.max_seqlen_q
    seqlen_k = o.k.shape[1] if not packed_k else options.max_seqlen_k
    if o.page_table is not None:
        seqlen_k = o.page_table.shape[1] * o.k.shape[1]
    # Without a maximum the total is the bound that is known without looking at values.
    seqlen_q = o.q.shape[0] if seqlen_q is None else seqlen_q
    seqlen_k = o.k.shape[0] if seqlen_k is None else seqlen_k
    return Sizes(batch, seqlen_q, seqlen_k, nheads_q, nheads_kv, head_dim, head_dim_v)


def refuse_gradients(operands: Operands, entry: str, why: str) -> None:
    """Raise if a gradient is asked for where there is none."""
    if not torch.is_grad_enabled():
        return
    for field, tensor in zip(operands._fields[:5], operands[:5], strict=True):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise NotImplementedError(
                f"{_name(entry, field)} requires grad, but there is no gradient {why}; "
                "accepted: tensors that do not require grad, or a call under torch.no_grad()"
            )


# -- contents of index tensors -------------------------------------------------------------------------------


def _check_cumulative(name: str, x: Tensor, total: int, longest: int | None) -> None:
    values = x.tolist()
    if values[0] != 0:
        refuse(name, f"starting at {values[0]}", "a tensor that starts at 0")
    lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
    if any(n < 0 for n in lengths):
        at = next(i for i, n in enumerate(lengths) if n < 0)
        refuse(
            name,
            f"decreasing from {values[at]} to {values[at + 1]} at {at + 1}",
            "values that do not decrease",
        )
    if values[-1] > total:
        refuse(name, f"ending at {values[-1]}", f"an end of at most the number of packed tokens, {total}")
    if longest is not None and lengths and max(lengths) > longest:
        refuse(
            name.replace("cu_seqlens", "max_seqlen"),
            longest,
            f"at least the longest sequence, {max(lengths)}",
        )


def _check_range(name: str, x: Tensor, low: int, high: int, words: str) -> None:
    if x.numel() == 0:
        return
    least, most = (int(t) for t in torch.aminmax(x))
    if least < low or most > high:
        refuse(name, f"holding {least if least < low else most}", f"values from {low} to {high}, {words}")


def _check_used(name: str, x: Tensor, cu_seqlens: Tensor | None, row: int) -> None:
    if cu_seqlens is None:
        _check_range(name, x, 0, row, "the tokens there are room for")
        return
    for b, (used, length) in enumerate(zip(x.tolist(), cu_seqlens.diff().tolist(), strict=True)):
        if not 0 <= used <= length:
            refuse(name, f"{used} for sequence {b}", f"values from 0 to the sequence's length, {length}")


def check_values(operands: Operands, options: Options, sizes: Sizes) -> None:
    """Check the contents of index tensors, on a CPU."""
    if operands.q.device.type != "cpu":
        return
    o, entry = operands, options.entry
    if o.cu_seqlens_q is not None:
        _check_cumulative("cu_seqlens_q", o.cu_seqlens_q, o.q.shape[0], options.max_seqlen_q)
    if o.cu_seqlens_k is not None:
        _check_cumulative("cu_seqlens_k", o.cu_seqlens_k, o.k.shape[0], options.max_seqlen_k)
    if o.seqused_q is not None:
        _check_used("seqused_q", o.seqused_q, o.cu_seqlens_q, sizes.seqlen_q)
    if o.seqused_k is not None:
        _check_used(_name(entry, "seqused_k"), o.seqused_k, o.cu_seqlens_k, sizes.seqlen_k)
    if o.cache_batch_idx is not None:
        _check_range("cache_batch_idx", o.cache_batch_idx, 0, o.k.shape[0] - 1, "the rows of the cache")
    if o.cache_leftpad is not None:
        used = [sizes.seqlen_k] * sizes.batch if o.seqused_k is None else o.seqused_k.tolist()
        for b, (pad, length) in enumerate(zip(o.cache_leftpad.tolist(), used, strict=True)):
            if not 0 <= pad <= length:
                refuse(
                    "cache_leftpad", f"{pad} for sequence {b}", f"values from 0 to cache_seqlens, {length}"
                )
    if o.page_table is not None and o.seqused_k is not None:
        size = o.k.shape[1]
        first = torch.arange(o.page_table.shape[1], device=o.page_table.device) * size
        bad = (first < o.seqused_k[:, None]) & ((o.page_table < 0) | (o.page_table >= o.k.shape[0]))
        if bool(bad.any()):
            b, p = (int(i) for i in bad.nonzero()[0])
            refuse(
                "page_table",
                f"{int(o.page_table[b, p])} at ({b}, {p})",
                f"pages from 0 to {o.k.shape[0] - 1} wherever {_name(entry, 'seqused_k')} reaches",
            )
