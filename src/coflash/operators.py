"""The custom operators: `coflash::attention`, its backward, and the backward's own derivative.

For everything that traces a call instead of running it: torch.compile, torch.export, fake tensors, dispatch
modes.  An operator takes tensors and plain values, so an `Operands` and an `Options` are packed into a row of
arguments, and functions travel as numbers (`coflash.functions`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coflash import functions, portable
from coflash.calls import Call, output_shapes, prepare, row_delta, run, sink_gradient, without_autocast
from coflash.checks import Options
from coflash.operands import BlockTables, Operands, row_dtype

__all__ = ["Form", "attention_gradients", "flatten", "pack", "restore"]

_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? alibi_slopes, Tensor[] captured, "
    "float softmax_scale, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
    "Tensor? dropout_seed, Tensor[] block_tables"
)
_OPTIONS = (
    "str entry, bool causal, SymInt? window_left, SymInt? window_right, float softcap, int functions, "
    "float dropout_p, bool deterministic, str backend, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "int block_queries, int block_keys, str kernel_options"
)
_TENSORS = 16  # arguments in _OPERANDS


def pack(operands: Operands, options: Options, number: int) -> tuple[Any, ...]:
    """Arguments of an operator."""
    o = options
    tables = operands.block_tables
    return (
        *operands[:5],
        list(operands.captured),
        float(operands.softmax_scale),
        *operands[7:15],
        [] if tables is None else [t for t in tables if t is not None],
        o.entry,
        o.causal,
        *o.window_size,
        float(o.softcap),
        number,
        float(o.dropout_p),
        o.deterministic,
        o.backend,
        o.max_seqlen_q,
        o.max_seqlen_k,
        *(o.block_mask_size or (0, 0)),
        "" if o.kernel_options is None else json.dumps(o.kernel_options),
    )


def _unpack(args: tuple[Any, ...]) -> tuple[Operands, Options, functions.Functions]:
    tensors, chosen = args[:_TENSORS], args[_TENSORS:]
    entry, causal, left, right, softcap, number, dropout_p, deterministic, backend, *last = chosen
    most_q, most_k, *size, kernel_options = last
    tables = tensors[15]
    block_tables = BlockTables(*tables, *[None] * (4 - len(tables))) if tables else None
    operands = Operands._make((*tensors[:5], tuple(tensors[5]), *tensors[6:15], block_tables))
    found = functions.find(number)
    options = Options(
        entry,
        causal,
        (left, right),
        softcap,
        found.score_mod,
        found.mask_mod,
        dropout_p,
        deterministic,
        True,
        backend,
        most_q,
        most_k,
        (size[0], size[1]) if size[0] else None,
        tuple(map(tuple, json.loads(kernel_options))) if kernel_options else None,
    )
    return operands, options, found


def _resolve(args: tuple[Any, ...]) -> tuple[Call, Operands]:
    """An operator's arguments as a call: with fresh leaves that stand in for what its functions capture."""
    operands, options, found = _unpack(args)
    call = prepare(operands, options)
    stand_ins = tuple(_leaf(t) for t in operands.captured)
    originals = found.originals
    if originals is None:
        originals = functions.closure_tensors(found.score_mod) + functions.closure_tensors(found.mask_mod)
    if originals:
        problem = replace(
            call.problem,
            score_mod=functions.bind(found.score_mod, originals, stand_ins),
            mask_mod=functions.bind(found.mask_mod, originals, stand_ins),
        )
        call = call.with_problem(problem)
    alibi = operands.alibi_slopes
    return call, operands._replace(captured=stand_ins, alibi_slopes=None if alibi is None else _leaf(alibi))


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def _parameters(args: tuple[Any, ...]) -> list[Tensor]:
    alibi, captured = args[4], args[5]
    return list(captured) if alibi is None else [alibi, *captured]


_OWN_KEYS = (
    "AutogradFunctionality",
    "AutogradOther",
    "AutogradNestedTensor",
    "ADInplaceOrView",
    "Conjugate",
    "Negative",
    "ZeroTensor",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
)


def _own_dispatch() -> Any:
    """Give an operator's body automatic differentiation and vmap back, which PyTorch excludes there.

    Functions run under vmap in it, and tiles of score_mod are differentiated.
    """
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for name in _OWN_KEYS:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


@torch.library.custom_op(
    "coflash::attention", mutates_args=(), schema=f"({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _attention(*args: Any) -> Any:
    with torch.no_grad(), _own_dispatch():
        return run(*_resolve(args))


@torch.library.custom_op(
    "coflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor lse, Tensor delta, {_OPERANDS}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor[])",
)
def _attention_backward(dout: Tensor, lse: Tensor, delta: Tensor, *args: Any) -> Any:
    with torch.no_grad(), _own_dispatch(), without_autocast(dout.device):
        call, operands = _resolve(args)
        dq, dk, dv, *rest = portable.backward(call.problem, operands, portable.chosen(), dout, lse, delta)
    return dq, dk, dv, rest


@torch.library.custom_op(
    "coflash::attention_double_backward",
    mutates_args=(),
    schema="(Tensor to_dq, Tensor to_dk, Tensor to_dv, Tensor[] to_dparameters, Tensor dout, Tensor lse, "
    f"Tensor delta, {_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
)
def _attention_double_backward(
    to_dq: Tensor,
    to_dk: Tensor,
    to_dv: Tensor,
    to_dparameters: list[Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    *args: Any,
) -> Any:
    cotangents = (to_dq, to_dk, to_dv, *to_dparameters)
    with torch.no_grad(), _own_dispatch(), without_autocast(dout.device):
        call, operands = _resolve(args)
        found = portable.double_backward(call.problem, operands, dout, lse, delta, cotangents)
    return *found[:6], list(found[6:])


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@_attention.register_fake
def _(*args: Any) -> Any:
    q, _, v, *_ = args
    out_shape, lse_shape = output_shapes(q, v)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=row_dtype(q))


@_attention_backward.register_fake
def _(dout: Tensor, lse: Tensor, delta: Tensor, *args: Any) -> Any:
    return *[_like(t) for t in args[:3]], [torch.empty_like(t) for t in _parameters(args)]


@_attention_double_backward.register_fake
def _(*given: Any) -> Any:
    args = given[7:]  # behind four directions, dout, lse and delta
    rows = [_like(t) for t in (*args[:3], *given[4:7])]
    return *rows, [torch.empty_like(t) for t in _parameters(args)]


class Form(NamedTuple):
    """What an operator's arguments are besides tensors; with it, they travel as a flat row of tensors."""

    captured: int
    tables: int
    softmax_scale: float
    chosen: tuple[Any, ...]


_FIXED = 13  # tensors of an operator that are not in lists


def flatten(args: tuple[Any, ...]) -> tuple[Form, list[Tensor | None]]:
    form = Form(len(args[5]), len(args[15]), args[6], args[_TENSORS:])
    return form, [*args[:5], *args[7:15], *args[5], *args[15]]


def restore(form: Form, flat: Sequence[Any]) -> tuple[Any, ...]:
    captured = list(flat[_FIXED : _FIXED + form.captured])
    tables = list(flat[_FIXED + form.captured :])
    return *flat[:5], captured, form.softmax_scale, *flat[5:_FIXED], tables, *form.chosen


def attention_gradients(
    backward: Any, out: Tensor, lse: Tensor, args: Any, dout: Any, dlse: Any
) -> list[Any]:
    """Gradients of an operator's first five arguments and of what it captures."""
    dout, delta = row_delta(out, dout, dlse)
    dsink = sink_gradient(args[3], lse, delta)
    dq, dk, dv, dparameters = backward(dout, lse, delta, *args)
    return [dq, dk, dv, dsink, *([None] if args[4] is None else []), *dparameters]


def _no_gradients(args: tuple[Any, ...]) -> list[Any]:
    """For the arguments from softmax_scale on, in their own structure."""
    return [[None] * len(x) if isinstance(x, list) else None for x in args[6:]]


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.form, flat = flatten(inputs)
    ctx.save_for_backward(*output, *flat)
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    out, lse, *flat = ctx.saved_tensors
    args = restore(ctx.form, flat)
    backward = torch.ops.coflash.attention_backward
    found = attention_gradients(backward, out, lse, args, dout, dlse)
    return *found[:5], found[5:], *_no_gradients(args)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.form, flat = flatten(inputs[3:])
    ctx.save_for_backward(*inputs[:3], *flat)


def _differentiate_backward(ctx: Any, to_dq: Tensor, to_dk: Tensor, to_dv: Tensor, rest: list[Any]) -> Any:
    dout, lse, delta, *flat = ctx.saved_tensors
    args = restore(ctx.form, flat)
    rest = [torch.zeros_like(p) if g is None else g for g, p in zip(rest, _parameters(args), strict=True)]
    gq, gk, gv, gdout, glse, gdelta, more = torch.ops.coflash.attention_double_backward(
        to_dq, to_dk, to_dv, rest, dout, lse, delta, *args
    )
    galibi = None if args[4] is None else more.pop(0)
    return gdout, glse, gdelta, gq, gk, gv, None, galibi, more, *_no_gradients(args)


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)
_attention_backward.register_autograd(_differentiate_backward, setup_context=_setup_backward)
