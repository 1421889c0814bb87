"""Attention as PyTorch knows it: differentiable, traceable, transformable.

There are two ways in, with one meaning.  Plain tensors in eager mode take `attend`: an `autograd.Function`,
or no wrapper at all where no gradient is needed, because a custom operator's dispatch costs more host time
than a small kernel runs.  Everything else takes `attend_traced`: the operators (`coflash.operators`), under
functorch's transforms in wrappers of its own kind (`coflash.transforms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from coflash import checks, functions, portable
from coflash.calls import Call, prepare, row_delta, run, shortest, sink_gradient, without_autocast
from coflash.checks import Options
from coflash.operands import Operands
from coflash.operators import flatten, pack
from coflash.transforms import TransformedAttention

__all__ = ["attend", "attend_traced", "is_watched", "needs_tracing", "prepare", "shortcut"]

Gradients = tuple[Tensor | None, ...]


def attend(call: Call, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of plain tensors in eager mode."""
    if not call.problem.needs_grad:
        return run(call, operands)
    prepared = _Prepared(lambda *_: run(call, operands), call, operands[5:])
    return _apply_attention(prepared, *operands[:5], *operands.captured)


def shortcut(call: Call, operands: Operands) -> Callable[..., Any] | None:
    """What a public function returns for q, k, v and `LENGTHS` if it has any, for calls that differ from this one
    in addresses only.
    """
    start = shortest(call, operands)
    if start is None:
        return None
    if not call.problem.needs_grad:
        return start
    apply = _apply_attention if call.options.return_lse else _apply_output
    if not call.reads_index_tensors:
        return partial(apply, _Prepared(start, call, operands[5:]))
    before, behind = operands[5:7], operands[11:]

    def with_lengths(q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | None) -> Any:
        rest = (*before, *lengths, *behind)
        return apply(_Prepared(lambda q, k, v: start(q, k, v, *lengths), call, rest), q, k, v)

    return with_lengths


class _Prepared(NamedTuple):
    start: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    call: Call
    rest: tuple[Any, ...]  # the operands behind those that can have a gradient


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        prepared: _Prepared,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse = prepared.start(q, k, v)
        ctx.save_for_backward(q, k, v, sink, alibi_slopes, out, lse)
        ctx.set_materialize_grads(False)
        ctx.prepared = prepared
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        *inputs, out, lse = ctx.saved_tensors
        return _gradients(ctx.prepared, inputs, out, lse, dout, dlse)


class _Output(torch.autograd.Function):
    """`_Attention` of q, k, v alone where nobody gets the log-sum-exp: every result costs host time."""

    @staticmethod
    def forward(ctx: Any, prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = prepared.start(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prepared = prepared
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients' own gradients come through the log-sum-exp, too
            out, lse = _apply_attention(ctx.prepared, q, k, v)
        return _gradients(ctx.prepared, (q, k, v, None, None), out, lse, dout, None)


def _gradients(
    prepared: _Prepared,
    inputs: Sequence[Tensor | None],
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Gradients:
    """Of everything that an autograd function takes; `inputs` are q, k, v, sink and slopes."""
    _, call, rest = prepared
    q, k, v, sink, alibi_slopes = inputs
    assert q is not None
    with without_autocast(q.device):
        dout, delta = row_delta(out, dout, dlse)
        dsink = sink_gradient(sink, lse, delta)
        arguments = (q, k, v, dout, lse, delta, alibi_slopes, *rest[0])  # and what score_mod captures
        dq, dk, dv, *dparameters = _Backward.apply(call, rest, *arguments)
    if alibi_slopes is None:
        dparameters.insert(0, None)
    return None, dq, dk, dv, dsink, *dparameters


# `Function.apply` asks in Python whether a functorch transform is active; `needs_tracing` has asked before.
_apply_attention = super(torch.autograd.Function, _Attention).apply
_apply_output = super(torch.autograd.Function, _Output).apply


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
        with without_autocast(q.device):
            found: list[Tensor | None] = list(
                portable.double_backward(ctx.call.problem, operands, dout, lse, delta, cotangents)
            )
        if alibi_slopes is None:
            found.insert(6, None)
        return None, None, *found


_PLAIN = (Tensor, torch.nn.Parameter)


def needs_tracing(operands: Operands) -> bool:
    """Whether a call must go through the operators: something is watching, or the tensors are not plain."""
    return is_watched() or type(operands.q) not in _PLAIN


def is_watched() -> bool:
    """Whether something looks at, or transforms, the operations of this thread."""
    return is_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack() > 0


def attend_traced(operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp through the operators."""
    checks.describe(operands, options)
    if operands.page_table is not None:
        checks.refuse_gradients(operands, options.entry, "through paged keys and values")
    number = -1
    if options.score_mod is not None or options.mask_mod is not None:
        number, captured = _functions(operands, options)
        operands = operands._replace(captured=captured)
    args = pack(operands, options, number)
    if _are_functorch_transforms_active() and not is_compiling():
        form, flat = flatten(args)
        return TransformedAttention.apply(form, *flat)
    return torch.ops.coflash.attention(*args)


def _functions(operands: Operands, options: Options) -> tuple[int, tuple[Tensor, ...]]:
    """A number for the functions, and the tensors they capture."""
    score_mod, mask_mod = options.score_mod, options.mask_mod
    if is_compiling():
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
