"""The numerics of the portable path: rescaling by threshold, and exp2 by polynomial."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from coflash import flash_attn_func
from coflash.exp2 import COEFFICIENTS, DEPRESSED
from coflash.operands import Operands
from coflash.portable import Numerics, forward, schedule, using
from coflash.portable.exp2 import exp2_polynomial
from coflash.portable.softmax import OnlineSoftmax
from coflash.problem import Problem

# Largest relative error of each polynomial over [-126, 0] (tools/exp2_minimax.py, every float32 there).
MEASURED = {3: 8.57e-5, 4: 3.00e-6, 5: 1.78e-7}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row is long enough for its maximum to rise many times."""
    monkeypatch.setattr(schedule, "SMALLEST_TILE", 16)
    monkeypatch.setattr(schedule, "TILE_SCORES", 1024)


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_exp2_over_its_range(degree: int) -> None:
    """Every 257th float32: all binades, and all fractions to 16 bits in the large ones."""
    last = torch.tensor(126.0).view(torch.int32).item()
    x = -torch.arange(0, int(last) + 1, 257, dtype=torch.int32).view(torch.float32)
    error = exp2_polynomial(x, degree).double() / torch.exp2(x.double()) - 1
    assert error.abs().max() <= MEASURED[degree]
    whole = -torch.arange(0, 127, dtype=torch.float32)
    assert torch.equal(exp2_polynomial(whole, degree), torch.exp2(whole))


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_exp2_outside(degree: int) -> None:
    x = torch.tensor([-math.inf, -1e30, -126.5, math.nan, 3.0])
    found = exp2_polynomial(x, degree)
    assert found[:3].tolist() == [0, 0, 0] and found[3].isnan() and found[4] == 8


def cubic_of_kernels(x: torch.Tensor) -> torch.Tensor:
    """2**x by `DEPRESSED`, each step rounded once to float32 as a multiply-add does."""
    c = DEPRESSED

    def rounded(exact: torch.Tensor) -> torch.Tensor:
        return exact.float().double()

    y = rounded((x.double() - c.lowest) / c.span).clamp(0.0, 1.0)
    t = torch.floor(c.span * y + c.magic)
    s = rounded(c.q * c.span * y + rounded(c.shift - c.q * t))
    p = rounded(rounded(s * s + c.square) * s + c.constant)
    bits = t.float().view(torch.int32).long() * 2**23 + p.float().view(torch.int32)
    return (bits << 32 >> 32).int().view(torch.float32)  # the low 32 bits


def test_cubic_of_kernels() -> None:
    lowest, highest = DEPRESSED.lowest, DEPRESSED.lowest + DEPRESSED.span
    x = torch.linspace(lowest, highest - 1e-3, 2_000_001)
    error = cubic_of_kernels(x).double() / torch.exp2(x.double()) - 1
    assert error.abs().max() <= 9.5e-5
    whole = torch.arange(lowest, highest)
    assert torch.allclose(cubic_of_kernels(whole), torch.exp2(whole), rtol=1e-5, atol=0)
    outside = cubic_of_kernels(torch.tensor([-math.inf, -1e30, -101.0, 30.0, 1e30, math.inf]))
    assert torch.allclose(outside.log2(), torch.tensor([lowest] * 3 + [highest] * 3), atol=1e-4)


def test_numbers_of_that_cubic_are_float32() -> None:
    numbers = torch.tensor(dataclasses.astuple(DEPRESSED), dtype=torch.float64)
    assert numbers.equal(numbers.float().double())
    assert int(DEPRESSED.magic) % 512 == int(DEPRESSED.lowest) % 512


def test_coefficients_are_float32() -> None:
    for degree, table in COEFFICIENTS.items():
        assert len(table) == degree + 1 and table[0] == 1.0
        assert torch.tensor(table, dtype=torch.float64).equal(
            torch.tensor(table, dtype=torch.float32).double()
        )


def test_rescale_only_past_the_threshold() -> None:
    softmax = OnlineSoftmax(torch.Size((1, 1)), torch.zeros(1), math.log(2), None, Numerics(8.0))
    _, factor = softmax.update(torch.tensor([[[1.0, 2.0]]]))
    assert factor is not None and softmax.reference.item() == 2
    weights, factor = softmax.update(torch.tensor([[[10.0]]]))  # 8 above: held
    assert factor is None and softmax.reference.item() == 2 and weights.item() == 256
    _, factor = softmax.update(torch.tensor([[[10.5]]]))
    assert factor is not None and softmax.reference.item() == 10.5
    assert softmax.lse(torch.float64).item() == pytest.approx(math.log(2 + 4 + 2**10 + 2**10.5), rel=1e-6)


NOISE = 0.2 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
TILES = torch.arange(256.0) / 16 * math.log(2)  # rises by one log2 unit a tile

ADVERSARIAL = {
    "rising by 1 a tile": TILES + NOISE,
    "rising by 7.9 a tile": 7.9 * TILES + NOISE / 4,  # the reference lags by almost tau in every tile
    "rising by 20 a tile": 20 * TILES + NOISE,
    "falling": 7.9 * TILES.flip(0) + NOISE,
    "one huge, last": NOISE.index_fill(1, torch.tensor([255]), 60.0),
    "one huge, first": NOISE.index_fill(1, torch.tensor([0]), 60.0),
    "all equal": torch.full((256, 256), 5.0),
    "all near -65504": -65504.0 + 5 * NOISE,
    "random": 20 * NOISE,
}


def errors(scores: Tensor, dtype: torch.dtype, numerics: Numerics) -> Tensor:
    """Absolute errors of the output for given scores: q is a unit matrix, so k decides the scores."""
    rows, columns = scores.shape
    q = torch.eye(rows, dtype=dtype)[None, :, None]
    k = scores.T.to(dtype)[None, :, None].contiguous()
    v = torch.randn(1, columns, 1, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    problem = Problem(
        dtype=dtype,
        device_type="cpu",
        head_dim=rows,
        head_dim_v=64,
        nheads_q=1,
        nheads_kv=1,
        batch=1,
        seqlen_q=rows,
        seqlen_k=columns,
    )
    out, _ = forward(problem, Operands(q, k, v), numerics)
    truth = torch.softmax(k[0, :, 0].double().T, -1) @ v[0, :, 0].double()
    return (out[0, :, 0].double() - truth).abs()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_held_reference_on_adversarial_scores(name: str, dtype: torch.dtype) -> None:
    """tau = 8 against rescaling every time: the rule's mean, and no error beyond a rounding of the result."""
    classic = errors(ADVERSARIAL[name], dtype, Numerics(rescale_threshold=0.0))
    ours = errors(ADVERSARIAL[name], dtype, Numerics())
    eps = torch.finfo(dtype).eps
    assert ours.mean() <= 1.25 * classic.mean() + 0.01 * eps
    assert ours.max() <= 2 * classic.max() + eps


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_polynomial_in_attention(degree: int) -> None:
    """With 16-bit inputs degree 3 is lost in the rounding of the weights; float32 shows each degree's error."""
    scores = ADVERSARIAL["random"]
    half = torch.bfloat16
    library = errors(scores, half, Numerics()).mean()
    assert errors(scores, half, Numerics(exp2_degree=degree)).mean() <= 1.25 * library
    exact = errors(scores, torch.float32, Numerics()).max()
    assert errors(scores, torch.float32, Numerics(exp2_degree=degree)).max() <= exact + 8 * MEASURED[degree]


def test_using_chooses_for_calls_within() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8, requires_grad=True) for _ in range(3))

    def results() -> tuple[Tensor, ...]:
        out = flash_attn_func(q, k, v)
        assert isinstance(out, Tensor)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    before = results()
    with using(Numerics(exp2_degree=3)):
        coarse = results()
    for a, b, c in zip(before, coarse, results(), strict=True):
        assert torch.equal(a, c) and not torch.equal(a, b)
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)
