"""The cost model: counts by hand, counts of tiles by brute force, and the figures it was fitted to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coflash.kernels.sm90.config import ForwardConfig
from coflash.planning import blackwell, cost, hopper, plan, tiles, typical
from coflash.planning.device import CHIPS
from coflash.planning.tiles import Row
from coflash.problem import Problem

H200 = typical("sm_90a")
BASE = Problem(torch.bfloat16, "cuda", 128, 128, 16, 16, 2, 16384, 16384)


def visible(problem: Problem) -> torch.Tensor:
    left, right = problem.window
    i = torch.arange(problem.seqlen_q)[:, None] + problem.seqlen_k - problem.seqlen_q
    j = torch.arange(problem.seqlen_k)[None]
    seen = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


side = st.none() | st.integers(0, 40)


@given(
    seqlen_q=st.integers(1, 50),
    seqlen_k=st.integers(1, 50),
    causal=st.booleans(),
    left=side,
    right=side,
    positions=st.sampled_from([4, 7, 16]),
    keys=st.sampled_from([4, 8]),
)
def test_tiles_by_brute_force(seqlen_q, seqlen_k, causal, left, right, positions, keys):
    problem = replace(
        BASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_left=left, window_right=right
    )
    seen = visible(problem)
    assert tiles.visible_pairs(problem) == int(seen.sum())
    expected: Counter[Row] = Counter()
    for part in seen.split(positions):
        columns = part.any(0).nonzero().flatten()
        if not len(columns):
            expected[Row(0, 0)] += 1
            continue
        first, last = int(columns[0]) // keys, int(columns[-1]) // keys
        blocks = [part[:, n * keys : (n + 1) * keys] for n in range(first, last + 1)]
        # A block that reaches past the last key needs a mask as well.
        masked = sum(not block.all() or block.shape[1] < keys for block in blocks)
        expected[Row(len(blocks), masked)] += 1
    assert tiles.rows(problem, positions, keys) == expected


@pytest.mark.parametrize(
    ("config", "clocks"),
    [
        # Tensor cores, exponentials, shared memory: of hopper's published unit rates.
        (ForwardConfig("bf16", 64, 64, warpgroups=3, tile_n=128), (1536, 1536, 1216)),
        (ForwardConfig("bf16", 128, 128, warpgroups=2, tile_n=128), (2048, 1024, 1792)),
        (ForwardConfig("bf16", 128, 128, warpgroups=2, tile_n=176), (2816, 1408, 2368)),
        (ForwardConfig("bf16", 256, 256, warpgroups=2, tile_n=80), (2560, 640, 2432)),
    ],
)
def test_units_of_a_block_by_hand(config, clocks):
    units = hopper.units(config, CHIPS["sm_90a"], masked=False)
    assert (units["tensor cores"], units["exponentials"], units["shared memory"]) == pytest.approx(clocks)


def test_units_of_a_blackwell_block_by_hand():
    from coflash.kernels.sm100.config import ForwardConfig

    units = blackwell.units(ForwardConfig("bf16", 128, 128, polynomial=0), CHIPS["sm_100a"], masked=False)
    assert units["tensor cores"] == units["exponentials"] == 2048
    assert units["shared memory"] == 1536 + 512  # operands, and K and V as they arrive


def test_each_cost_of_a_block_counts():
    base = ForwardConfig("bf16", 128, 128)

    def units(config, masked=False):
        return hopper.units(config, CHIPS["sm_90a"], masked=masked)

    plain = units(base)["issue"]
    assert units(base, masked=True)["issue"] > plain
    assert units(replace(base, softmax="online"))["issue"] > plain
    assert units(replace(base, softcap=True))["exponentials"] == 2 * units(base)["exponentials"]


def test_work_is_counted_once():
    full = cost.estimate(BASE, ForwardConfig("bf16", 128, 128), H200)
    assert full.flop == 4 * 2 * 16 * 16384**2 * 128
    assert full.tiles == 2 * 16 * 128
    config = ForwardConfig("bf16", 128, 128, bounded_right=True)
    causal = cost.estimate(replace(BASE, causal=True), config, H200)
    assert causal.flop == pytest.approx(full.flop / 2, rel=1e-3)
    assert causal.seconds == pytest.approx(full.seconds / 2, rel=0.1)
    assert full.binds == "tensor cores"


def test_few_tiles_leave_multiprocessors_idle():
    config = ForwardConfig("bf16", 128, 128)
    one = cost.estimate(replace(BASE, batch=1, nheads_q=1, nheads_kv=1, seqlen_q=128), config, H200)
    many = cost.estimate(replace(BASE, batch=20, nheads_q=1, nheads_kv=1, seqlen_q=128), config, H200)
    assert one.tiles == 1 and many.tiles == 20
    assert many.seconds == pytest.approx(one.seconds, rel=0.05)


def test_decoding_is_bound_by_memory():
    problem = replace(BASE, batch=128, nheads_q=64, nheads_kv=8, seqlen_q=1, seqlen_k=8192)
    config = ForwardConfig("bf16", 128, 128, pack_heads=8)
    read = 2 * 2 * 128 * 8 * 8192 * 128
    assert cost.estimate(problem, config, H200).seconds >= read / 4.2e12


def test_no_queries_cost_no_tiles():
    estimate = cost.estimate(replace(BASE, batch=0), ForwardConfig("bf16", 128, 128), H200)
    assert estimate.tiles == 0 and estimate.flop == 0


# TFLOP/s on one H200, in one run of `coflash bench`: 1k, 4k and 16k.
MEASURED = {
    (64, False): (518, 555, 573),
    (128, False): (698, 782, 781),
    (256, False): (728, 781, 765),
    (64, True): (441, 589, 587),
    (128, True): (521, 729, 766),
    (256, True): (579, 742, 757),
}


@pytest.mark.parametrize(("dim", "causal"), MEASURED)
def test_the_figures_it_was_fitted_to(dim, causal):
    heads = 2048 // dim
    for seqlen, measured in zip((1024, 4096, 16384), MEASURED[dim, causal], strict=True):
        problem = replace(
            BASE,
            head_dim=dim,
            head_dim_v=dim,
            nheads_q=heads,
            nheads_kv=heads,
            batch=32768 // seqlen,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            causal=causal,
        )
        cost = plan(problem, H200).cost
        assert cost is not None and cost.tflops == pytest.approx(measured, rel=0.15)
