"""The Blackwell cost model: fitted to four published figures of flash-attn-4 with its counts, held to the others."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from coflash.kernels.sm100.config import choose
from coflash.planning import blackwell
from coflash.planning.device import CHIPS, DeviceInfo
from coflash.problem import Problem

B200 = DeviceInfo("sm_100a", 148, "B200")
CLOCK = CHIPS["sm_100a"].clock_ghz * 1e9
TOKENS, HEADS, DIM = 32768, 16, 128
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
# Published TFLOP/s of flash-attn-4 (arXiv 2603.05451).
PUBLISHED = {
    "full": dict(zip(LENGTHS, (1355, 1468, 1532, 1579, 1601, 1613), strict=True)),
    "causal": dict(zip(LENGTHS, (744, 1053, 1279, 1426, 1526, 1576), strict=True)),
}
FITTED = (1024, 32768)  # two of either mask
# Counted in the machine code of flash-attn-4 4.0.0b36, for a row of warps and a block: exponentials of a row; issue
# slots, clocks of multiply-adds, instructions of the other pipe (softmax and correction warps).
PEER = {"full": (105, 552.5, 455, 166), "causal": (113, 524, 402, 159), "masked": (113, 699, 402, 328)}
LONE_ITEM_CLOCKS = 10090.0  # the third constant: its causal forward launches a CTA for each item


def peer_units(exponentials: float, slots: float, multiply_adds: float, integer: float) -> tuple[float, ...]:
    return (2048, 16 * exponentials, 2 * slots, 2 * multiply_adds, 4 * integer)


def peer_block(kind: str, overlap: float) -> float:
    return blackwell.together(peer_units(*PEER[kind]), overlap)


def peer_tflops(mask: str, length: int, overlap: float, persistent: float, lone: float) -> float:
    heads = HEADS * TOKENS // length
    if mask == "full":  # CTA pairs of 512 rows, persistent
        items = length // 512 * heads
        clocks = math.ceil(items / 74) * (length // 128 * peer_block("full", overlap) + persistent)
    else:  # 256 rows a CTA, both tiles as far as the longer one; the last two blocks masked
        rows = range(length // 256)
        clocks = sum(
            2 * i * peer_block("causal", overlap) + 2 * peer_block("masked", overlap) + lone for i in rows
        )
        clocks *= heads / 148
    return flop(mask, length) / (clocks / CLOCK) / 1e12


def flop(mask: str, length: int) -> float:
    return 4 * HEADS * DIM * TOKENS * length / (2 if mask == "causal" else 1)


def ours_tflops(mask: str, length: int) -> float:
    causal = mask == "causal"
    problem = Problem(
        torch.bfloat16, "cuda", DIM, DIM, HEADS, HEADS, TOKENS // length, length, length, causal=causal
    )
    config = choose("sm_100a", dtype="bf16", head_dim=DIM, head_dim_v=DIM, bounded_right=causal)
    seconds, _ = blackwell.seconds(problem, config, B200)
    return flop(mask, length) / seconds / 1e12


def peer_share(share: float) -> tuple[float, ...]:
    """flash-attn-4's block with `share` of 16 exponentials by polynomial, 3 as published: for each pair of them 8 slots
    more, 16 clocks of multiply-adds (4 of them integer ones), and 2 clamps."""
    pairs = 4 * (share - 3)
    exponentials, slots, multiply_adds, integer = PEER["full"]
    return peer_units(
        exponentials - 2 * pairs, slots + 8 * pairs, multiply_adds + 16 * pairs, integer + 2 * pairs
    )


def miss(mask: str, length: int, constants: tuple[float, float, float]) -> float:
    return peer_tflops(mask, length, *constants) / PUBLISHED[mask][length] - 1


CONSTANTS = (blackwell.OVERLAP, blackwell.ITEM_CLOCKS, LONE_ITEM_CLOCKS)


def test_constants_are_the_fit_to_four_points() -> None:
    def loss(constants: tuple[float, float, float]) -> float:
        return sum(miss(mask, length, constants) ** 2 for mask in PUBLISHED for length in FITTED)

    for i, step in enumerate((0.06, 1000.0, 1500.0)):
        for sign in (-1, 1):
            moved = list(CONSTANTS)
            moved[i] += sign * step
            assert loss(tuple(moved)) > loss(CONSTANTS)


@pytest.mark.parametrize("mask", PUBLISHED)
@pytest.mark.parametrize("length", [n for n in LENGTHS if n not in FITTED])
def test_the_held_out_points_are_met_within_10_percent(mask: str, length: int) -> None:
    assert abs(miss(mask, length, CONSTANTS)) < 0.10


@pytest.mark.parametrize("mask", PUBLISHED)
@pytest.mark.parametrize("length", LENGTHS)
def test_ours_is_predicted_5_percent_faster_than_theirs(mask: str, length: int) -> None:
    assert ours_tflops(mask, length) >= 1.05 * peer_tflops(mask, length, *CONSTANTS)


def test_the_model_agrees_with_flash_attn_4s_choice_of_its_share() -> None:
    best = min(range(12), key=lambda share: blackwell.together(peer_share(share)))
    assert abs(best - 3) <= 1  # of 16; published: tuned on the chip
    # Were there no pipes, only issue slots, it would gain from twice the share.
    assert min(range(12), key=lambda share: blackwell.together(peer_share(share)[:3], 2.14)) >= 6


def test_the_prediction_does_not_hang_on_the_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores, exponentials and issue slots alone, fitted to the same four points."""
    constants = overlap, item, _ = (2.14, 4600.0, 10260.0)
    units, together = blackwell.units, blackwell.together

    def without(*args, **options) -> dict[str, float]:
        found = units(*args, **options)
        return {name: clocks for name, clocks in found.items() if name not in ("multiply-adds", "integer")}

    def block(kind: str, overlap: float) -> float:
        return together(peer_units(*PEER[kind])[:3], overlap)

    monkeypatch.setattr(blackwell, "units", without)
    monkeypatch.setattr(blackwell, "together", lambda clocks: together(clocks, overlap))
    monkeypatch.setattr(blackwell, "ITEM_CLOCKS", item)
    monkeypatch.setattr(sys.modules[__name__], "peer_block", block)
    for mask in PUBLISHED:
        for length in LENGTHS:
            assert abs(miss(mask, length, constants)) < 0.10
            assert ours_tflops(mask, length) >= 1.05 * peer_tflops(mask, length, *constants)
