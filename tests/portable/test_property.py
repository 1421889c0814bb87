"""Drawn calls: any shapes, dtypes, strides, layouts and options, held to the error rule, both directions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.portable.reference import Options
from tests.portable.rule import Call, check
from torch import Tensor

from coflash import flash_attn_func, flash_attn_varlen_func
from coflash.portable import schedule

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LONGEST = 40


def strided(x: Tensor, way: str) -> Tensor:
    """The same values with other strides."""
    if way == "heads first" and x.dim() == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "slice":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    if way == "every second":
        return torch.stack((x, x), dim=-1)[..., 0]
    if way == "offset":
        return torch.cat((x.flatten()[:1] if x.numel() else x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x


def relative_bias(table: Tensor):
    return lambda s, b, h, i, j: s + table[h, (i - j) + LONGEST]


def gate(weight: Tensor):
    return lambda s, b, h, i, j: s * torch.sigmoid(weight[h])


def two_tensors(table: Tensor, weight: Tensor):
    return lambda s, b, h, i, j: torch.tanh(s) * weight[h] + table[h, (i - j) + LONGEST]


def distance():
    return lambda s, b, h, i, j: s - 0.05 * (i - j).abs() + 0.1 * b


def own_causal():
    return lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))


SCORE_MODS = {
    relative_bias: ("table",),
    gate: ("weight",),
    two_tensors: ("table", "weight"),
    distance: (),
    own_causal: (),
}


def documents(seed: int):
    ids = torch.randint(0, 3, (LONGEST + 1,), generator=torch.Generator().manual_seed(seed)).sort().values
    return lambda b, h, i, j: ids[i] == ids[j]


def random_pattern(seed: int):
    table = torch.rand(4, LONGEST + 1, LONGEST + 1, generator=torch.Generator().manual_seed(seed)) < 0.7
    return lambda b, h, i, j: table[h % 4, i, j]


def prefix(seed: int):
    return lambda b, h, i, j: (j < seed % 7 + b) | (j <= i)


@st.composite
def calls(draw) -> Call:
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(("dense", "dense", "packed", "packed k", "used", "packed used")))
    batch = draw(st.integers(1, 3))
    group, nheads_kv = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = group * nheads_kv
    dim = draw(st.integers(1, 24) | st.sampled_from((64, 96, 128)))
    dim_v = draw(st.just(dim) | st.integers(1, 24))
    lengths = st.integers(0, LONGEST)
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    spread = draw(st.sampled_from((1.0, 1.0, 3.0)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def packed(lens: list[int]) -> Tensor:
        return torch.tensor([0, *lens]).cumsum(0).int()

    if layout == "dense":
        lens_q, lens_k = [draw(lengths)] * batch, [draw(lengths)] * batch
    else:
        lens_q, lens_k = [draw(lengths) for _ in range(batch)], [draw(lengths) for _ in range(batch)]
    used_q, used_k = lens_q, lens_k
    arguments: dict[str, Tensor] = {}
    q_shape: tuple[int, ...] = (batch, max(lens_q), heads)
    k_shape: tuple[int, ...] = (batch, max(lens_k), nheads_kv)
    if layout in ("packed", "packed used"):
        arguments["cu_seqlens_q"] = packed(lens_q)
        q_shape = (sum(lens_q) + draw(st.integers(0, 2)), heads)
    if layout.startswith("packed"):
        arguments["cu_seqlens_k"] = packed(lens_k)
        k_shape = (sum(lens_k) + draw(st.integers(0, 2)), nheads_kv)
    if layout == "packed k":
        lens_q = used_q = [max(lens_q)] * batch
    if layout == "packed used":
        used_q = [draw(st.integers(0, n)) for n in lens_q]
        used_k = [draw(st.integers(0, n)) for n in lens_k]
    if layout in ("used", "packed used"):
        arguments["seqused_q"] = torch.tensor(used_q, dtype=torch.int32)
        arguments["seqused_k"] = torch.tensor(used_k, dtype=torch.int32)

    ways = st.sampled_from(("plain", "plain", "heads first", "slice", "every second", "offset"))
    tensors = {
        "q": strided((normal(*q_shape, dim) * spread).to(dtype), draw(ways)),
        "k": strided(normal(*k_shape, dim).to(dtype), draw(ways)),
        "v": strided(normal(*k_shape, dim_v).to(dtype), draw(ways)),
    }
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if draw(st.booleans()):
        tensors["sink"] = normal(heads).to(draw(st.sampled_from((dtype, wide))))
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.sampled_from(((heads,), (batch, heads))))
        tensors["alibi_slopes"] = torch.rand(shape, generator=generator).to(wide) / 4

    side = st.none() | st.integers(-1, LONGEST)
    options = Options(
        softmax_scale=draw(st.none() | st.sampled_from((0.1, 1.0, -0.3))),
        causal=draw(st.booleans()),
        window_size=(draw(side), draw(side)) if draw(st.booleans()) else (None, None),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.5))),
    )
    make_score_mod = None
    if draw(st.integers(0, 2)) == 0:
        make_score_mod = draw(st.sampled_from(tuple(SCORE_MODS)))
        shapes = {"table": (heads, 2 * LONGEST + 1), "weight": (heads,)}
        for n, name in enumerate(SCORE_MODS[make_score_mod]):
            tensors[f"captured{n}"] = normal(*shapes[name]).to(wide)
    if draw(st.integers(0, 2)) == 0:
        options.mask_mod = draw(st.sampled_from((documents, random_pattern, prefix)))(seed)
    if draw(st.integers(0, 3)) == 0:
        options.dropout_p, options.dropout_seed = draw(st.sampled_from((0.1, 0.5))), seed
        options.keep = kept(batch, heads, max(lens_q), max(lens_k), options)

    def run(t: dict[str, Tensor], o: Options) -> tuple[Tensor, Tensor]:
        function = flash_attn_func if layout == "dense" else flash_attn_varlen_func
        return function(
            t["q"],
            t["k"],
            t["v"],
            learnable_sink=t.get("sink"),
            alibi_slopes=t.get("alibi_slopes"),
            return_lse=True,
            **arguments,
            **o.arguments(),
        )

    def rows(cu_seqlens: Tensor | None, used: list[int]):
        def find(x: Tensor, b: int) -> Tensor:
            if cu_seqlens is None:
                return x[b, : used[b]]
            start = int(cu_seqlens[b])
            return x[start : start + used[b]]

        return find

    queries = rows(arguments.get("cu_seqlens_q"), used_q)
    return Call(
        run=run,
        tensors=tensors,
        options=options,
        batch=batch,
        queries=queries,
        keys=rows(arguments.get("cu_seqlens_k"), used_k),
        lse_rows=lambda lse, b: queries(lse.transpose(-1, -2), b).T,
        make_score_mod=make_score_mod,
        notes={"layout": layout, "lens_q": lens_q, "lens_k": lens_k, "used": (used_q, used_k)},
    )


def kept(batch: int, heads: int, len_q: int, len_k: int, o: Options) -> Tensor:
    """Which weights dropout keeps, seen from outside: even weights over values that are a unit matrix."""
    values = torch.eye(len_k, dtype=torch.float64)[None, :, None, :].expand(batch, -1, heads, -1)
    if 0 in (batch, heads, len_q, len_k):
        return torch.ones(batch, heads, len_q, len_k, dtype=torch.bool)
    out = flash_attn_func(
        torch.zeros(batch, len_q, heads, 1, dtype=torch.float64),
        torch.zeros(batch, len_k, heads, 1, dtype=torch.float64),
        values,
        dropout_p=o.dropout_p,
        dropout_seed=o.dropout_seed,
    )
    return out.transpose(1, 2) > 0


def check_in_small_tiles(call: Call, tile: int) -> None:
    """Short sequences, cut into many tiles all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SMALLEST_TILE", tile)
        patch.setattr(schedule, "TILE_SCORES", 2 * tile * tile)
        check(call)


COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    # Shrinking a failure takes longer than all cases together; the drawn call says enough.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
}


@settings(max_examples=200, **COMMON)
@given(call=calls(), tile=st.sampled_from((4, 16, 64)))
def test_error_rule(call: Call, tile: int) -> None:
    check_in_small_tiles(call, tile)


@pytest.mark.slow
@settings(max_examples=2000, **{**COMMON, "derandomize": False})
@given(call=calls(), tile=st.sampled_from((4, 8, 16, 32, 64)))
def test_error_rule_at_length(call: Call, tile: int) -> None:
    check_in_small_tiles(call, tile)
