"""A config proves that its budgets fit, and says by how much they do not."""

from __future__ import annotations

import pytest

from coflash.kernels.sm90.config import REGISTER_SPLIT, REGISTERS, SHARED_BYTES, ForwardConfig


def config(**fields) -> ForwardConfig:
    return ForwardConfig(**{"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, **fields})


def test_shared_memory_is_summed() -> None:
    fits = config(k_stages=3, v_stages=3)
    assert fits.shared_bytes == 2 * 128 * (128 + 3 * 128 + 3 * 128) + 1024 <= SHARED_BYTES
    with pytest.raises(ValueError, match=r"shared memory: Q 32768 \+ K 131072 \+ V 98304 .* of 232448"):
        config(k_stages=4, v_stages=3)


def test_registers_are_summed() -> None:
    with pytest.raises(ValueError, match=r"registers: S 128 \+ O 64 \+ P 64 \+ Q 0 \+ 20 of 232"):
        config(tile_n=256, k_stages=1, v_stages=1)


@pytest.mark.parametrize("warpgroups", sorted(REGISTER_SPLIT))
def test_register_split_fits_what_the_block_has_at_entry(warpgroups: int) -> None:
    c = config(head_dim=64, head_dim_v=64, tile_n=64, warpgroups=warpgroups)
    load, compute = c.registers
    assert 128 * (load + compute * warpgroups) <= c.threads * c.entry_registers <= REGISTERS


def test_held_maximum_needs_bfloat16() -> None:
    with pytest.raises(ValueError, match="held maximum needs bf16"):
        config(dtype="fp16")
    assert config(dtype="fp16", softmax="online")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"head_dim": 100}, "head_dim 100"),
        ({"head_dim_v": 264}, "head_dim_v 264"),
        ({"dtype": "fp32"}, "dtype 'fp32'"),
        ({"tile_n": 40}, "tile_n 40"),
        ({"warpgroups": 5}, "warpgroups 5"),
        ({"pack_heads": 65}, "pack_heads 65"),
        ({"softmax": "lazy"}, "softmax 'lazy'"),
        ({"q_registers": 8}, "q_registers 8: fewer than the 8 steps"),
        ({"q_registers": 2, "head_dim": 72}, "none unless it is a multiple of 64"),
        ({"v_ahead": 8}, "v_ahead 8: fewer than the 8 steps"),
        ({"v_ahead": 1, "softmax": "online"}, "0 without a held maximum"),
    ],
)
def test_refusals_name_the_field(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**fields)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 32, 64])
def test_packed_heads_fill_whole_groups_of_rows(heads: int) -> None:
    if heads == 9:  # 9 positions of 8 heads would do, 8 of 9 do not fit
        with pytest.raises(ValueError, match="pack_heads 9"):
            config(pack_heads=9)
        return
    rows = heads * config(pack_heads=heads).positions
    assert rows <= 64 and rows % 8 == 0


def test_head_dims_take_the_next_tile() -> None:
    c = config(head_dim=72, head_dim_v=40)
    assert (c.tile_d, c.tile_d_v) == (96, 64)
