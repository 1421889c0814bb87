"""Budgets of the Blackwell forward's config, and what the assembler says of the kernels."""

from __future__ import annotations

import pytest

from coflash.kernels.sm100.config import SHARED_BYTES, TENSOR_COLUMNS, ForwardConfig, choose

EVERYTHING = dict.fromkeys(("bounded_left", "bounded_right", "softcap", "packed_q", "packed_k"), True)
DIMS = [(d, d) for d in range(8, 257, 8)] + [(192, 128), (128, 64), (256, 64), (232, 96), (64, 256)]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_chosen_budgets_fit(dims: tuple[int, int], arch: str) -> None:
    config = choose(arch, dtype="bf16", head_dim=dims[0], head_dim_v=dims[1])
    assert config.shared_bytes <= SHARED_BYTES and config.tensor_columns <= TENSOR_COLUMNS
    assert config.kv_stages >= 2
    assert config.polynomial == 0 or arch == "sm_100a"
    ends = sorted(config.shared_offsets[n] for n in config.shared_parts())
    assert ends[0] == 0 and config.shared_offsets["kv"] % 1024 == 0


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"dtype": "fp32"}, "dtype"),
        ({"head_dim": 100}, "head_dim"),
        ({"head_dim_v": 264}, "head_dim_v"),
        ({"kv_stages": 7}, "shared memory"),
        ({"registers": (232, 96, 48)}, "registers"),
        ({"pack_heads": 3}, "pack_heads"),
        ({"ctas": 4}, "ctas"),
        ({"ctas": 2, "head_dim_v": 72}, "CTA pair"),
        ({"early_keys": 80}, "early_keys"),
        ({"polynomial": 17}, "polynomial"),
        ({"softmax": "late"}, "softmax"),
        ({"softmax": "held"}, "at once"),
        ({"softmax": "held", "early_keys": 128, "dtype": "fp16"}, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(changes: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ForwardConfig(**{"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, **changes})


@pytest.mark.parametrize(
    "arch, features",
    [
        ("sm_100a", {"head_dim": 128, "head_dim_v": 128}),
        ("sm_103a", {"head_dim": 128, "head_dim_v": 128, "bounded_right": True, "lse": True}),
        ("sm_100a", {"head_dim": 256, "head_dim_v": 256, "bounded_right": True, "lse": True}),
        ("sm_100a", {"head_dim": 128, "head_dim_v": 128, "sink": True, "lse": True, **EVERYTHING}),
        ("sm_100a", {"head_dim": 128, "head_dim_v": 128, "sink": True, "dtype": "fp16", **EVERYTHING}),
        ("sm_100a", {"head_dim": 128, "head_dim_v": 128, "seqused_k": True, "pack_heads": 8, "lse": True}),
    ],
    ids=str,
)
def test_no_spills_and_no_stack(arch: str, features: dict) -> None:
    pytest.importorskip("cutlass")
    from tests.kernels.sm100.calls import built

    entry = built(choose(arch, **{"dtype": "bf16", **features}), arch)
    (kernel,) = entry.resources
    assert (kernel["stack_bytes"], kernel["spill_stores"], kernel["spill_loads"]) == (0, 0, 0)
    assert kernel["registers"] == 128 and kernel["threads"] == 512


def test_the_pair_issues_pair_products() -> None:
    pytest.importorskip("cutlass")
    from tests.kernels.sm100.calls import built

    text = built(choose("sm_100a", dtype="bf16", head_dim=128, head_dim_v=128, ctas=2)).ptx.read_text()
    assert "tcgen05.mma.cta_group::2.kind::f16" in text and "cta_group::1" not in text


def test_a_config_has_the_barriers_that_it_uses() -> None:
    held = choose("sm_100a", dtype="bf16", head_dim=128, head_dim_v=128)
    online = choose("sm_100a", dtype="fp16", head_dim=128, head_dim_v=128)
    wide = choose("sm_100a", dtype="bf16", head_dim=256, head_dim_v=256)
    assert [c.softmax for c in (held, online, wide)] == ["held", "online", "online"]
    assert [c.barriers["p_early"] for c in (held, online, wide)] == [0, 2, 0]
    assert [c.barriers["o_done"] for c in (held, online, wide)] == [0, 0, 1]
