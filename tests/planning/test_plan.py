"""Planning: which path, which config, and refusals that say what would work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coflash import cli
from coflash.planning import DeviceInfo, choices, plan, presets, typical
from coflash.planning.explain import explain
from coflash.problem import Problem

H200 = typical("sm_90a")
BASE = Problem(torch.bfloat16, "cuda", 128, 128, 16, 16, 2, 4096, 4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_has_a_config_on_hopper(dim, dtype):
    for dim_v in {dim, 128 if dim == 192 else dim}:
        for more in ({}, {"causal": True}, {"window_left": 128, "softcap": 30.0, "needs_grad": True}):
            problem = replace(BASE, dtype=dtype, head_dim=dim, head_dim_v=dim_v, **more)
            config = plan(problem, H200).config  # its constructor proves that it fits
            assert (config.head_dim, config.head_dim_v) == (dim, dim_v)
            assert config.softmax == ("held" if dtype == torch.bfloat16 else "online")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 72)])
def test_blackwell_has_configs(arch, dims):
    problem = replace(BASE, head_dim=dims[0], head_dim_v=dims[1], causal=True)
    chosen = plan(problem, typical(arch), backend="kernel")
    assert chosen.kernel == "sm100.forward" and chosen.arch == arch
    assert (chosen.config.head_dim, chosen.config.head_dim_v) == dims


def test_blackwells_pairs_and_scheduler_follow_the_lengths():
    def config(**more):
        return plan(replace(BASE, batch=8, **more), typical("sm_100a"), backend="kernel").config

    assert (config().ctas, config().dynamic) == (2, False)
    assert config(causal=True).dynamic and config(packed_q=True, packed_k=True).dynamic
    assert config(seqlen_q=256).ctas == 1  # half of a pair would be empty
    assert config(nheads_q=1, nheads_kv=1).ctas == 1  # too few pairs for the chip
    assert config(head_dim=256, head_dim_v=256, seqlen_q=256).ctas == 2  # no room in one CTA


def test_what_a_config_computes_follows_the_problem():
    problem = replace(
        BASE,
        nheads_kv=4,
        packed_q=True,
        packed_k=True,
        has_seqused_k=True,
        causal=True,
        window_left=100,
        softcap=20.0,
        has_sink=True,
        needs_grad=True,
    )
    chosen = plan(problem, H200)
    c = chosen.config
    assert (c.packed_q, c.packed_k, c.seqused_q, c.seqused_k) == (True, True, False, True)
    assert (c.bounded_left, c.bounded_right, c.softcap, c.sink, c.lse) == (True,) * 5
    assert chosen.scalars["window_left"] == 100 and chosen.scalars["window_right"] == 0
    assert chosen.scalars["softcap"] == 20.0 and chosen.scalars["num_blocks"] == H200.num_sms


def test_what_varies_from_call_to_call_compiles_nothing_new():
    calls = [
        replace(BASE, batch=b, seqlen_q=n, seqlen_k=n + 1, nheads_q=h, nheads_kv=h, causal=True, softcap=cap)
        for b, n, h, cap in ((1, 512, 8, 5.0), (7, 100, 32, 50.0), (1, 131072, 1, 1.0))
    ]
    assert len({plan(call, H200).config for call in calls}) == 1


def test_a_window_of_zero_width_is_not_causal_alone():
    assert plan(replace(BASE, window_left=0, window_right=0), H200).scalars["window_left"] == 0
    assert "window_left" not in plan(replace(BASE, causal=True), H200).scalars


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "packed"),
    [
        ((64, 8), 1, 8),
        ((64, 8), 4, 8),
        ((64, 8), 4096, 1),
        ((64, 8), 8192, 1),
        ((64, 8), 30, 8),
        ((64, 8), 100, 1),
        ((16, 16), 1, 1),
        ((48, 4), 2, 12),
        ((44, 4), 2, 1),  # 11 heads fit no whole rows of the swizzle
        ((130, 2), 1, 1),
    ],
)
def test_heads_share_a_tile_where_queries_are_few(heads, seqlen_q, packed):
    problem = replace(BASE, nheads_q=heads[0], nheads_kv=heads[1], seqlen_q=seqlen_q)
    assert plan(problem, H200).config.pack_heads == packed


REFUSED = {
    "dtype float32": {"dtype": torch.float32},
    "head_dim=100": {"head_dim": 100},
    "head_dim_v=264": {"head_dim_v": 264},
    "page_table": {"page_size": 16, "has_seqused_k": True},
    "cache_batch_idx": {"has_cache_batch_idx": True},
    "cache_leftpad": {"has_leftpad": True},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s},
    "mask_mod": {"mask_mod": lambda b, h, q, k: q >= k},
    "alibi_slopes": {"has_alibi": True},
    "dropout_p": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_cannot_do_is_named(name, arch):
    problem = replace(BASE, **REFUSED[name])
    with pytest.raises(NotImplementedError) as refusal:
        plan(problem, typical(arch), backend="kernel")
    assert name in str(refusal.value) and arch in str(refusal.value)
    assert 'backend="portable"' in str(refusal.value)
    assert plan(problem, typical(arch), backend="portable").path == "portable"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_pair_of_head_dims_is_planned_or_refused_by_name(arch):
    refused = 0
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            problem = replace(BASE, head_dim=dim, head_dim_v=dim_v, causal=True, needs_grad=True)
            try:
                config = plan(problem, typical(arch), backend="kernel").config
            except NotImplementedError as refusal:
                refused += 1
                assert f"head_dim={dim}" in str(refusal) and f"head_dim_v={dim_v}" in str(refusal)
            else:
                assert (config.head_dim, config.head_dim_v) == (dim, dim_v)
    assert refused <= 64


def test_on_hopper_auto_refuses_too_and_is_never_quietly_slow():
    with pytest.raises(NotImplementedError, match="dropout_p"):
        plan(replace(BASE, dropout_p=0.1), H200)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (DeviceInfo("sm_80", 108, "A100"), "sm_80 has no kernel"),
        (typical("sm_100a"), "on request only"),
        (None, "no kernel"),
    ],
)
def test_other_devices_take_the_portable_path_and_say_so(device, says):
    chosen = plan(BASE, device)
    assert chosen.path == "portable" and says in chosen.reason
    assert chosen.cost is None


def test_a_kernel_demanded_where_there_is_none():
    with pytest.raises(NotImplementedError, match="sm_80.*portable"):
        plan(BASE, DeviceInfo("sm_80", 108, "A100"), backend="kernel")


def test_overrides_for_one_call():
    assert plan(BASE, H200, {"tile_n": 64, "k_stages": 3}).config.tile_n == 64
    assert plan(BASE, H200).config.tile_n != 64
    with pytest.raises(ValueError, match="kernel_options tile_k: can override .*tile_n"):
        plan(BASE, H200, {"tile_k": 64})
    with pytest.raises(ValueError, match="head_dim"):  # what is computed isn't up for experiments
        plan(BASE, H200, {"head_dim": 64})
    with pytest.raises(ValueError, match="shared memory"):
        plan(BASE, H200, {"k_stages": 9})


def test_plans_are_hashable_and_equal():
    assert plan(BASE, H200) == plan(BASE, H200)
    assert hash(plan(BASE, H200)) == hash(plan(BASE, H200))


def test_every_row_of_the_table_is_used():
    used = set()
    for dim in range(8, 257, 8):
        for dim_v in {dim, 128 if dim == 192 else dim, 256}:
            for masked in (False, True):
                problem = replace(BASE, head_dim=dim, head_dim_v=dim_v, causal=masked)
                used.add(id(choices._first(choices.SM90_FORWARD, problem, masked)))
    assert used == {id(choice.fields) for choice in choices.SM90_FORWARD}


@pytest.mark.parametrize("name", presets.NAMES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_presets_can_be_planned(name, arch):
    configs = {plan(p, typical(arch), backend="kernel").config for p in presets.problems(name)}
    assert len(configs) >= 6


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_preset_holds_the_kernels_of_every_length(name):
    """Lengths, batch and the number of heads vary from call to call; a folder without a compiler must hold them all."""
    held = {plan(p, H200).config for p in presets.problems(name)}
    lengths = [1, 3, 17, 64, 100, 300, 1023, 1024, 2048, 2049, 6000, 9000, 16384, 65536]
    for call in {replace(p, seqlen_q=1, seqlen_k=1): None for p in presets.problems(name)}:
        for seqlen_q in lengths:
            for seqlen_k in lengths:
                for batch, times in ((1, 1), (64, 3)):
                    varied = replace(
                        call,
                        batch=batch,
                        seqlen_q=seqlen_q,
                        seqlen_k=seqlen_k,
                        nheads_q=call.nheads_q * times,
                        nheads_kv=call.nheads_kv * times,
                    )
                    assert plan(varied, H200).config in held, varied


def test_an_unknown_preset():
    with pytest.raises(ValueError, match="minimal, common"):
        list(presets.problems("everything"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_explain(arch, capsys):
    assert cli.main(["explain", "--arch", arch, "--causal", "--seqlen", "8192", "--heads-kv", "4"]) == 0
    said = capsys.readouterr().out
    for word in ("kernel sm", "tile", "stages", "registers", "shared", "scheduler", "<- binds", "predicted"):
        assert word in said, word
    assert "16/4 heads" in said and "8192 queries x 8192 keys, causal" in said


def test_explain_says_what_is_measured(monkeypatch):
    from coflash.planning import explain as module

    chosen = plan(BASE, H200)
    monkeypatch.setattr(module, "lookup", lambda problem, chip: 700.4 if problem == BASE else None)
    assert "measured   700 TFLOP/s on H200" in explain(chosen)
    assert "expected" in explain(chosen) and "predicted" in explain(chosen, predicted=True)


def test_explain_with_overrides_and_refusals(capsys):
    assert cli.main(["explain", "--arch", "sm_90a", "--set", "tile_n=64", "--set", "softmax=online"]) == 0
    said = capsys.readouterr().out
    assert "128 rows x 64 keys" in said and "running maximum" in said
    assert cli.main(["explain", "--arch", "sm_90a", "--head-dim", "100"]) == 1
    assert "head_dim=100" in capsys.readouterr().out
    assert cli.main(["explain", "--arch", "sm_90a", "--set", "tile_n=1000"]) == 1
    with pytest.raises(SystemExit, match="FIELD=VALUE"):
        cli.main(["explain", "--arch", "sm_90a", "--set", "tile_n"])


def test_compile_lists_what_it_would_build(capsys):
    command = ["compile", "--arch", "sm_90a", "--arch", "sm_100a", "--preset", "minimal", "--dry-run"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 12 <= len(lines) <= 24 and len(lines) == len(set(lines))
    assert {line.split()[0] for line in lines} == {"sm_90a", "sm_100a"}
    assert cli.main(["compile", "--arch", "sm_90a", "--dtype", "fp32", "--dry-run"]) == 1
