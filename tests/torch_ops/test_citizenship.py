"""PyTorch's own machinery: operators, torch.compile, export, functorch, autocast, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from coflash import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    operators,
)
from coflash.checks import Options
from coflash.operands import Operands

CU = torch.tensor([0, 4, 4, 11], dtype=torch.int32)


def qkv(
    *lead: int, tokens: int = 11, heads: int = 4, heads_kv: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*lead, tokens, h, 8) for h in (heads, heads_kv, heads_kv)]
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def same(ours: Any, expected: Any, **tolerance: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# -- the operators ---------------------------------------------------------------------------------------------


def arguments(**options: Any) -> tuple[Any, ...]:
    """Arguments of `coflash::attention` for a call with everything that an operator takes."""
    q, k, v = qkv(2)
    operands = Operands(
        q, k, v, torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True), (), 0.3
    )
    return operators.pack(operands, Options("flash_attn_func", causal=True, softcap=4.0, **options), -1)


def packed_arguments() -> tuple[Any, ...]:
    operands = Operands(*qkv(), softmax_scale=0.3, cu_seqlens_q=CU, cu_seqlens_k=CU)
    return operators.pack(operands, Options("flash_attn_varlen_func", window_size=(3, 0)), -1)


@pytest.mark.parametrize("make", (arguments, packed_arguments))
def test_opcheck_forward(make: Callable[[], tuple[Any, ...]]) -> None:
    torch.library.opcheck(torch.ops.coflash.attention, make())


@pytest.mark.parametrize("make", (arguments, packed_arguments))
def test_opcheck_backward(make: Callable[[], tuple[Any, ...]]) -> None:
    args = make()
    out, lse = torch.ops.coflash.attention(*args)
    rows = (torch.randn_like(out).requires_grad_(), lse.detach(), torch.randn_like(lse).requires_grad_())
    torch.library.opcheck(torch.ops.coflash.attention_backward, (*rows, *args))


def test_opcheck_double_backward() -> None:
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments())
    out, lse = torch.ops.coflash.attention(*args)
    directions = [torch.randn_like(x) for x in args[:3]]
    rows = (torch.randn_like(out), lse, torch.randn_like(lse))
    torch.library.opcheck(
        torch.ops.coflash.attention_double_backward, (*directions, [torch.randn(4)], *rows, *args)
    )


# -- torch.compile ---------------------------------------------------------------------------------------------

BIAS = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()


def by_global(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + BIAS[h, (i - j).abs()]


def by_closure(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score * torch.sigmoid(bias[h, i]) + bias[h, j]


CLOSURE = by_closure(BIAS)

BLOCKS = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return flash_attn_func(q, k, v, causal=True)


COMPILED: dict[str, Callable[..., Any]] = {
    "dense": lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=5.0),
    "lse": lambda q, k, v: flash_attn_func(q, k, v, window_size=(4, 1), return_lse=True),
    "dropout": lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.3, dropout_seed=4),
    "flex": lambda q, k, v: flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
    "block mask": lambda q, k, v: flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, block_mask=BLOCKS
    ),
    "autocast": autocast,
    "score_mod, global": lambda q, k, v: flash_attn_func(q, k, v, score_mod=by_global),
    "score_mod, closure": lambda q, k, v: flash_attn_func(q, k, v, score_mod=CLOSURE),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_without_a_graph_break(name: str) -> None:
    function = COMPILED[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (11, 17, 23):
        leaves = qkv(2, tokens=tokens)
        results = []
        for f in (compiled, function):
            out = f(*leaves)
            outputs = out if isinstance(out, tuple) else (out,)
            loss = sum((x * torch.linspace(0, 1, x.numel()).view_as(x)).sum() for x in outputs)
            extra = [BIAS] if "score_mod" in name else []
            results.append((*outputs, *torch.autograd.grad(loss, [*leaves, *extra])))
        same(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a new length recompiled"


def test_compile_packed_and_cached() -> None:
    torch._dynamo.reset()

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager", dynamic=True)
    for cu in (CU, torch.tensor([0, 2, 5, 13], dtype=torch.int32)):
        q, k, v = qkv(tokens=int(cu[-1]))
        results = [
            (o := f(q, k, v, cu), *torch.autograd.grad(o.sum(), (q, k, v))) for f in (compiled, packed)
        ]
        same(*results)

    def step(q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, lengths: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, cache_k, cache_v, k=k, v=v, cache_seqlens=lengths, causal=True)

    q, k, v = (x.detach() for x in qkv(2, tokens=3))
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    caches = [torch.randn(2, 12, 2, 8, generator=torch.Generator().manual_seed(2)) for _ in range(4)]
    caches[2:] = [c.clone() for c in caches[:2]]
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, *caches[:2], lengths)
    torch.testing.assert_close(out, step(q, k, v, *caches[2:], lengths))
    same(caches[:2], caches[2:])


def test_compile_refuses_a_capture_it_cannot_see() -> None:
    hidden = {"bias": BIAS}
    torch._dynamo.reset()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + hidden["bias"][h, i]

    with pytest.raises(Exception, match="captures a tensor that requires grad"):
        torch.compile(
            lambda q, k, v: flash_attn_func(q, k, v, score_mod=score_mod), fullgraph=True, backend="aot_eager"
        )(*qkv(2))


def test_compile_refuses_a_function_it_would_compile_too() -> None:
    torch._dynamo.reset()

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j: s + q[b, i, h, 0])

    with pytest.raises(Exception, match="defined inside the function that torch.compile compiles"):
        torch.compile(inside, fullgraph=True, backend="aot_eager")(*qkv(2))


@pytest.mark.slow
def test_compile_by_inductor() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(2)
    function = COMPILED["dense"]
    compiled = torch.compile(function, fullgraph=True)
    results = [(o := f(q, k, v), *torch.autograd.grad(o.sum(), (q, k, v))) for f in (compiled, function)]
    same(*results, atol=1e-6, rtol=1e-5)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, causal=True, window_size=(5, None))
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("strict", (False, True))
def test_export(strict: bool) -> None:
    q, k, v = (x.detach() for x in qkv(2))
    tokens = torch.export.Dim("tokens", min=2, max=512)
    shapes = ({1: tokens}, {1: tokens}, {1: tokens})
    program = torch.export.export(Layer(), (q, k, v), dynamic_shapes=shapes, strict=strict)
    assert any(n.target == torch.ops.coflash.attention.default for n in program.graph.nodes)
    other = [x.detach() for x in qkv(2, tokens=19)]
    torch.testing.assert_close(program.module()(*other), Layer()(*other))


# -- functorch ---------------------------------------------------------------------------------------------------


def loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = flash_attn_func(q, k, v, causal=True, **options)
    assert isinstance(out, Tensor)
    return (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def test_func_grad() -> None:
    leaves = qkv(2, dtype=torch.float64)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*leaves)
    same(found, torch.autograd.grad(loss(*leaves), leaves))


def test_func_grad_of_a_captured_tensor() -> None:
    q, k, v = qkv(2)

    def of_bias(bias: Tensor) -> Tensor:
        return loss(q, k, v, score_mod=by_closure(bias))

    same([torch.func.grad(of_bias)(BIAS.detach())], torch.autograd.grad(of_bias(BIAS), BIAS))


def test_second_derivative_by_func() -> None:
    q, k, v = (x.detach() for x in qkv(1, tokens=3, dtype=torch.float64))

    def norm(gradient_of: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda q: gradient_of(q).square().sum()

    found = torch.func.grad(norm(torch.func.grad(lambda q: loss(q, k, v))))(q)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, k, v), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_dims", ((0, 0, 0), (0, None, None), (2, 1, None), (None, 0, 3)))
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    leaves = [x.detach() for x in qkv(2)]
    batched = [
        x if d is None else torch.stack((x, 2 * x, -x), dim=d) for x, d in zip(leaves, in_dims, strict=True)
    ]

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = flash_attn_func(q, k, v, causal=True, softcap=3.0, return_lse=True)
        assert isinstance(out, tuple)
        return out

    found = torch.vmap(function, in_dims=in_dims)(*batched)
    each = [
        function(*[x if d is None else x.select(d, n) for x, d in zip(batched, in_dims, strict=True)])
        for n in range(3)
    ]
    same(found, [torch.stack(column) for column in zip(*each, strict=True)])


@pytest.mark.parametrize("case", ("alibi", "packed", "score_mod", "dropout"))
def test_vmap_one_by_one(case: str) -> None:
    """What cannot be folded into the batch, because positions in the batch mean something."""
    q, k, v = (x.detach() for x in (qkv() if case == "packed" else qkv(2)))
    slopes = torch.rand(2, 4)
    options: dict[str, Any] = {
        "alibi": {"alibi_slopes": slopes},
        "packed": {"cu_seqlens_q": CU, "cu_seqlens_k": CU},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s + b * (i - j)},
        "dropout": {"dropout_p": 0.4, "dropout_seed": 7},
    }[case]
    function = flash_attn_varlen_func if case == "packed" else flash_attn_func
    found = torch.vmap(lambda q: function(q, k, v, **options))(torch.stack((q, 2 * q)))
    same(found, [function(q, k, v, **options), function(2 * q, k, v, **options)])


def test_gradients_for_each_sample() -> None:
    q, k, v = (torch.stack((x, 2 * x)).detach() for x in qkv(1))
    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for n in range(2):
        leaves = [x[n].clone().requires_grad_() for x in (q, k, v)]
        same([g[n] for g in found], torch.autograd.grad(loss(*leaves), leaves))


def test_jacobian() -> None:
    q, k, v = (x.detach() for x in qkv(1, tokens=3, dtype=torch.float64))
    found = torch.func.jacrev(lambda q: flash_attn_func(q, k, v))(q)
    expected = torch.autograd.functional.jacobian(lambda q: flash_attn_func(q, k, v), q)
    torch.testing.assert_close(found, expected)


# -- second derivatives ------------------------------------------------------------------------------------------

SECOND: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, window": {"causal": True, "window_size": (2, None)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("parts", ("plain", "sink and alibi", "captured"))
def test_gradgradcheck(name: str, parts: str) -> None:
    leaves = qkv(1, tokens=4, heads=2, heads_kv=1, dtype=torch.float64)
    q, k, v = (x.detach()[..., :3].clone().requires_grad_() for x in leaves)
    options = SECOND[name]
    extra: list[Tensor] = []
    if parts == "sink and alibi":
        extra = [torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)]
    elif parts == "captured":
        extra = [torch.randn(2, 4, dtype=torch.float64)]
    extra = [x.requires_grad_() for x in extra]

    def function(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Any:
        more: dict[str, Any] = {}
        if parts == "sink and alibi":
            more = {"learnable_sink": extra[0], "alibi_slopes": extra[1]}
        elif parts == "captured":
            more = {"score_mod": by_closure(extra[0])}
        out, lse = flash_attn_func(q, k, v, return_lse=True, **options, **more)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v, *extra), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v, *extra), fast_mode=True)


def test_gradgradcheck_packed() -> None:
    leaves = tuple(
        x.detach()[..., :3].clone().requires_grad_() for x in qkv(tokens=11, heads=2, dtype=torch.float64)
    )

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=CU, cu_seqlens_k=CU, causal=True)

    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.slow
def test_gradgradcheck_of_every_element() -> None:
    q, k, v = (x.detach()[..., :2].clone().requires_grad_() for x in qkv(1, tokens=3, dtype=torch.float64))
    bias = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Any:
        return flash_attn_func(
            q,
            k,
            v,
            causal=True,
            softcap=2.0,
            learnable_sink=sink,
            score_mod=by_closure(bias),
            return_lse=True,
        )

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sink))
    assert torch.autograd.gradgradcheck(function, (q, k, v, bias, sink))


def test_second_derivative_in_float32() -> None:
    """The same as float64's, to float32's precision, across many tiles."""
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = qkv(2, tokens=150, dtype=dtype)
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=2e-5 * float(true.abs().max()), rtol=1e-3)


# -- modes -------------------------------------------------------------------------------------------------------


def test_no_grad_and_inference_mode() -> None:
    q, k, v = qkv(2)
    expected = flash_attn_func(q, k, v)
    assert isinstance(expected, Tensor) and expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = flash_attn_func(q, k, v)
            assert isinstance(out, Tensor) and not out.requires_grad
            torch.testing.assert_close(out, expected.detach())


def test_autocast() -> None:
    """q, k, v are cast as PyTorch casts its own attention's; the gradients come back in the inputs' dtype."""
    q, k, v = qkv(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_func(q, k.bfloat16(), v, causal=True)
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert out.dtype == torch.bfloat16
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*halves, causal=True)
    assert torch.equal(out, expected)
    for g, e, x in zip(
        gradients, torch.autograd.grad(expected.float().sum(), halves), (q, k, v), strict=True
    ):
        assert g.dtype == x.dtype == torch.float32
        torch.testing.assert_close(g, e.float())


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_func(*qkv(2, dtype=torch.float64))
    assert isinstance(out, Tensor) and out.dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """The recomputed forward drops the same weights."""
    leaves = qkv(2)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, dropout_p=0.3) * 2

    results = []
    for again in (False, True):
        torch.manual_seed(0)
        for x in leaves:
            x.grad = None
        out = checkpoint(block, *leaves, use_reentrant=use_reentrant) if again else block(*leaves)
        out.sum().backward()
        results.append((out, *[x.grad for x in leaves]))
    same(*results)


def test_saved_tensor_hooks_see_every_large_tensor() -> None:
    """Offloading works: nothing of the inputs' size is kept behind autograd's back."""
    leaves = qkv(2)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.data_ptr()) or t.clone(), lambda t: t
    ):
        out = flash_attn_func(*leaves, causal=True)
    assert {x.data_ptr() for x in leaves} <= set(seen)
    assert isinstance(out, Tensor)
    expected = flash_attn_func(*leaves, causal=True)
    same(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, n, h, 8, dtype=torch.bfloat16) for n, h in ((1024, 4), (2048, 2), (2048, 2))
        )
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == (2, 1024, 4, 8) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 1024) and lse.dtype == torch.float32
