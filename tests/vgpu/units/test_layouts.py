"""Register fragments: hand-written rows of the manual's figures, and CuTe-DSL's own layouts."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import layouts
from coflash.vgpu.units.formats import UnsupportedInstruction

from .cute_layouts import needs_dsl, printed, table


def test_ldmatrix_moves_a_matrix() -> None:
    """Four 8 x 8 matrices, each thread passing one row's address, as in the manual's figure of .x4."""
    memory = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    addresses = np.array([16 * t for t in range(32)])  # thread t: row t % 8 of matrix t // 8
    lane, byte = layouts.ldmatrix("m8n8", 4, trans=False)
    got = memory.ravel()[(addresses[lane] + byte) // 2]
    for t in range(32):
        for i in range(4):
            np.testing.assert_array_equal(got[t, i], memory[i, t // 4, t % 4 * 2 : t % 4 * 2 + 2])
    lane, byte = layouts.ldmatrix("m8n8", 4, trans=True)
    got = memory.ravel()[(addresses[lane] + byte) // 2]
    for t in range(32):
        for i in range(4):
            np.testing.assert_array_equal(got[t, i], memory[i].T[t // 4, t % 4 * 2 : t % 4 * 2 + 2])


def test_mma_m16n8k16_figure() -> None:
    """Thread 5 (group 1, place 1) of mma.m16n8k16 with 16-bit inputs."""
    row, col = layouts.mma_fragment("m16n8k16", "a", 16)
    assert row[5].tolist() == [[1, 1], [9, 9], [1, 1], [9, 9]]
    assert col[5].tolist() == [[2, 3], [2, 3], [10, 11], [10, 11]]
    row, col = layouts.mma_fragment("m16n8k16", "b", 16)
    assert row[5].tolist() == [[2, 3], [10, 11]]
    assert col[5].tolist() == [[1, 1], [1, 1]]
    row, col = layouts.mma_fragment("m16n8k16", "c", 32)
    assert row[5].ravel().tolist() == [1, 1, 9, 9]
    assert col[5].ravel().tolist() == [2, 3, 2, 3]
    row, col = layouts.mma_fragment("m16n8k16", "d", 16)
    assert row[5].tolist() == [[1, 1], [9, 9]]


def test_mma_tf32_and_8_bit_figures() -> None:
    row, col = layouts.mma_fragment("m16n8k8", "a", 32)
    assert row[6].ravel().tolist() == [1, 9, 1, 9]
    assert col[6].ravel().tolist() == [2, 2, 6, 6]
    row, col = layouts.mma_fragment("m16n8k4", "a", 32)
    assert row[6].ravel().tolist() == [1, 9]
    row, col = layouts.mma_fragment("m16n8k32", "b", 8)
    assert row[6].tolist() == [[8, 9, 10, 11], [24, 25, 26, 27]]


@pytest.mark.parametrize(
    ("shape", "bits"), [("m16n8k8", 16), ("m16n8k16", 16), ("m16n8k16", 8), ("m16n8k32", 8), ("m16n8k8", 32)]
)
def test_fragments_cover_their_tiles(shape: str, bits: int) -> None:
    k = int(shape.split("k")[1])
    for operand, rows, cols in (("a", 16, k), ("b", k, 8), ("c", 16, 8)):
        row, col = layouts.mma_fragment(shape, operand, bits if operand != "c" else 32)
        assert sorted(zip(row.ravel(), col.ravel(), strict=True)) == [
            (r, c) for r in range(rows) for c in range(cols)
        ]


@pytest.mark.parametrize("n", [8, 64, 128, 256])
def test_wgmma_accumulator_figure(n: int) -> None:
    row, col = layouts.wgmma_accumulator(n)
    assert row.shape == (128, n // 2, 1)
    # Thread 37: warp 1, group 1, place 1.
    assert row[37, :4, 0].tolist() == [17, 17, 25, 25]
    assert col[37, :4, 0].tolist() == [2, 3, 2, 3]
    if n > 8:
        assert col[37, 4:6, 0].tolist() == [10, 11]
    assert np.unique(row * n + col).size == 64 * n
    half_row, half_col = layouts.wgmma_accumulator(n, 16)
    np.testing.assert_array_equal(half_row.reshape(128, -1), row.reshape(128, -1))
    np.testing.assert_array_equal(half_col.reshape(128, -1), col.reshape(128, -1))


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_wgmma_a_covers_its_tile(bits: int) -> None:
    row, col = layouts.wgmma_a(bits)
    assert row.shape == (128, 4, 32 // bits)
    assert np.unique(row * 64 + col).size == 64 * 256 // bits
    assert (row // 16 == np.arange(128)[:, None, None] // 32).all()


def test_unknown_shapes_are_refused() -> None:
    for call in (
        lambda: layouts.ldmatrix("m8n16", 1, False),
        lambda: layouts.ldmatrix("m8n8", 3, False),
        lambda: layouts.ldmatrix("m16n16", 1, True),
        lambda: layouts.mma_fragment("m8n8k4", "a", 16),
        lambda: layouts.mma_fragment("m16n8k64", "a", 8),
        lambda: layouts.wgmma_accumulator(12),
    ):
        with pytest.raises(UnsupportedInstruction):
            call()


HOPPER = """
for trans in (False, True):
    for num in (1, 2, 4):
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(trans, num), BFloat16)
        show(f"ldmatrix {int(trans)} {num}", load.layout_dst_tv)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(trans, num), BFloat16)
        show(f"stmatrix {int(trans)} {num}", store.layout_src_tv)
mma = cute.make_tiled_mma(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
show("mma a", mma.tv_layout_A)
show("mma b", mma.tv_layout_B)
show("mma c", mma.tv_layout_C)
for n in (16, 128):
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, n, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
    )
    wgmma = cute.make_tiled_mma(op)
    show("wgmma a", wgmma.tv_layout_A)
    show(f"wgmma c {n}", wgmma.tv_layout_C)
"""


@needs_dsl
def test_ldmatrix_against_the_dsl() -> None:
    found = printed("sm_90a", HOPPER)
    for trans in (False, True):
        for num in (1, 2, 4):
            # The DSL numbers elements row by row over the 8-element rows whose addresses threads 0, 1, ...
            # pass.
            lane, byte = layouts.ldmatrix("m8n8", num, trans)
            ours = (lane * 8 + byte // 2).reshape(32, -1)
            np.testing.assert_array_equal(table(found[f"ldmatrix {int(trans)} {num}"]), ours)
            lane, byte = layouts.ldmatrix("m8n8", num, trans, store=True)
            np.testing.assert_array_equal(table(found[f"stmatrix {int(trans)} {num}"]), ours)


@needs_dsl
def test_fragments_against_the_dsl() -> None:
    found = printed("sm_90a", HOPPER)
    row, col = layouts.mma_fragment("m16n8k16", "a", 16)
    np.testing.assert_array_equal(table(found["mma a"]), (row + 16 * col).reshape(32, -1))
    k, n = layouts.mma_fragment("m16n8k16", "b", 16)
    np.testing.assert_array_equal(table(found["mma b"]), (n + 8 * k).reshape(32, -1))
    row, col = layouts.mma_fragment("m16n8k16", "c", 32)
    np.testing.assert_array_equal(table(found["mma c"]), (row + 16 * col).reshape(32, -1))
    row, col = layouts.wgmma_a(16)
    np.testing.assert_array_equal(table(found["wgmma a"]), (row + 64 * col).reshape(128, -1))
    for columns in (16, 128):
        row, col = layouts.wgmma_accumulator(columns)
        np.testing.assert_array_equal(table(found[f"wgmma c {columns}"]), (row + 64 * col).reshape(128, -1))


BYTES = """
for num in (1, 2, 4):
    store = cute.make_copy_atom(warp.StMatrix16x8x8bOp(True, num), Uint8)
    show(f"{num}", store.layout_src_tv)
"""


@needs_dsl
@pytest.mark.parametrize("num", [1, 2, 4])
def test_8_bit_stmatrix_against_the_dsl(num: int) -> None:
    lane, byte = layouts.ldmatrix("m16n8", num, trans=True, store=True)
    np.testing.assert_array_equal(
        table(printed("sm_100a", BYTES)[f"{num}"]), (16 * lane + byte).reshape(32, -1)
    )
