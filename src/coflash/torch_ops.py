"""Attention as PyTorch knows it: differentiable, traceable, transformable.

There are two ways in, with one meaning.  Plain tensors in eager mode take `attend`: an `autograd.Function`,
or no wrapper at all where no gradient is needed, because a custom operator's dispatch costs more host time
than a small kernel runs.  Everything else (torch.compile, export, fake tensors, functorch transforms) takes
`attend_traced`: the operators `coflash::attention`, `coflash::attention_backward` and
`coflash::attention_double_backward`, with fake implementations, registered derivatives and batching rules.

A *call* is everything about a call that its tensors' metadata and the options decide: checked once for each
signature, planned once, and kept.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coflash import checks, functions, portable
from coflash.checks import Options, Sizes
from coflash.operands import BlockTables, Operands, row_dtype
from coflash.problem import Problem

__all__ = ["Call", "attend", "attend_traced", "prepare"]

Gradients = tuple[Tensor | None, ...]


class Call:
    """One signature, prepared: the problem, and the kernel to launch if a kernel was chosen."""

    __slots__ = (
        "launch",
        "lse_dtype",
        "lse_shape",
        "options",
        "out_shape",
        "problem",
        "reads_index_tensors",
        "sizes",
    )

    def __init__(self, operands: Operands, options: Options, needs_grad: bool) -> None:
        self.options = options
        self.sizes = checks.describe(operands, options)
        self.problem = _problem(operands, options, self.sizes, needs_grad)
        self.out_shape, self.lse_shape = _output_shapes(operands.q, operands.v)
        self.lse_dtype = row_dtype(operands.q)
        self.launch = _launcher(self.problem, operands, options)
        self.reads_index_tensors = any(
            x is not None
            for x in (
                operands.cu_seqlens_q,
                operands.cu_seqlens_k,
                operands.seqused_q,
                operands.seqused_k,
                operands.page_table,
                operands.cache_batch_idx,
                operands.cache_leftpad,
            )
        )

    def with_problem(self, problem: Problem) -> Call:
        """The same call with other functions in its problem."""
        other = object.__new__(Call)
        for name in Call.__slots__:
            setattr(other, name, getattr(self, name))
        other.problem = problem
        return other


def _output_shapes(q: Tensor, v: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the output, and of the log-sum-exp, which has heads before tokens."""
    *batch, tokens, heads, _ = q.shape
    return (*batch, tokens, heads, v.shape[-1]), (*batch, heads, tokens)


def _problem(operands: Operands, options: Options, sizes: Sizes, needs_grad: bool) -> Problem:
    o = operands
    left, right = (None if side == -1 else side for side in options.window_size)
    return Problem(
        dtype=o.q.dtype,
        device_type=o.q.device.type,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        nheads_q=sizes.nheads_q,
        nheads_kv=sizes.nheads_kv,
        batch=sizes.batch,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        packed_q=o.cu_seqlens_q is not None,
        packed_k=o.cu_seqlens_k is not None,
        has_seqused_q=o.seqused_q is not None,
        has_seqused_k=o.seqused_k is not None,
        page_size=0 if o.page_table is None else o.k.shape[1],
        has_cache_batch_idx=o.cache_batch_idx is not None,
        has_leftpad=o.cache_leftpad is not None,
        causal=options.causal,
        window_left=left,
        window_right=right,
        softcap=float(options.softcap),
        has_sink=o.sink is not None,
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
        block_mask_size=options.block_mask_size,
        has_alibi=o.alibi_slopes is not None,
        dropout_p=float(options.dropout_p),
        deterministic=options.deterministic,
        needs_lse=options.return_lse,
        needs_grad=needs_grad,
    )


def _launcher(problem: Problem, operands: Operands, options: Options) -> Callable[..., None] | None:
    """The kernel for a problem; None: the portable path.  Planning is imported for GPUs alone."""
    device, backend = operands.q.device, options.backend
    if device.type != "cuda" and backend == "kernel":
        raise NotImplementedError(
            f'backend="kernel" on {device}: kernels run on CUDA devices; '
            'backend="portable" (or "auto") runs on this device'
        )
    empty = 0 in operands.q.shape or 0 in operands.k.shape  # nothing to launch: zeros and -inf
    launch = None
    if device.type == "cuda" and backend != "portable" and not empty:
        from coflash import compiler, planning

        kernel_options = None if options.kernel_options is None else dict(options.kernel_options)
        plan = planning.plan(problem, planning.device_info(device), kernel_options, backend=backend)
        if plan.path == "kernel":
            launch = compiler.launcher(plan)
            if problem.needs_grad and plan.backward == "portable":
                _warn_of_portable_backward(plan.arch)
    if launch is None and options.kernel_options is not None and not empty:
        raise NotImplementedError(
            f"kernel_options is {dict(options.kernel_options)}, but this call takes the portable path, "
            "which has none; accepted: None"
        )
    return launch


@cache
def _warn_of_portable_backward(arch: str) -> None:
    warnings.warn(
        f"coflash: no backward kernel for {arch} yet: gradients take the portable path (correct, slow)",
        stacklevel=2,
    )


# Calls checked and planned so far, by signature.  Packed calls may bring a new total every time, so the table
# is emptied when it has grown large: a plan is cheap to make again.
_CALLS: dict[tuple[Any, ...], Call] = {}
_MOST_CALLS = 4096


def _signature(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.device, x.requires_grad
    return None if x is None else type(x)  # what is no tensor, `checks` will refuse


def prepare(operands: Operands, options: Options) -> Call:
    """The checked and planned call of this signature."""
    q, k, v, *others = operands
    grad = torch.is_grad_enabled()
    key: tuple[Any, ...] = (options, grad, _signature(q), _signature(k), _signature(v))
    for x in others:
        if x is not None and not isinstance(x, float):
            key += tuple(map(_signature, x)) if isinstance(x, tuple) else (_signature(x),)
        key += (None,)
    call = _CALLS.get(key)
    if call is None:
        differentiable = (*operands[:5], *operands.captured)
        needs_grad = grad and any(isinstance(t, Tensor) and t.requires_grad for t in differentiable)
        call = Call(operands, options, needs_grad)
        if operands.page_table is not None:
            checks.refuse_gradients(operands, options.entry, "through paged keys and values")
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        _CALLS[key] = call
    return call


# -- running a call on tensors that hold values ------------------------------------------------------------


def _without_autocast(device: torch.device) -> Any:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def run(call: Call, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, without autograd."""
    if call.reads_index_tensors:
        checks.check_values(operands, call.options, call.sizes)
    if call.launch is None:
        with torch.no_grad(), _without_autocast(operands.q.device):
            return portable.forward(call.problem, operands, portable.chosen())
    out = torch.empty(call.out_shape, dtype=operands.q.dtype, device=operands.q.device)
    lse = torch.empty(call.lse_shape, dtype=call.lse_dtype, device=operands.q.device)
    call.launch(operands, out, lse)
    return out, lse


def attend(call: Call, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of plain tensors in eager mode."""
    if not call.problem.needs_grad:
        return run(call, operands)
    return _apply_attention(call, operands, *operands[:5], *operands.captured)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, operands: Operands, *differentiable: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = run(call, operands)
        ctx.save_for_backward(*differentiable[:5], out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.rest = call, operands[5:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, alibi_slopes, out, lse = ctx.saved_tensors
        operands = Operands(q, k, v, sink, alibi_slopes, *ctx.rest)
        with _without_autocast(q.device):
            dout, delta = _delta(out, dout, dlse)
            dsink = _sink_gradient(sink, lse, delta)
            arguments = (q, k, v, dout, lse, delta, alibi_slopes, *operands.captured)
            dq, dk, dv, *dparameters = _Backward.apply(ctx.call, ctx.rest, *arguments)
        if alibi_slopes is None:
            dparameters.insert(0, None)
        return None, None, dq, dk, dv, dsink, *dparameters


# `Function.apply` asks in Python whether a functorch transform is active; `needs_tracing` has asked before.
_apply_attention = super(torch.autograd.Function, _Attention).apply


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        rest: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        alibi_slopes: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, dout, lse, delta, alibi_slopes)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.rest = call, rest
        operands = Operands(q, k, v, None, alibi_slopes, *rest)
        return portable.backward(call.problem, operands, portable.chosen(), dout, lse, delta)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Gradients:
        q, k, v, dout, lse, delta, alibi_slopes = ctx.saved_tensors
        operands = Operands(q, k, v, None, alibi_slopes, *ctx.rest)
        with _without_autocast(q.device):
            found: list[Tensor | None] = list(
                portable.double_backward(ctx.call.problem, operands, dout, lse, delta, cotangents)
            )
        if alibi_slopes is None:
            found.insert(6, None)
        return None, None, *found


def _delta(out: Tensor, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output's gradient (zero if there is none), and D - dL of the module `portable.attention`."""
    dtype = row_dtype(out)
    if dout is None:
        dout = torch.zeros_like(out)
        delta = torch.zeros(out.shape[:-1], dtype=dtype, device=out.device)
    else:
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta.transpose(-1, -2)
    return dout, delta.contiguous() if dlse is None else delta - dlse


def _sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The sink is a key without a value: its weight times `0 - delta`, summed over every row of its head."""
    if sink is None:
        return None
    unseen = lse == -math.inf
    weights = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(unseen, math.inf))
    gradient = -(weights * delta).sum(-1)
    return (gradient if gradient.dim() == 1 else gradient.sum(0)).to(sink.dtype)


# -- operators, for everything that traces or transforms ---------------------------------------------------

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


def _pack(operands: Operands, options: Options, number: int) -> tuple[Any, ...]:
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
    with torch.no_grad(), _own_dispatch(), _without_autocast(dout.device):
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
    with torch.no_grad(), _own_dispatch(), _without_autocast(dout.device):
        call, operands = _resolve(args)
        found = portable.double_backward(call.problem, operands, dout, lse, delta, cotangents)
    return *found[:6], list(found[6:])


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@_attention.register_fake
def _(*args: Any) -> Any:
    q, _, v, *_ = args
    out_shape, lse_shape = _output_shapes(q, v)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=row_dtype(q))


@_attention_backward.register_fake
def _(dout: Tensor, lse: Tensor, delta: Tensor, *args: Any) -> Any:
    return *[_like(t) for t in args[:3]], [torch.empty_like(t) for t in _parameters(args)]


@_attention_double_backward.register_fake
def _(
    to_dq: Tensor,
    to_dk: Tensor,
    to_dv: Tensor,
    to_dparameters: list[Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    *args: Any,
) -> Any:
    rows = [_like(t) for t in (*args[:3], dout, lse, delta)]
    return *rows, [torch.empty_like(t) for t in _parameters(args)]


class _Form(NamedTuple):
    """What an operator's arguments are besides tensors; with it, they travel as a flat row of tensors."""

    captured: int
    tables: int
    softmax_scale: float
    chosen: tuple[Any, ...]


_FIXED = 13  # tensors of an operator that are not in lists


def _flatten(args: tuple[Any, ...]) -> tuple[_Form, list[Tensor | None]]:
    form = _Form(len(args[5]), len(args[15]), args[6], args[_TENSORS:])
    return form, [*args[:5], *args[7:15], *args[5], *args[15]]


def _restore(form: _Form, flat: Sequence[Any]) -> tuple[Any, ...]:
    captured = list(flat[_FIXED : _FIXED + form.captured])
    tables = list(flat[_FIXED + form.captured :])
    return *flat[:5], captured, form.softmax_scale, *flat[5:_FIXED], tables, *form.chosen


def _attention_gradients(
    backward: Any, out: Tensor, lse: Tensor, args: Any, dout: Any, dlse: Any
) -> list[Any]:
    """Gradients of an operator's first five arguments and of what it captures."""
    dout, delta = _delta(out, dout, dlse)
    dsink = _sink_gradient(args[3], lse, delta)
    dq, dk, dv, dparameters = backward(dout, lse, delta, *args)
    return [dq, dk, dv, dsink, *([None] if args[4] is None else []), *dparameters]


def _no_gradients(args: tuple[Any, ...]) -> list[Any]:
    """For the arguments from softmax_scale on, in their own structure."""
    return [[None] * len(x) if isinstance(x, list) else None for x in args[6:]]


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.form, flat = _flatten(inputs)
    ctx.save_for_backward(*output, *flat)
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    out, lse, *flat = ctx.saved_tensors
    args = _restore(ctx.form, flat)
    backward = torch.ops.coflash.attention_backward
    found = _attention_gradients(backward, out, lse, args, dout, dlse)
    return *found[:5], found[5:], *_no_gradients(args)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.form, flat = _flatten(inputs[3:])
    ctx.save_for_backward(*inputs[:3], *flat)


def _differentiate_backward(ctx: Any, to_dq: Tensor, to_dk: Tensor, to_dv: Tensor, rest: list[Any]) -> Any:
    dout, lse, delta, *flat = ctx.saved_tensors
    args = _restore(ctx.form, flat)
    rest = [torch.zeros_like(p) if g is None else g for g, p in zip(rest, _parameters(args), strict=True)]
    gq, gk, gv, gdout, glse, gdelta, more = torch.ops.coflash.attention_double_backward(
        to_dq, to_dk, to_dv, rest, dout, lse, delta, *args
    )
    galibi = None if args[4] is None else more.pop(0)
    return gdout, glse, gdelta, gq, gk, gv, None, galibi, more, *_no_gradients(args)


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)
_attention_backward.register_autograd(_differentiate_backward, setup_context=_setup_backward)


# -- functorch: its transforms take autograd functions of the separate-context kind ------------------------


class _TransformedAttention(torch.autograd.Function):
    """`coflash::attention` under torch.func transforms."""

    @staticmethod
    def forward(form: _Form, *flat: Any) -> Any:
        return torch.ops.coflash.attention(*_restore(form, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        out, lse, *flat = ctx.saved_tensors
        args = _restore(ctx.form, flat)

        def backward(dout: Tensor, lse: Tensor, delta: Tensor, *_: Any) -> Any:
            dq, dk, dv, *rest = _TransformedBackward.apply(ctx.form, dout, lse, delta, *flat)
            return dq, dk, dv, rest

        found = _attention_gradients(backward, out, lse, args, dout, dlse)
        return None, *found[:5], *[None] * 8, *found[5:], *[None] * ctx.form.tables

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: _Form, *tensors: Any) -> Any:
        return _map(_TransformedAttention, info.batch_size, in_dims[1:], form, tensors, 0)


class _TransformedBackward(torch.autograd.Function):
    """`coflash::attention_backward` under torch.func transforms; differentiable once more, not under vmap."""

    @staticmethod
    def forward(form: _Form, dout: Tensor, lse: Tensor, delta: Tensor, *flat: Any) -> Any:
        dq, dk, dv, rest = torch.ops.coflash.attention_backward(dout, lse, delta, *_restore(form, flat))
        return dq, dk, dv, *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        found = _TransformedDoubleBackward.apply(ctx.form, len(cotangents), *cotangents, *ctx.saved_tensors)
        gq, gk, gv, gdout, glse, gdelta, *more = found
        galibi = None if ctx.saved_tensors[3 + 4] is None else more.pop(0)
        rest = (*[None] * 8, *more, *[None] * ctx.form.tables)
        return None, gdout, glse, gdelta, gq, gk, gv, None, galibi, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: _Form, *tensors: Any) -> Any:
        return _map(_TransformedBackward, info.batch_size, in_dims[1:], form, tensors, 3)


class _TransformedDoubleBackward(torch.autograd.Function):
    """`coflash::attention_double_backward` under torch.func transforms."""

    @staticmethod
    def forward(form: _Form, count: int, *tensors: Any) -> Any:
        to_dq, to_dk, to_dv, *rest = tensors[:count]
        dout, lse, delta, *flat = tensors[count:]
        *found, more = torch.ops.coflash.attention_double_backward(
            to_dq, to_dk, to_dv, rest, dout, lse, delta, *_restore(form, flat)
        )
        return *found, *more

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError("the third derivative of attention; the first and the second are available")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: _Form, count: int, *tensors: Any) -> Any:
        apply = partial(_TransformedDoubleBackward.apply, form, count)
        return _one_by_one(apply, info.batch_size, in_dims[2:], tensors)


def _map(function: Any, size: int, dims: tuple[Any, ...], form: _Form, tensors: Any, rows: int) -> Any:
    """vmap of a function of `rows` query-side tensors and the flat row: in the batch if that is right."""
    leading = rows + 3  # these tensors have a batch dimension of their own, if nothing is packed
    functions_number = form.chosen[5]
    if functions_number != -1 or any(t is not None for t in tensors[leading:]):
        return _one_by_one(partial(function.apply, form), size, dims, tensors)
    folded = [
        (t.unsqueeze(0).expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip(tensors[:leading], dims, strict=False)
    ]
    results = function.apply(form, *folded, *tensors[leading:])
    batch = results[0].shape[0] // max(size, 1)
    return tuple(t.unflatten(0, (size, batch)) for t in results), (0,) * len(results)


def _one_by_one(apply: Callable[..., Any], size: int, dims: tuple[Any, ...], tensors: Any) -> Any:
    """vmap by a call for each element."""
    results = [
        apply(*[t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)])
        for i in range(size)
    ]
    stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def needs_tracing(operands: Operands) -> bool:
    """Whether a call must go through the operators: something is watching, or the tensors are not plain."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or type(operands.q) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def attend_traced(operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp through the operators."""
    checks.describe(operands, options)
    if operands.page_table is not None:
        checks.refuse_gradients(operands, options.entry, "through paged keys and values")
    number = -1
    if options.score_mod is not None or options.mask_mod is not None:
        number, captured = _functions(operands, options)
        operands = operands._replace(captured=captured)
    args = _pack(operands, options, number)
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        form, flat = _flatten(args)
        return _TransformedAttention.apply(form, *flat)
    return torch.ops.coflash.attention(*args)


def _functions(operands: Operands, options: Options) -> tuple[int, tuple[Tensor, ...]]:
    """A number for the functions, and the tensors they capture."""
    score_mod, mask_mod = options.score_mod, options.mask_mod
    if torch.compiler.is_compiling():
        try:
            captured = functions.closure_tensors(score_mod) + functions.closure_tensors(mask_mod)
        except AttributeError:
            raise NotImplementedError(
                "score_mod or mask_mod is defined inside the function that torch.compile compiles, where an "
                "operator cannot reach it; accepted: functions defined outside"
            ) from None
        return functions.register_constant(score_mod, mask_mod), captured
    captured = ()
    if score_mod is not None:
        captured = functions.captured(score_mod, operands.q, with_gradient=False)
    return functions.register(score_mod, mask_mod, captured), captured
