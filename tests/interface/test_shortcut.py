"""The shortcut of a call seen before: taken by the same call again, and left by everything else.

The portable path stands in for a kernel, behind a kernel's arguments, so that all of this runs on a CPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from coflash import calls, flash_attn_func, flash_attn_varlen_func, interface, portable
from coflash.compiler import launch
from coflash.operands import LENGTHS, Operands

CAUSAL = {"causal": True}


class Kernel:
    """Counts launches, and how many of them took a shortcut."""

    def __init__(self) -> None:
        self.launches = self.shortcuts = 0

    def launcher(self, problem: Any, operands: Operands, options: Any) -> launch.Launch | None:
        if options.backend == "portable":
            return None

        lengths = [name for name in LENGTHS if getattr(operands, name) is not None]

        def function(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            where, (out, *lse, softmax_scale, counter) = rest[: len(lengths)], rest[len(lengths) :]
            assert counter.tolist() == [0]
            assert not any(x.data_ptr() % 16 or x.stride(-1) != 1 for x in (q, k, v))
            assert all(x.is_contiguous() for x in where)
            self.launches += 1
            given = Operands(q, k, v, softmax_scale=softmax_scale, **dict(zip(lengths, where, strict=True)))
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                results = portable.forward(problem, given, portable.chosen())
            for destination, result in zip((out, *lse), results, strict=False):
                destination.copy_(result)

        lse = ("lse",) if problem.needs_lse or problem.needs_grad else ()
        names = ("q", "k", "v", *lengths, "out", *lse, "softmax_scale", "tile_counter")
        return launch.Launch(function, names, {})

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


# -- flash_attn_varlen_func -------------------------------------------------------------------------------------


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def used(*lengths: int) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def packed(grad: bool = False, tokens: int = 16) -> list[Tensor]:
    return [torch.randn(tokens, 4, 16).to(torch.bfloat16).requires_grad_(grad) for _ in range(3)]


def padded(grad: bool = False) -> list[Tensor]:
    return [torch.randn(3, 9, 4, 16).to(torch.bfloat16).requires_grad_(grad) for _ in range(3)]


def three(*lengths: int) -> dict[str, Any]:
    """Three sequences, 16 tokens."""
    cu_seqlens = cumulative(*lengths)
    return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 9, "max_seqlen_k": 9}


THREE = three(4, 9, 3)


def expect_varlen(qkv: Any, **options: Any) -> Any:
    return flash_attn_varlen_func(*qkv, **{**options, "backend": "portable"})


# Of each kind calls that have everything in common but what their lengths hold.
LENGTHS_AGAIN: dict[str, tuple[Callable[..., list[Tensor]], list[dict[str, Any]]]] = {
    "packed": (packed, [three(4, 9, 3), three(8, 0, 8), three(1, 7, 8)]),
    "shared": (packed, [THREE] * 3),
    "packed and used": (
        packed,
        [
            {**three(4, 9, 3), "seqused_q": used(4, 2, 1), "seqused_k": used(1, 9, 3)},
            {**three(8, 0, 8), "seqused_q": used(8, 0, 3), "seqused_k": used(0, 0, 8)},
            {**three(1, 7, 8), "seqused_q": used(0, 7, 8), "seqused_k": used(1, 5, 0)},
        ],
    ),
    "used keys": (
        padded,
        [{"seqused_k": used(9, 1, 4)}, {"seqused_k": used(2, 3, 9)}, {"seqused_k": used(0, 9, 9)}],
    ),
    "used queries": (
        padded,
        [{"seqused_q": used(9, 1, 4)}, {"seqused_q": used(2, 3, 9)}, {"seqused_q": used(0, 9, 9)}],
    ),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", LENGTHS_AGAIN)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "return_lse": True}, {"window_size": (3, 0), "softmax_scale": 0.3}],
    ids=str,
)
def test_the_same_varlen_call_again(kernel: Kernel, grad: bool, kind: str, options: dict[str, Any]) -> None:
    make, each = LENGTHS_AGAIN[kind]
    kept = []
    for again, lengths in enumerate(each):
        qkv = make(grad)
        ours = flash_attn_varlen_func(*qkv, **lengths, **options)
        theirs = expect_varlen(qkv, **lengths, **options)
        assert (kernel.launches, kernel.shortcuts) == (again + 1, again)
        kept.append((qkv, ours, theirs))
    for qkv, ours, theirs in kept:  # no call had another's lengths, or wrote into its results
        if isinstance(ours, tuple):  # rows that see nothing: -inf has no gradient to compare
            same(ours, theirs)
            ours, theirs = ours[0], theirs[0]
        same(ours, theirs)
        if grad:
            first, expected = gradients(ours, qkv), gradients(theirs, qkv)
            same(first, expected)
            for a, b in zip(gradients(first, qkv), gradients(expected, qkv), strict=True):
                assert (a - b).abs().max() < 0.05 * b.abs().max()


@pytest.mark.parametrize("grad", [False, True])
def test_a_shortcut_holds_no_lengths(kernel: Kernel, grad: bool) -> None:
    gone = []
    for _ in range(2):
        lengths = three(4, 9, 3)
        gone.append(weakref.ref(lengths["cu_seqlens_q"]))
        flash_attn_varlen_func(*packed(grad), **lengths)
        del lengths
    gc.collect()
    assert kernel.shortcuts == 1 and all(ref() is None for ref in gone)


def test_varlen_which_tensors_require_grad(kernel: Kernel) -> None:
    plain, leaves = packed(), packed(grad=True)
    for _ in range(2):
        assert not flash_attn_varlen_func(*plain, **THREE).requires_grad
        for i in range(3):
            mixed = [leaves[j] if j == i else plain[j] for j in range(3)]
            ours, theirs = flash_attn_varlen_func(*mixed, **THREE), expect_varlen(mixed, **THREE)
            same(*(torch.autograd.grad(x.double().square().sum(), leaves[i]) for x in (ours, theirs)))
        with torch.no_grad():
            assert not flash_attn_varlen_func(*leaves, **THREE).requires_grad
        with torch.inference_mode():
            assert flash_attn_varlen_func(*leaves, **THREE).is_inference()
    assert kernel.shortcuts == kernel.launches - 2


def taken(kernel: Kernel) -> list[Tensor]:
    """q, k and v of a call that takes the shortcut from now on."""
    qkv = packed()
    for _ in range(2):
        flash_attn_varlen_func(*qkv, **THREE)
    assert kernel.shortcuts == 1
    return qkv


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lengths_that_are_copied_leave_it(kernel: Kernel, name: str) -> None:
    qkv, lengths = packed(), {**THREE, "seqused_q": used(1, 2, 3), "seqused_k": used(3, 2, 1)}
    for _ in range(2):
        flash_attn_varlen_func(*qkv, **lengths)
    lengths[name] = lengths[name].repeat_interleave(2)[::2]
    for _ in range(2):
        same(flash_attn_varlen_func(*qkv, **lengths), expect_varlen(qkv, **lengths))
    assert (kernel.launches, kernel.shortcuts) == (4, 1)


@pytest.mark.parametrize("which", range(3))
def test_varlen_at_another_address(kernel: Kernel, which: int) -> None:
    qkv = taken(kernel)
    qkv[which] = off_by_two_bytes(qkv[which])
    same(flash_attn_varlen_func(*qkv, **THREE), expect_varlen(qkv, **THREE))
    assert (kernel.launches, kernel.shortcuts) == (3, 1)


def test_other_lengths_have_a_shortcut_of_their_own(kernel: Kernel) -> None:
    qkv = taken(kernel)
    others: list[dict[str, Any]] = [
        {**three(4, 9, 3), "max_seqlen_q": 16},
        {**three(4, 9, 3), "max_seqlen_k": None},
        three(4, 3, 6, 3),
        {**THREE, "seqused_q": used(3, 2, 1)},
        {**THREE, "seqused_k": used(3, 2, 1)},
    ]
    for n, lengths in enumerate(others):
        for again in range(2):
            same(flash_attn_varlen_func(*qkv, **lengths), expect_varlen(qkv, **lengths))
            assert kernel.shortcuts == 1 + n + again


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": cumulative(4, 9, 3).long()}, TypeError, "cu_seqlens_q is torch.int64"),
        ({"cu_seqlens_k": cumulative(4, 9, 3).float()}, TypeError, "cu_seqlens_k is torch.float32"),
        ({"cu_seqlens_q": [0, 4, 13, 16]}, TypeError, "cu_seqlens_q is list"),
        ({"cu_seqlens_k": cumulative(4, 12)}, ValueError, "cu_seqlens_k is of shape"),
        ({"cu_seqlens_q": cumulative(4, 12)}, ValueError, "cu_seqlens_k is of shape"),
        ({"cu_seqlens_q": cumulative(4, 9, 3)[None]}, ValueError, "cu_seqlens_q is of shape"),
        ({"cu_seqlens_q": None}, ValueError, "q is of shape"),
        ({"seqused_q": used(1, 1)}, ValueError, "seqused_q is of shape"),
        ({"seqused_k": used(1, 1, 1).long()}, TypeError, "seqused_k is torch.int64"),
        ({"seqused_k": 3}, TypeError, "seqused_k is int"),
        ({"max_seqlen_q": 9.0}, TypeError, "max_seqlen_q is 9.0"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k is True"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
        ({"max_seqlen_q": []}, TypeError, "max_seqlen_q is "),
        ({"causal": 0}, TypeError, "causal is 0"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ],
    ids=str,
)
def test_lengths_that_are_refused(
    kernel: Kernel, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    qkv = packed()
    for lengths in (THREE, {**THREE, "max_seqlen_k": 1}):
        with pytest.MonkeyPatch.context() as patch:  # as on a GPU, where a maximum is taken on trust
            patch.setattr(calls.checks, "check_values", lambda *_: None)
            for _ in range(2):
                flash_attn_varlen_func(*qkv, **lengths)
    for _ in range(2):
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(*qkv, **{**THREE, **change})
    assert kernel.shortcuts == 2


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lengths_on_another_device(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, lengths = packed(), {**three(4, 9, 3), "seqused_q": used(1, 2, 3), "seqused_k": used(3, 2, 1)}
    lengths["cu_seqlens_k"] = lengths["cu_seqlens_k"].clone()
    for _ in range(2):
        flash_attn_varlen_func(*qkv, **lengths)
    index_of = Tensor.get_device
    monkeypatch.setattr(Tensor, "get_device", lambda x: 1 if x is lengths[name] else index_of(x))
    flash_attn_varlen_func(*qkv, **lengths)
    assert (kernel.launches, kernel.shortcuts) == (3, 1)


def varlen(*qkv: Tensor) -> Tensor:
    return flash_attn_varlen_func(*qkv, **THREE)


def varlen_under_autocast(*qkv: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return varlen(*qkv)


def varlen_under_vmap(*qkv: Tensor) -> Tensor:
    return torch.vmap(varlen)(*(x[None] for x in qkv))[0]


def varlen_under_vmap_of_q_alone(*qkv: Tensor) -> Tensor:
    return torch.vmap(lambda q: varlen(q, *qkv[1:]))(qkv[0][None])[0]


def varlen_under_grad(*qkv: Tensor) -> Tensor:
    return torch.func.vjp(lambda q: varlen(q, *qkv[1:]), qkv[0])[0]


def varlen_compiled(*qkv: Tensor) -> Tensor:
    torch._dynamo.reset()
    call = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    return call(*qkv, **THREE)


def varlen_of_a_subclass(*qkv: Tensor) -> Tensor:
    return varlen(qkv[0].as_subclass(Subclass), *qkv[1:]).as_subclass(Tensor)


def varlen_with_lengths_of_a_subclass(*qkv: Tensor) -> Tensor:
    lengths = {**THREE, "cu_seqlens_q": THREE["cu_seqlens_q"].as_subclass(Subclass)}
    flash_attn_varlen_func(*qkv, **lengths)
    return flash_attn_varlen_func(*qkv, **lengths)


def varlen_dispatched(*qkv: Tensor) -> Tensor:
    with Seen() as seen:
        out = varlen(*qkv)
    assert "coflash.attention.default" in seen.names
    return out


@pytest.mark.parametrize(
    "way",
    [
        varlen_under_autocast,
        varlen_under_vmap,
        varlen_under_vmap_of_q_alone,
        varlen_under_grad,
        varlen_compiled,
        varlen_of_a_subclass,
        varlen_with_lengths_of_a_subclass,
        varlen_dispatched,
    ],
)
def test_what_must_leave_it_in_varlen(kernel: Kernel, way: Callable[..., Tensor]) -> None:
    qkv = taken(kernel)
    out = way(*qkv)
    assert kernel.shortcuts == 1
    given = [x.half() for x in qkv] if way is varlen_under_autocast else qkv
    same(out, expect_varlen(given, **THREE))


def test_fake_lengths_leave_it(kernel: Kernel) -> None:
    qkv = taken(kernel)
    with FakeTensorMode() as mode:
        lengths = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in THREE.items()}
        out = flash_attn_varlen_func(*map(mode.from_tensor, qkv), **lengths)
    assert out.shape == qkv[0].shape and (kernel.launches, kernel.shortcuts) == (2, 1)


@pytest.mark.parametrize(
    "option", ["learnable_sink", "alibi_slopes", "score_mod", "mask_mod", "page_table", "dropout_p"]
)
def test_what_stands_beside_the_lengths(kernel: Kernel, option: str) -> None:
    """Calls with it take the longer way. (The portable path that stands in here does not get to see it.)"""
    paged = option == "page_table"
    qkv = padded() if paged else packed()
    lengths: dict[str, Any] = {"seqused_k": used(9, 1, 4)} if paged else THREE
    value = {
        "score_mod": lambda score, b, h, i, j: score,
        "mask_mod": lambda b, h, i, j: i >= j,
        "page_table": torch.zeros(3, 1, dtype=torch.int32),
        "dropout_p": 0.5,
    }.get(option, torch.ones(4))
    for _ in range(2):
        flash_attn_varlen_func(*qkv, **lengths)
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", lambda self, operands, out, lse: given.append(operands))
        for _ in range(2):
            flash_attn_varlen_func(*qkv, **lengths, **{option: value})
    assert kernel.shortcuts == 1 and len(given) == 2 and given[0].q is qkv[0]


def test_varlen_without_lengths(kernel: Kernel) -> None:
    """It takes the longer way, and no shortcut of `flash_attn_func`."""
    for grad in (False, True):
        qkv = padded(grad)
        for _ in range(2):
            flash_attn_func(*qkv)
        for _ in range(2):
            same(flash_attn_varlen_func(*qkv), expect(qkv))
    assert (kernel.launches, kernel.shortcuts) == (8, 2)
