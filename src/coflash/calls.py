"""A call, prepared: what its tensors' metadata and the options decide, and running it.

A signature is checked once, planned once, and kept; a call then costs one look into a table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from coflash import checks, portable
from coflash.checks import Options, Sizes
from coflash.operands import Operands, row_dtype
from coflash.problem import Problem

if TYPE_CHECKING:
    from coflash.compiler.launch import Launch

__all__ = [
    "Call",
    "output_shapes",
    "prepare",
    "row_delta",
    "run",
    "shortest",
    "sink_gradient",
    "without_autocast",
]


class Call:
    """One signature, prepared: the problem, and the kernel to launch if a kernel was chosen."""

    __slots__ = (
        "launch",
        "new_lse",
        "new_out",
        "options",
        "problem",
        "reads_index_tensors",
        "sizes",
        "writes_lse",
    )

    def __init__(self, operands: Operands, options: Options, needs_grad: bool) -> None:
        self.options = options
        self.sizes = checks.describe(operands, options)
        self.problem = _problem(operands, options, self.sizes, needs_grad)
        q = operands.q
        out_shape, lse_shape = output_shapes(q, operands.v)
        self.new_out = _allocator(out_shape, q.dtype, q)
        self.new_lse = _allocator(lse_shape, row_dtype(q), q)
        self.writes_lse = options.return_lse or needs_grad
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


def output_shapes(q: Tensor, v: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the output, and of the log-sum-exp, which has heads before tokens."""
    *batch, tokens, heads, _ = q.shape
    return (*batch, tokens, heads, v.shape[-1]), (*batch, heads, tokens)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


_inductor: Any = guards  # what Inductor's code allocates with: a third of the time of torch.empty


def _allocator(shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> Callable[[], Tensor]:
    """What makes one of a kernel's outputs, beside q."""
    layout = shape, _contiguous(shape), dtype
    if not q.is_cuda:
        return partial(_inductor._empty_strided_cpu, *layout)
    if torch.cuda.device_count() == 1:
        return partial(_inductor._empty_strided_cuda, *layout)
    return partial(_empty_on, q.get_device(), *layout)


def _empty_on(index: int, *layout: Any) -> Tensor:
    if torch._C._cuda_getDevice() == index:
        return _inductor._empty_strided_cuda(*layout)
    with torch.cuda.device(index):  # it allocates on the current one
        return _inductor._empty_strided_cuda(*layout)


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


def _launcher(problem: Problem, operands: Operands, options: Options) -> Launch | None:
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
_CALLS: dict[Any, Call] = {}
_MOST_CALLS = 4096


def _signature(x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.device, x.requires_grad
    if isinstance(x, tuple):
        return tuple(map(_signature, x))
    return type(x)  # of the scale; and what is no tensor, `checks` will refuse


def prepare(operands: Operands, options: Options) -> Call:
    """The checked and planned call of this signature."""
    grad = torch.is_grad_enabled()
    try:
        # The options' types too: 1 is no boolean, though it equals True.
        types = (*map(type, options), *map(type, options.window_size))
        key = (options, types, grad, tuple(map(_signature, operands)))
        call = _CALLS.get(key)
    except TypeError:  # nothing that is accepted fails to be a key, but for a list as window_size
        window: Any = options.window_size
        if isinstance(window, list):
            return prepare(operands, options._replace(window_size=tuple(window)))
        checks.describe(operands, options)
        raise
    if call is not None and not math.isfinite(operands.softmax_scale):
        checks.describe(operands, options)  # of the scale a signature has the type alone
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


def without_autocast(device: torch.device) -> Any:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def run(call: Call, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, without autograd."""
    if call.reads_index_tensors:
        checks.check_values(operands, call.options, call.sizes)
    if call.launch is None:
        with torch.no_grad(), without_autocast(operands.q.device):
            return portable.forward(call.problem, operands, portable.chosen())
    out = call.new_out()
    # A kernel made for a call that needs no lse writes none; what stands in for it is read by nobody.
    lse = call.new_lse() if call.writes_lse else out
    call.launch(operands, out, lse)
    return out, lse


def shortest(call: Call, operands: Operands) -> Callable[..., Any] | None:
    """`run` for calls of q, k, v and `LENGTHS` that differ from this one in addresses only, those of q, k, v
    multiples of 16 bytes: f(q, k, v, *lengths), with nothing left to look at (a kernel's operands are on a GPU,
    where `run` checks no values either); it returns the output, and the log-sum-exp if the call needs one.
    None for a call that takes another way.
    """
    if call.launch is None or any(x is not None for x in (*operands[3:5], *operands[11:])):
        return None
    launch = call.launch.direct(operands)
    if launch is None:
        return None
    new_out, new_lse = call.new_out, call.new_lse

    def both(
        q: Any, k: Any, v: Any, cu_q: Any = None, cu_k: Any = None, used_q: Any = None, used_k: Any = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        launch(q, k, v, cu_q, cu_k, used_q, used_k, out, lse)
        return out, lse

    def output(
        q: Any, k: Any, v: Any, cu_q: Any = None, cu_k: Any = None, used_q: Any = None, used_k: Any = None
    ) -> Tensor:
        out = new_out()
        launch(q, k, v, cu_q, cu_k, used_q, used_k, out, out)
        return out

    return both if call.writes_lse else output


# -- what every backward begins with ----------------------------------------------------------------------------


def row_delta(out: Tensor, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output's gradient (zero if there is none), and D - dL of the module `portable.attention`."""
    dtype = row_dtype(out)
    if dout is None:
        dout = torch.zeros_like(out)
        delta = torch.zeros(out.shape[:-1], dtype=dtype, device=out.device)
    else:
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta.transpose(-1, -2)
    return dout, delta.contiguous() if dlse is None else delta - dlse


def sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The sink is a key without a value: its weight times `0 - delta`, summed over every row of its head."""
    if sink is None:
        return None
    unseen = lse == -math.inf
    weights = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(unseen, math.inf))
    gradient = -(weights * delta).sum(-1)
    return (gradient if gradient.dim() == 1 else gradient.sum(0)).to(sink.dtype)
