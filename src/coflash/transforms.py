"""The operators under `torch.func`: grad, vmap, jacrev and what they compose to.

functorch takes autograd functions with a separate `setup_context` and a `vmap` rule; these three wrap the
operators.  Their tensors travel as a flat row, because it looks for tensors among the arguments only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coflash.operators import Form, attention_gradients, restore

__all__ = ["TransformedAttention"]


class TransformedAttention(torch.autograd.Function):
    """`coflash::attention` under torch.func transforms."""

    @staticmethod
    def forward(form: Form, *flat: Any) -> Any:
        return torch.ops.coflash.attention(*restore(form, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        out, lse, *flat = ctx.saved_tensors
        args = restore(ctx.form, flat)

        def backward(dout: Tensor, lse: Tensor, delta: Tensor, *_: Any) -> Any:
            dq, dk, dv, *rest = TransformedBackward.apply(ctx.form, dout, lse, delta, *flat)
            return dq, dk, dv, rest

        found = attention_gradients(backward, out, lse, args, dout, dlse)
        return None, *found[:5], *[None] * 8, *found[5:], *[None] * ctx.form.tables

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Form, *tensors: Any) -> Any:
        return _map(TransformedAttention, info.batch_size, in_dims[1:], form, tensors, 0)


class TransformedBackward(torch.autograd.Function):
    """`coflash::attention_backward` under torch.func transforms; differentiable once more, not under vmap."""

    @staticmethod
    def forward(form: Form, dout: Tensor, lse: Tensor, delta: Tensor, *flat: Any) -> Any:
        dq, dk, dv, rest = torch.ops.coflash.attention_backward(dout, lse, delta, *restore(form, flat))
        return dq, dk, dv, *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        found = TransformedDoubleBackward.apply(ctx.form, len(cotangents), *cotangents, *ctx.saved_tensors)
        gq, gk, gv, gdout, glse, gdelta, *more = found
        galibi = None if ctx.saved_tensors[3 + 4] is None else more.pop(0)
        rest = (*[None] * 8, *more, *[None] * ctx.form.tables)
        return None, gdout, glse, gdelta, gq, gk, gv, None, galibi, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Form, *tensors: Any) -> Any:
        return _map(TransformedBackward, info.batch_size, in_dims[1:], form, tensors, 3)


class TransformedDoubleBackward(torch.autograd.Function):
    """`coflash::attention_double_backward` under torch.func transforms."""

    @staticmethod
    def forward(form: Form, count: int, *tensors: Any) -> Any:
        to_dq, to_dk, to_dv, *rest = tensors[:count]
        dout, lse, delta, *flat = tensors[count:]
        *found, more = torch.ops.coflash.attention_double_backward(
            to_dq, to_dk, to_dv, rest, dout, lse, delta, *restore(form, flat)
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
    def vmap(info: Any, in_dims: tuple[Any, ...], form: Form, count: int, *tensors: Any) -> Any:
        apply = partial(TransformedDoubleBackward.apply, form, count)
        return _one_by_one(apply, info.batch_size, in_dims[2:], tensors)


def _map(function: Any, size: int, dims: tuple[Any, ...], form: Form, tensors: Any, rows: int) -> Any:
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
