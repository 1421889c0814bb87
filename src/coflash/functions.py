"""score_mod and mask_mod: the tensors they capture, and how they pass through operators.

A function may reach a tensor through its closure, a global, an attribute or a partial application.  Instead
of looking in all those places, `captured` calls the function once, on one score, and notes which tensors
PyTorch is asked to work on that it did not make itself on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Functions", "bind", "captured", "closure_tensors", "find", "register", "register_constant"]


class _Watch(TorchFunctionMode):
    """Collects the tensors that operations take and that no operation watched here has made."""

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self.made = {id(t): t for t in arguments}  # kept alive, or their ids could be used again
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.made:
                self.found[id(leaf)] = leaf
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.found:
                self.made[id(leaf)] = leaf
        return result


class _Substitute(TorchFunctionMode):
    """Runs operations on stand-ins for some tensors."""

    def __init__(self, stand_ins: dict[int, Tensor]) -> None:
        super().__init__()
        self.stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: self.stand_ins.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


def captured(score_mod: Callable[..., Any], q: Tensor, with_gradient: bool = True) -> tuple[Tensor, ...]:
    """The tensors that score_mod captures, in order of use: those that require grad, or all."""
    if 0 in q.shape:
        return ()
    score = torch.zeros(
        (), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device
    )
    position = torch.zeros((), dtype=torch.long, device=q.device)
    with _Watch((score, position)) as watch:
        score_mod(score, position, position, position, position)
    return tuple(t for t in watch.found.values() if t.requires_grad or not with_gradient)


def closure_tensors(function: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Tensors in a function's closure and among the globals it names, in a fixed order.

    Plainer than `captured`, so that torch.compile can follow it and make the tensors inputs of its graph.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            tensors.extend(value.parameters())
    return tuple(tensors)


def bind(function: Any, originals: tuple[Tensor, ...], stand_ins: tuple[Tensor, ...]) -> Any:
    """`function`, reading `stand_ins` where it captures `originals`."""
    if function is None or not originals:
        return function
    table = {id(old): new for old, new in zip(originals, stand_ins, strict=True)}

    def bound(*args: Any) -> Any:
        with _Substitute(table):
            return function(*args)

    return bound


class Functions(NamedTuple):
    score_mod: Any
    mask_mod: Any
    originals: (
        tuple[Tensor, ...] | None
    )  # what stand-ins replace; None: the closure tensors, as they are then


# An operator takes no functions, so it takes a number instead.  Functions seen by torch.compile keep theirs,
# as a compiled graph may run at any time; those that belong to one pass of a functorch transform make room
# after a while, because they hold on to its tensors.
_KEPT: list[Functions] = []
_NUMBERS: dict[tuple[Any, Any], int] = {}
_PASSING: OrderedDict[int, Functions] = OrderedDict()
_MOST_PASSING = 1024
_next_passing = -2


def register(score_mod: Any, mask_mod: Any, originals: tuple[Tensor, ...] | None = None) -> int:
    """A number for a pair of functions; -1 for none."""
    global _next_passing
    if score_mod is None and mask_mod is None:
        return -1
    if not originals:
        number = _NUMBERS.get((score_mod, mask_mod))
        if number is None:
            number = _NUMBERS[score_mod, mask_mod] = len(_KEPT)
            _KEPT.append(Functions(score_mod, mask_mod, originals))
        return number
    number, _next_passing = _next_passing, _next_passing - 1
    _PASSING[number] = Functions(score_mod, mask_mod, originals)
    while len(_PASSING) > _MOST_PASSING:
        _PASSING.popitem(last=False)
    return number


def find(number: int) -> Functions:
    if number == -1:
        return Functions(None, None, ())
    if number >= 0:
        return _KEPT[number]
    if number not in _PASSING:
        raise RuntimeError(
            f"score_mod of a transformed call is gone: more than {_MOST_PASSING} such calls were made since"
        )
    return _PASSING[number]


def register_constant(score_mod: Any, mask_mod: Any) -> int:
    """`register` under torch.compile: a number that is part of the graph, which the functions guard."""
    if score_mod is not None:
        known = {id(t) for t in closure_tensors(score_mod)}
        if any(id(t) not in known for t in captured(score_mod, torch.empty(1))):
            raise NotImplementedError(
                "score_mod under torch.compile captures a tensor that requires grad where the compiler cannot "
                "see it; accepted: tensors and modules in the function's closure or among its globals"
            )
    return register(score_mod, mask_mod)


# What torch._dynamo.assume_constant_result does, without importing the compiler.
register_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
