"""From a plan to the callable that launches it, with as little between the two as Python allows.

A launcher is made once for a plan; what happens on each call is one generated expression: fetch the
operands by name, call the compiled function. tvm-ffi reads PyTorch tensors directly and launches on
PyTorch's current stream of their device, and the compiled host code switches to that device and back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coflash.compiler import cache, runtime
from coflash.compiler.builder import build
from coflash.compiler.cache import Entry

#: Called as launch(operands, out, lse); operands has the call's tensors as attributes, under the kernels'
#: names.
Launch = Callable[[Any, torch.Tensor, "torch.Tensor | None"], None]

_functions: dict[tuple[str, Any, str], tuple[Any, tuple[str, ...]]] = {}
_lock = threading.Lock()


def launcher(plan: Any) -> Launch:
    """The launch of a plan's kernel: found, compiled or loaded as need be."""
    what = (plan.kernel, plan.config, plan.arch)
    loaded = _functions.get(what)
    if loaded is None:
        with _lock:
            loaded = _functions.get(what)
            if loaded is None:
                entry = build(*what)
                loaded = _functions[what] = (load(entry), entry.arguments)
    return bind(*loaded, plan.scalars)


def load(entry: Entry) -> Any:
    """The tvm-ffi function of a compiled kernel, to be called with its arguments in order."""
    runtime.load([entry.folder.parent, *cache.readonly_roots()])
    return runtime.function(entry.so, entry.function)


def bind(function: Any, arguments: tuple[str, ...], scalars: Mapping[str, int | float]) -> Launch:
    """`function` as a launch: each of its arguments comes from the call, or is one of the plan's scalars."""
    bound = tuple(name for name in arguments if name in scalars)
    return _factory(arguments, bound)(function, *(scalars[name] for name in bound))


@functools.cache
def _factory(arguments: tuple[str, ...], bound: tuple[str, ...]) -> Callable[..., Launch]:
    """Makes launches of one list of arguments. Generated, so that a call does nothing but fetch and pass."""
    special = {
        "q": "readable(operands.q)",
        "k": "readable(operands.k)",
        "v": "readable(operands.v)",
        "out": "out",
        "lse": "lse",
        "sink": "operands.sink.float().contiguous()",
        "softmax_scale": "positive(operands.softmax_scale)",
        "tile_counter": "tile_counter(operands.q)",
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        special[name] = f"operands.{name}.contiguous()"
    terms = [special.get(name, name if name in bound else f"operands.{name}") for name in arguments]
    inner = f"lambda operands, out, lse: function({', '.join(terms)})"
    return eval(f"lambda {', '.join(('function', *bound))}: {inner}", globals())  # names of arguments only


_ALIGNED: dict[tuple[int, ...], bool] = {}  # strides of 16-bit operands that the copy engine can follow


def readable(x: torch.Tensor) -> torch.Tensor:
    """The operand as it is, or a copy where the copy engine can't follow its strides or its address."""
    stride = x.stride()
    aligned = _ALIGNED.get(stride)
    if aligned is None:
        if len(_ALIGNED) >= 4096:
            _ALIGNED.clear()
        aligned = _ALIGNED[stride] = stride[-1] == 1 and not any(step % 8 or not step for step in stride[:-1])
    if aligned and not x.data_ptr() % 16:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def positive(softmax_scale: float) -> float:
    if softmax_scale > 0.0:
        return softmax_scale
    raise NotImplementedError(
        f'softmax_scale={softmax_scale}: the kernels take scales above 0; backend="portable" takes any'
    )


COUNTER_WORDS = 1
_counters: dict[tuple[int, int], torch.Tensor] = {}


def tile_counter(q: torch.Tensor) -> torch.Tensor:
    """The zeroed counter that a dynamic scheduler draws tiles from, and leaves zeroed.

    Kernels on one stream run one after the other and share one. While a CUDA graph is captured the counter
    comes from the graph's own memory and is zeroed in the graph, which may later run beside anything else.
    """
    index = q.get_device()
    if index < 0 or torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(COUNTER_WORDS, dtype=torch.int32, device=q.device)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(COUNTER_WORDS, dtype=torch.int32, device=q.device)
    return counter
