"""The Hopper forward on a GPU: drawn cases of every option, adversarial ones among them, and the same bits always."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from tests.kernels.sm90 import cases
from tests.kernels.sm90.cases import Case

from coflash import compiler
from coflash.kernels.sm90.config import ForwardConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

D128 = {"head_dim": 128, "head_dim_v": 128, "q_stages": 2}
D64 = {
    "warpgroups": 4,
    "tile_n": 64,
    "k_stages": 4,
    "v_stages": 4,
    "q_stages": 2,
    "v_ahead": 1,
    "in_place": False,
}
PACKED = {"packed_q": True, "packed_k": True}
KINDS: dict[str, dict[str, Any]] = {
    "d128 causal": {**D128, "bounded_right": True},
    "d64": D64,
    "d64, three warpgroups": {"warpgroups": 3, "k_stages": 3, "v_stages": 3, "q_stages": 2},
    "d64 causal": {**D64, "bounded_right": True},
    "d256 window": {
        "head_dim": 256, "head_dim_v": 256, "tile_n": 64, "v_stages": 3, "q_registers": 4,
        "bounded_left": True, "bounded_right": True
    },
    "d192, v128": {"head_dim": 192, "head_dim_v": 128, "bounded_right": True},
    "d192": {"head_dim": 192, "head_dim_v": 192, "tile_n": 96},
    "d96 softcap sink": {"head_dim": 96, "head_dim_v": 96, "softcap": True, "sink": True},
    "d72, v40, 5 packed heads": {"head_dim": 72, "head_dim_v": 40, "pack_heads": 5, "bounded_right": True},
    "8 packed heads": {**D128, "pack_heads": 8, "bounded_right": True},
    "packed causal": {**D128, **PACKED, "bounded_right": True},
    "packed": {**D64, **PACKED},
    "seqused": {**D128, "seqused_q": True, "seqused_k": True, "bounded_right": True},
    "window sink": {**D64, "sink": True, "bounded_left": True, "bounded_right": True},
    "fp16": {**D128, "dtype": "fp16", "bounded_right": True},
}  # fmt: skip
INPUTS = ["normal", "normal", "rising 3", "rising 30", "rising 300", "late 9", "late 60", "huge", "flat"]


@functools.cache
def function(config: ForwardConfig):
    entry = compiler.build("sm90.forward", config, "sm_90a")
    return compiler.load(entry), entry.arguments


def run(call: cases.Call) -> None:
    kernel, names = function(call.config)
    kernel(*(call.arguments[name] for name in names))
    torch.cuda.synchronize()


def draw(options: dict[str, Any], seed: int) -> Case:
    rnd = random.Random(seed)
    batch = rnd.randint(1, 4)

    def lengths(longest: int, uneven: bool, empty: bool) -> tuple[int, ...]:
        def one() -> int:
            return rnd.choice(
                [rnd.randint(1, longest), rnd.randint(1, 200), rnd.choice([1, 64, 128, 192, 256])]
            )

        if not uneven:
            return (one(),) * batch
        drawn = [one() for _ in range(batch)]
        return (*drawn, *((0,) if empty else ()))

    uneven = bool(options.get("packed_q") or options.get("seqused_q"))
    lengths_q = lengths(900, uneven, empty=bool(options.get("packed_q")))
    lengths_k = lengths(1500, uneven, empty=False) + ((rnd.randint(0, 9),) if options.get("packed_q") else ())
    heads_kv = rnd.randint(1, 3)
    group = options["pack_heads"] if "pack_heads" in options else rnd.choice([1, 1, 2, 4])
    inputs = rnd.choice(["normal", "huge", "flat"] if options.get("softcap") else INPUTS)
    if options.get("dtype") == "fp16" and inputs == "rising 300":
        inputs = "rising 30"  # the keys themselves would overflow
    static = {k: v for k, v in options.items() if k not in ("bounded_left", "bounded_right", "softcap")}
    return Case(
        lengths_q,
        lengths_k,
        heads_kv * group,
        heads_kv,
        window_left=rnd.randint(0, 300) if options.get("bounded_left") else None,
        window_right=rnd.choice([0, 0, rnd.randint(0, 200)]) if options.get("bounded_right") else None,
        softcap=rnd.choice([5.0, 30.0]) if options.get("softcap") else 0.0,
        inputs=inputs,
        slack=rnd.choice([0, 37]) if options.get("seqused_q") else 0,
        options={**static, "lse": True},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_cases(kind: str) -> None:
    """40 cases of each kind: 560 in all."""
    wrong = []
    for seed in range(40):
        case = draw(KINDS[kind], seed)
        call = cases.make(case, case.config(), seed, device="cuda")
        run(call)
        found = cases.errors(call)
        if not found.ok or call.arguments["tile_counter"].any():
            wrong.append((found, case))
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("kind", ["d128 causal", "d64", "d64 causal"])
def test_the_same_bits_a_hundred_times(kind: str) -> None:
    """On scores steep enough that tiles fail the held maximum and are done again."""
    options = {**{k: v for k, v in KINDS[kind].items() if k != "bounded_right"}, "lse": True}
    right = 0 if "bounded_right" in KINDS[kind] else None
    case = Case((2000,) * 3, (2000,) * 3, 8, 8, window_right=right, inputs="rising 60", options=options)
    call = cases.make(case, case.config(), device="cuda")
    run(call)
    out, lse = call.arguments["out"].clone(), call.arguments["lse"].clone()
    for _ in range(100):
        call.arguments["out"].fill_(float("nan"))
        run(call)
        assert torch.equal(call.arguments["out"], out) and torch.equal(call.arguments["lse"], lse)
