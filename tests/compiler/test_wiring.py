"""From operands to an answer without a GPU: plan, compile in a process, bind, record the launch, run it on
the virtual GPU, and compare with the portable path."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from coflash import planning, portable, vgpu
from coflash.compiler import builder, launch
from coflash.operands import Operands
from coflash.problem import Problem


def run(problem: Problem, operands: Operands) -> None:
    plan = planning.plan(problem, planning.typical("sm_90a"))
    entry = builder.build(plan.kernel, plan.config, plan.arch)
    recorded: list[vgpu.Launch] = []
    function = vgpu.record(entry.so, function=entry.function)
    start = launch.Launch(lambda *a: recorded.extend(function(*a)), entry.arguments, plan.scalars)

    q, v = operands.q, operands.v
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    rows = q.shape[:-1]
    lse = q.new_empty(*rows[:-2], rows[-1], rows[-2], dtype=torch.float32)
    start(operands, out, lse)
    (one,) = recorded
    assert one.kernel == entry.symbol
    report = vgpu.Machine(arch="sm_90a").run(one)
    assert report.ok, str(report)

    expected, expected_lse = portable.forward(
        replace(problem, device_type="cpu"), operands, portable.Numerics()
    )
    assert (out.float() - expected.float()).abs().max() < 0.02
    torch.testing.assert_close(lse, expected_lse, atol=0.01, rtol=0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_dense_causal_grouped_heads():
    problem = Problem(torch.bfloat16, "cuda", 64, 64, 4, 2, 1, 150, 150, causal=True, needs_lse=True)
    # Slices of one projection, as models make them: strides that no copy is needed for.
    qkv = normal(1, 150, 8, 64)
    q, k, v = qkv.split([4, 2, 2], dim=2)
    run(problem, Operands(q, k, v, softmax_scale=0.125))


def test_packed_window_sink_softcap():
    problem = Problem(
        torch.bfloat16,
        "cuda",
        64,
        64,
        2,
        2,
        2,
        100,
        100,
        packed_q=True,
        packed_k=True,
        causal=True,
        window_left=50,
        softcap=15.0,
        has_sink=True,
        needs_grad=True,
    )
    cu_seqlens = torch.tensor([0, 100, 130], dtype=torch.int32)
    operands = Operands(
        *(normal(130, 2, 64) for _ in range(3)),
        sink=normal(2),
        softmax_scale=0.2,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
    )
    run(problem, operands)


def drawn(seed: int) -> tuple[Problem, Operands]:
    """A call with a random choice of everything the Hopper kernel takes."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    dim, dim_v = rng.choice([(64, 64), (64, 64), (40, 72), (128, 128), (192, 128), (256, 256)])
    heads_kv, group = rng.choice([(1, 1), (2, 1), (2, 2), (1, 4), (1, 8)])
    batch = rng.choice([1, 2, 3])
    packed = rng.random() < 0.4
    lengths_q = [rng.choice([1, 5, 63, 130, 200]) for _ in range(batch)]
    lengths_k = [rng.choice([3, 64, 129, 250]) for _ in range(batch)]
    if not packed:
        lengths_q, lengths_k = lengths_q[:1] * batch, lengths_k[:1] * batch
    used_k = rng.random() < 0.4
    problem = Problem(
        dtype,
        "cuda",
        dim,
        dim_v,
        heads_kv * group,
        heads_kv,
        batch,
        max(lengths_q),
        max(lengths_k),
        packed_q=packed,
        packed_k=packed,
        has_seqused_k=used_k,
        causal=rng.random() < 0.5,
        window_left=rng.choice([None, None, 0, 30, 100]),
        window_right=rng.choice([None, None, 10]),
        softcap=rng.choice([0.0, 0.0, 20.0]),
        has_sink=rng.random() < 0.3,
        needs_lse=True,
    )

    def tensor(lengths: list[int], heads: int, width: int) -> torch.Tensor:
        rows = (sum(lengths),) if packed else (batch, lengths[0])
        return torch.randn(*rows, heads, width).to(dtype)

    def offsets(lengths: list[int]) -> torch.Tensor | None:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) if packed else None

    operands = Operands(
        tensor(lengths_q, problem.nheads_q, dim),
        tensor(lengths_k, heads_kv, dim),
        tensor(lengths_k, heads_kv, dim_v),
        sink=torch.randn(problem.nheads_q) if problem.has_sink else None,
        softmax_scale=rng.choice([dim**-0.5, 0.3]),
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        seqused_k=torch.tensor([rng.randint(0, n) for n in lengths_k], dtype=torch.int32) if used_k else None,
    )
    return problem, operands


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_drawn_calls(seed):
    torch.manual_seed(seed)
    run(*drawn(seed))
