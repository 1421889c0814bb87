"""From a plan to the callable that launches it, with as little between the two as Python allows.

A launch is made once for a plan; what happens on each call is one generated expression: fetch the
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
from coflash.operands import LENGTHS

_functions: dict[tuple[str, Any, str], tuple[Any, tuple[str, ...]]] = {}
_lock = threading.Lock()


class Launch:
    """A compiled function whose arguments come from the call, or are the plan's scalars."""

    __slots__ = ("_arguments", "_function", "_general", "_scalars")

    def __init__(self, function: Any, arguments: tuple[str, ...], scalars: Mapping[str, int | float]) -> None:
        self._function, self._arguments, self._scalars = function, arguments, scalars
        self._general = self._bind(_PREPARED, ("operands", "out", "lse"), scalars)

    def __call__(self, operands: Any, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        """`operands` has the call's tensors as attributes, under the kernels' names."""
        return self._general(operands, out, lse)

    def direct(self, operands: Any) -> Callable[..., None] | None:
        """A launch f(q, k, v, *lengths, out, lse), with all of `LENGTHS`, for calls that differ from this one in
        addresses only, those of q, k, v multiples of 16 bytes: nothing is looked at any more. None where an operand
        would have to be copied.
        """
        if not all(map(followed, (operands.q, operands.k, operands.v))):
            return None
        lengths = (getattr(operands, name) for name in LENGTHS)
        if not all(x is None or x.is_contiguous() for x in lengths):
            return None
        scale = positive(operands.softmax_scale)
        bound = {**self._scalars, "softmax_scale": scale, "index": operands.q.get_device()}
        return self._bind(_AS_THEY_ARE, ("q", "k", "v", *LENGTHS, "out", "lse"), bound)

    def _bind(self, special: Mapping[str, str], parameters: tuple[str, ...], bound: Mapping[str, Any]) -> Any:
        terms = [
            special.get(name, name if name in bound or name in parameters else f"operands.{name}")
            for name in self._arguments
        ]
        return _factory(parameters, tuple(bound), ", ".join(terms))(self._function, *bound.values())


# How arguments are fetched that a kernel does not take as the caller gave them.
_PREPARED = {
    "q": "readable(operands.q)",
    "k": "readable(operands.k)",
    "v": "readable(operands.v)",
    "sink": "operands.sink.float().contiguous()",
    "softmax_scale": "positive(operands.softmax_scale)",
    "tile_counter": "tile_counter(operands.q.get_device())",
    **{name: f"operands.{name}.contiguous()" for name in LENGTHS},
}
_AS_THEY_ARE = {"tile_counter": "tile_counter(index)"}


@functools.cache
def _factory(parameters: tuple[str, ...], bound: tuple[str, ...], terms: str) -> Callable[..., Any]:
    """Makes launches of one list of arguments. Generated, so that a call does nothing but fetch and pass."""
    inner = f"lambda {', '.join(parameters)}: function({terms})"
    return eval(f"lambda {', '.join(('function', *bound))}: {inner}", globals())  # names of arguments only


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
    return Launch(*loaded, plan.scalars)


def load(entry: Entry) -> Any:
    """The tvm-ffi function of a compiled kernel, to be called with its arguments in order."""
    runtime.load([entry.folder.parent, *cache.readonly_roots()])
    return runtime.function(entry.so, entry.function)


_FOLLOWED: dict[tuple[int, ...], bool] = {}  # strides of 16-bit operands that the copy engine can follow


def followed(x: torch.Tensor) -> bool:
    """Whether the copy engine can follow an operand's strides."""
    stride = x.stride()
    found = _FOLLOWED.get(stride)
    if found is None:
        if len(_FOLLOWED) >= 4096:
            _FOLLOWED.clear()
        found = _FOLLOWED[stride] = stride[-1] == 1 and not any(step % 8 or not step for step in stride[:-1])
    return found


def readable(x: torch.Tensor) -> torch.Tensor:
    """The operand as it is, or a copy where the copy engine can't follow its strides or its address."""
    if followed(x) and not x.data_ptr() % 16:
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


def tile_counter(index: int) -> torch.Tensor:
    """The zeroed counter of device `index` (below 0: the CPU) that a dynamic scheduler draws tiles from, and
    leaves zeroed.

    Kernels on one stream run one after the other and share one. While a CUDA graph is captured the counter
    comes from the graph's own memory and is zeroed in the graph, which may later run beside anything else.
    """
    if index < 0:
        return torch.zeros(COUNTER_WORDS, dtype=torch.int32)
    stream = torch._C._cuda_getCurrentRawStream(index)
    if stream and torch._C._cuda_isCurrentStreamCapturing():  # the default stream, 0, cannot be captured
        return torch.zeros(COUNTER_WORDS, dtype=torch.int32, device=torch.device("cuda", index))
    counter = _counters.get((index, stream))
    if counter is None:
        counter = torch.zeros(COUNTER_WORDS, dtype=torch.int32, device=torch.device("cuda", index))
        _counters[index, stream] = counter
    return counter
