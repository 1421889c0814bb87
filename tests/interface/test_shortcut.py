"""The shortcut of a call seen before: taken by the same call again, and left by everything else.

The portable path stands in for a kernel, behind a kernel's arguments, so that all of this runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coflash import calls, flash_attn_func, interface, portable
from coflash.compiler import launch
from coflash.operands import Operands

CAUSAL = {"causal": True}


class Kernel:
    """Counts launches, and how many of them took a shortcut."""

    def __init__(self) -> None:
        self.launches = self.shortcuts = 0

    def launcher(self, problem: Any, operands: Operands, options: Any) -> launch.Launch | None:
        if options.backend == "portable":
            return None

        def function(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> None:
            *lse, softmax_scale, counter = rest
            assert counter.tolist() == [0]
            assert not any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in (q, k, v))
            self.launches += 1
            given = Operands(q, k, v, softmax_scale=softmax_scale)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                results = portable.forward(problem, given, portable.chosen())
            for destination, result in zip((out, *lse), results, strict=False):
                destination.copy_(result)

        lse = ("lse",) if problem.needs_lse or problem.needs_grad else ()
        return launch.Launch(function, ("q", "k", "v", "out", *lse, "softmax_scale", "tile_counter"), {})

    def table(self) -> dict[Any, Callable[..., Any]]:
        kernel = self

        class Table(dict[Any, Callable[..., Any]]):
            def __setitem__(self, key: Any, shortcut: Callable[..., Any]) -> None:
                def counted(*tensors: Tensor) -> Any:
                    kernel.shortcuts += 1
                    return shortcut(*tensors)

                super().__setitem__(key, counted)

        return Table()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(calls, "_launcher", found.launcher)
    monkeypatch.setattr(calls, "_CALLS", {})
    monkeypatch.setattr(interface, "_SHORTCUTS", found.table())
    return found


def tensors(grad: bool = False, dtype: torch.dtype = torch.bfloat16, tokens: int = 9) -> list[Tensor]:
    return [torch.randn(2, tokens, 4, 16).to(dtype).requires_grad_(grad) for _ in range(3)]


def expect(qkv: Any, **options: Any) -> Any:
    return flash_attn_func(*qkv, **{**options, "backend": "portable"})


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def gradients(result: Any, qkv: list[Tensor]) -> Any:
    outputs = result if isinstance(result, tuple) else (result,)
    loss = sum((x.double().square()).sum() for x in outputs)
    return torch.autograd.grad(loss, qkv, create_graph=True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softmax_scale": 0.3},
        {"window_size": (3, 0)},
        {"window_size": [2, None]},
        {"softcap": 5.0},
        {"return_lse": True},
        {"return_lse": True, "causal": True, "softmax_scale": 1, "softcap": 2, "deterministic": True},
    ],
    ids=str,
)
def test_the_same_call_again(kernel: Kernel, grad: bool, options: dict[str, Any]) -> None:
    for _ in range(2):
        flash_attn_func(*tensors(tokens=7), **options)  # other calls have shortcuts of their own
    before = kernel.shortcuts
    kept = []
    for again in range(3):
        qkv = tensors(grad)
        ours, theirs = flash_attn_func(*qkv, **options), expect(qkv, **options)
        assert kernel.shortcuts - before == again
        same(ours, theirs)
        if grad:
            first, expected = gradients(ours, qkv), gradients(theirs, qkv)
            same(first, expected)
            for a, b in zip(gradients(first, qkv), gradients(expected, qkv), strict=True):
                assert (a - b).abs().max() < 0.05 * b.abs().max()  # bfloat16, added up in another order
        kept.append((ours, theirs))
    for ours, theirs in kept:  # no call wrote into another's results
        same(ours, theirs)


def every_other_row(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


def off_by_two_bytes(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


def dimensions_first(x: Tensor) -> Tensor:
    return x.transpose(1, 3).contiguous().transpose(1, 3)


LAYOUTS = [every_other_row, off_by_two_bytes, dimensions_first]


@pytest.mark.parametrize("change", LAYOUTS)
@pytest.mark.parametrize("which", range(3))
def test_another_layout_or_address(kernel: Kernel, change: Callable[[Tensor], Tensor], which: int) -> None:
    qkv = tensors()
    for _ in range(2):
        flash_attn_func(*qkv, **CAUSAL)
    before = kernel.shortcuts
    qkv[which] = change(qkv[which])
    for again in range(2):
        out = flash_attn_func(*qkv, **CAUSAL)
        same(out, expect(qkv, **CAUSAL))
        assert out.is_contiguous()
        # What a kernel reads in place has a shortcut of its own; what must be copied has none.
        assert kernel.shortcuts - before == (again if change is every_other_row else 0)


@pytest.mark.parametrize("first_copied", [False, True])
def test_a_layout_whose_first_call_was_misaligned(kernel: Kernel, first_copied: bool) -> None:
    qkv = tensors()
    for shift in (first_copied, False, True, False):
        given = [off_by_two_bytes(x) for x in qkv] if shift else qkv
        same(flash_attn_func(*given), expect(qkv))
    assert kernel.shortcuts == 2


def test_another_dtype_or_shape(kernel: Kernel) -> None:
    for qkv in (tensors(), tensors(dtype=torch.float16), tensors(tokens=8), tensors(), tensors(tokens=8)):
        same(flash_attn_func(*qkv), expect(qkv))
    assert kernel.shortcuts == 2
    q, k, v = tensors()
    with pytest.raises(TypeError, match="k is torch.float16"):
        flash_attn_func(q, k.half(), v)
    with pytest.raises(ValueError, match="v is of shape"):
        flash_attn_func(q, k, v[:, 1:])


@pytest.mark.parametrize("which", range(3))
def test_a_device_that_differs(kernel: Kernel, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = tensors()
    for _ in range(2):
        flash_attn_func(*qkv)
    index_of = Tensor.get_device
    monkeypatch.setattr(launch, "tile_counter", lambda index: torch.zeros(1))
    monkeypatch.setattr(Tensor, "get_device", lambda x: 1 if x is qkv[which] else index_of(x))
    flash_attn_func(*qkv)
    assert (kernel.launches, kernel.shortcuts) == (3, 1)


def test_which_tensors_require_grad(kernel: Kernel) -> None:
    plain, leaves = tensors(), tensors(grad=True)
    for _ in range(2):
        assert not flash_attn_func(*plain).requires_grad
        for i in range(3):
            mixed = [leaves[j] if j == i else plain[j] for j in range(3)]
            (ours,) = torch.autograd.grad(flash_attn_func(*mixed).double().square().sum(), leaves[i])
            (theirs,) = torch.autograd.grad(expect(mixed).double().square().sum(), leaves[i])
            same(ours, theirs)
        with torch.no_grad():
            assert not flash_attn_func(*leaves).requires_grad
        with torch.inference_mode():
            assert flash_attn_func(*plain).is_inference()
            assert flash_attn_func(*leaves).is_inference()
    assert kernel.shortcuts == kernel.launches - 2


def test_changing_a_saved_tensor_is_noticed(kernel: Kernel) -> None:
    q, k, v = tensors(grad=True)
    for _ in range(2):
        out = flash_attn_func(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Subclass(Tensor):
    pass


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def under_autocast(*qkv: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return flash_attn_func(*qkv)


def under_vmap(*qkv: Tensor) -> Tensor:
    return torch.vmap(flash_attn_func)(*(x[None] for x in qkv))[0]


def under_grad(*qkv: Tensor) -> Tensor:
    return torch.func.vjp(lambda q: flash_attn_func(q, *qkv[1:]), qkv[0])[0]


def compiled(*qkv: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(*qkv)


def of_a_subclass(*qkv: Tensor) -> Tensor:
    return flash_attn_func(qkv[0].as_subclass(Subclass), *qkv[1:]).as_subclass(Tensor)


def dispatched(*qkv: Tensor) -> Tensor:
    with Seen() as seen:
        out = flash_attn_func(*qkv)
    assert "coflash.attention.default" in seen.names
    return out


@pytest.mark.parametrize("way", [under_autocast, under_vmap, under_grad, compiled, of_a_subclass, dispatched])
def test_what_must_leave_it(kernel: Kernel, way: Callable[..., Tensor]) -> None:
    qkv = tensors()
    for _ in range(2):
        flash_attn_func(*qkv)
    before = kernel.shortcuts
    out = way(*qkv)
    assert kernel.shortcuts == before
    given = [x.half() for x in qkv] if way is under_autocast else qkv
    same(out, expect(given))


def test_fake_tensors_leave_it(kernel: Kernel) -> None:
    qkv = tensors()
    for _ in range(2):
        flash_attn_func(*qkv)
    with FakeTensorMode() as mode:
        out = flash_attn_func(*(mode.from_tensor(x) for x in qkv))
    assert out.shape == qkv[0].shape and (kernel.launches, kernel.shortcuts) == (2, 1)


def test_a_parameter(kernel: Kernel) -> None:
    q, k, v = tensors()
    for _ in range(2):
        out = flash_attn_func(q, torch.nn.Parameter(k), v)
    same(out, expect((q, k, v)))
    assert out.requires_grad


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0.0}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({}, {"causal": []}),
        ({}, {"softcap": {}}),
        ({}, {"window_size": ([], None)}),
        ({}, {"score_mod": []}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_an_argument_of_the_wrong_type(
    kernel: Kernel, taken: dict[str, Any], refused: dict[str, Any], backend: Any
) -> None:
    """Equal to one that was taken, or nothing that a table can hold: the message is the same as ever."""
    qkv = tensors()
    for _ in range(2):
        flash_attn_func(*qkv, **taken, backend=backend)
    (name,) = refused
    with pytest.raises(TypeError, match=f"{name} is .*; accepted: "):
        flash_attn_func(*qkv, **refused, backend=backend)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite(kernel: Kernel, scale: float) -> None:
    qkv = tensors()
    for backend in ("auto", "portable"):
        for _ in range(2):
            flash_attn_func(*qkv, softmax_scale=0.5, backend=backend)
        with pytest.raises(ValueError, match="softmax_scale is"):
            flash_attn_func(*qkv, softmax_scale=scale, backend=backend)


@pytest.mark.parametrize("option", ["learnable_sink", "alibi_slopes"])
def test_tensors_beside_the_three(kernel: Kernel, option: str) -> None:
    """Their calls take the longer way. (The portable path that stands in here does not get to see them.)"""
    qkv = tensors()
    for _ in range(3):
        flash_attn_func(*qkv)
    before = kernel.shortcuts
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", lambda self, operands, out, lse: given.append(operands))
        flash_attn_func(*qkv, **{option: torch.ones(4)})
    assert kernel.shortcuts == before and given[0].q is qkv[0]
    assert (given[0].sink if option == "learnable_sink" else given[0].alibi_slopes) is not None


def test_the_table_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_MOST_SHORTCUTS", 3)
    for tokens in range(1, 9):
        flash_attn_func(*tensors(tokens=tokens))
        assert len(interface._SHORTCUTS) <= 3
