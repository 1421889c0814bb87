"""Every option of the Blackwell forward at small shapes, on the virtual GPU: exact enough, and without a finding."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from tests.kernels.sm100.calls import EVERY_MODE, Case, verify  # noqa: E402

from coflash.vgpu.check import schedules  # noqa: E402

D128 = {"head_dim": 128, "head_dim_v": 128}
D256 = {"head_dim": 256, "head_dim_v": 256}

CASES = {
    "d128": Case((300, 300), (400, 400), options=D128),
    "d64 fp16, grouped heads": Case((200,), (300,), heads_q=4, heads_kv=2, options={"dtype": "fp16"}),
    "causal, longer queries: rows and tiles that see nothing": Case(
        (700,), (300,), heads_q=2, heads_kv=2, window_right=0, options=D128
    ),
    "window, softcap, sink": Case(
        (300,), (500,), 4, 2, window_left=70, window_right=5, softcap=5.0, options={"sink": True}
    ),
    "packed, causal, empty sequences": Case(
        (5, 130, 0, 300, 64),
        (7, 200, 10, 300, 0),
        window_right=0,
        options={"packed_q": True, "packed_k": True},
    ),
    "seqused, NaN beyond": Case(
        (200, 0, 140), (200, 300, 0), slack=100, options={"seqused_q": True, "seqused_k": True}
    ),
    "packed heads, one query": Case((1, 1), (300, 77), 16, 2, options={"pack_heads": 8, "seqused_k": True}),
    "d72, v40": Case((130,), (200,), options={"head_dim": 72, "head_dim_v": 40}),
    "d192, v128": Case((260,), (300,), window_right=0, options={"head_dim": 192, "head_dim_v": 128}),
    "d232, v96": Case((140,), (200,), options={"head_dim": 232, "head_dim_v": 96}),
    "d256, one Q tile": Case((200,), (600,), window_right=0, inputs="rising 10", options={**D256, "ctas": 1}),
    "d256, pair": Case((300,), (300,), options=D256),
    "pair, packed, causal": Case(
        (5, 600, 130),
        (7, 600, 200),
        window_right=0,
        options={**D128, "ctas": 2, "packed_q": True, "packed_k": True},
    ),
    "launch control": Case((700,), (300,), window_right=0, options={**D128, "dynamic": True}),
    "launch control, pair, packed": Case(
        (600, 0, 3, 200),
        (300, 4, 9, 200),
        options={"ctas": 2, "dynamic": True, "packed_q": True, "packed_k": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_option(name: str) -> None:
    verify(CASES[name], blocks=3)


@pytest.mark.parametrize(
    "inputs", ["rising 3", "rising 40", "rising 120", "late", "late 200", "huge", "flat"]
)
def test_adversarial_scores(inputs: str) -> None:
    verify(Case((128,), (500,), inputs=inputs, options=D128), blocks=2)


def test_few_large_scores() -> None:
    """A held reference is tried, given up, and tried again."""
    verify(Case((256,), (1300,), scale=4 * 128**-0.5, options=D128), blocks=2)


@pytest.mark.parametrize("polynomial, dtype", [(16, "bf16"), (16, "fp16"), (0, "bf16")])
def test_either_unit_alone_is_exact_enough(polynomial: int, dtype: str) -> None:
    verify(Case((128,), (256,), options={"dtype": dtype}), polynomial=polynomial)


def test_every_completion_mode() -> None:
    verify(Case((300,), (300,), window_right=0, options=D128), tries=EVERY_MODE, blocks=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_seeds(name: str) -> None:
    verify(CASES[name], tries=schedules(20), blocks=2)
