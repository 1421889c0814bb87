"""Tensor memory: tcgen05.ld/st shapes, copies and accumulators, by hand and against CuTe-DSL's layouts."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import tmem
from coflash.vgpu.units.formats import UnsupportedInstruction

from .cute_layouts import needs_dsl, printed, table

COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}


def test_figures() -> None:
    """Rows of the manual's figures of the .x1 fragments, thread 6."""
    lane, column = tmem.ldst("32x32b", 2)
    assert (lane[6].tolist(), column[6].tolist()) == ([6, 6], [0, 1])
    lane, column = tmem.ldst("16x128b", 1)
    assert (lane[6].tolist(), column[6].tolist()) == ([1, 9], [2, 2])
    lane, column = tmem.ldst("16x256b", 1)
    assert (lane[6].tolist(), column[6].tolist()) == ([1, 1, 9, 9], [4, 5, 4, 5])
    lane, column = tmem.ldst("16x64b", 1)
    assert (lane[6].tolist(), column[6].tolist()) == ([1], [1])
    assert (lane[7].tolist(), column[7].tolist()) == ([9], [1])
    lane, column = tmem.ldst("16x32bx2", 2, split_half=40)
    assert (lane[21].tolist(), column[21].tolist()) == ([5, 5], [40, 41])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num", [1, 2, 8, 32])
@pytest.mark.parametrize("shape", list(COLUMNS))
def test_every_word_once(shape: str, num: int, packed: bool) -> None:
    columns = COLUMNS[shape] * num * (2 if packed else 1)
    lane, column = tmem.ldst(shape, num, columns // 2 if shape == "16x32bx2" else 0, packed)
    assert lane.shape[:2] == (32, tmem.registers(shape, num))
    assert np.unique(lane).size == tmem.lanes_of(shape)
    assert sorted((lane * columns + column).ravel().tolist()) == list(range(tmem.lanes_of(shape) * columns))


def test_limits() -> None:
    for shape, num in (("16x256b", 64), ("16x128b", 128), ("32x32b", 3), ("8x8b", 1)):
        with pytest.raises(UnsupportedInstruction, match=shape):
            tmem.ldst(shape, num)


@pytest.mark.parametrize(
    ("shape", "multicast", "rows", "words", "row", "lanes"),
    [
        ("128x256b", "", 128, 8, 77, [77]),
        ("128x128b", "", 128, 4, 77, [77]),
        ("4x256b", "", 4, 8, 2, [64]),
        ("64x128b", "warpx2::02_13", 64, 4, 40, [40, 104]),
        ("64x128b", "warpx2::01_23", 64, 4, 40, [72, 104]),
        ("64x128b", "warpx2::01_23", 64, 4, 3, [3, 35]),
        ("32x128b", "warpx4", 32, 4, 5, [5, 37, 69, 101]),
    ],
)
def test_copies(shape: str, multicast: str, rows: int, words: int, row: int, lanes: list[int]) -> None:
    copy = tmem.cp(shape, multicast)
    assert (copy.rows, copy.words) == (rows, words)
    assert copy.lanes[row].tolist() == lanes
    assert np.unique(copy.lanes).size == copy.lanes.size


def test_copy_needs_its_multicast() -> None:
    with pytest.raises(UnsupportedInstruction, match="64x128b"):
        tmem.cp("64x128b")


def test_shift_moves_down_one_lane() -> None:
    source, target = tmem.shift_lanes()
    assert source.tolist() == list(range(1, 32)) and target.tolist() == list(range(31))


@pytest.mark.parametrize(
    ("m", "cta_group", "ws", "element", "place"),
    [
        (128, 1, False, (100, 7), (0, 100, 7)),
        (64, 1, False, (37, 7), (0, 69, 7)),  # row 37 = 2 * 16 + 5: third quarter, lane 5
        (256, 2, False, (200, 7), (1, 72, 7)),
        (128, 2, False, (70, 40), (1, 70, 8)),  # second CTA's row 6, upper half of N = 64
        (64, 1, True, (5, 40), (0, 69, 8)),
        (32, 1, True, (5, 40), (0, 69, 8)),
        (128, 1, True, (5, 40), (0, 5, 40)),
    ],
)
def test_accumulators(
    m: int, cta_group: int, ws: bool, element: tuple[int, int], place: tuple[int, int, int]
) -> None:
    rank, lane, column = tmem.accumulator(m, 64, cta_group, ws)
    assert (rank[element], lane[element], column[element]) == place
    assert np.unique((rank * 128 + lane) * 512 + column).size == m * 64


def test_a_in_tensor_memory() -> None:
    rank, lane = tmem.a_operand(128, 2)
    assert lane[:, 70].tolist() == [6, 70] and rank[:, 70].tolist() == [1, 1]
    rank, lane = tmem.a_operand(64, 1)
    assert lane[:, 37].tolist() == [69]
    with pytest.raises(UnsupportedInstruction):
        tmem.a_operand(64, 1, ws=True)


BLACKWELL = """
shapes = (
    ("32x32b", tcgen05.Ld32x32bOp), ("16x64b", tcgen05.Ld16x64bOp), ("16x128b", tcgen05.Ld16x128bOp),
    ("16x256b", tcgen05.Ld16x256bOp), ("16x32bx2", tcgen05.Ld16x32bx2Op),
)
repeats = ((1, tcgen05.Repetition.x1), (2, tcgen05.Repetition.x2), (16, tcgen05.Repetition.x16))
for num, repeat in repeats:
    for shape, op in shapes:
        plain = cute.make_copy_atom(op(repeat, tcgen05.Pack.NONE), Float32)
        show(f"{shape} {num} 0", plain.layout_dst_tv)
        packed = cute.make_copy_atom(op(repeat, tcgen05.Pack.PACK_16b_IN_32b), Float16)
        show(f"{shape} {num} 1", packed.layout_dst_tv)
one, two = tcgen05.CtaGroup.ONE, tcgen05.CtaGroup.TWO
for m, group in ((64, one), (128, one), (128, two), (256, two)):
    source = tcgen05.OperandSource.TMEM
    op = tcgen05.MmaF16BF16Op(
        BFloat16, Float32, (m, 64, 16), group, source, OperandMajorMode.K, OperandMajorMode.MN
    )
    mma = cute.make_tiled_mma(op)
    c = mma.make_fragment_C(mma.partition_shape_C((m, 64)))
    show(f"c {m} {1 if group is one else 2}", c.layout[0])
    a = mma.make_fragment_A(mma.partition_shape_A((m, 16)))
    show(f"a {m} {1 if group is one else 2}", a.layout[0])
"""


@needs_dsl
@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("num", [1, 2, 16])
@pytest.mark.parametrize("shape", list(COLUMNS))
def test_ld_against_the_dsl(shape: str, num: int, packed: int) -> None:
    found = printed("sm_100a", BLACKWELL)
    columns = COLUMNS[shape] * num * (2 if packed else 1)
    lane, column = tmem.ldst(shape, num, columns // 2 if shape == "16x32bx2" else 0, bool(packed))
    # The DSL numbers the moved elements lane by lane.
    np.testing.assert_array_equal(
        table(found[f"{shape} {num} {packed}"]), (lane * columns + column).reshape(32, -1)
    )


@needs_dsl
@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_mma_operands_against_the_dsl(m: int, group: int) -> None:
    found = printed("sm_100a", BLACKWELL)
    own = m // group  # rows of one CTA
    address = table(found[f"c {m} {group}"])  # lane << 16 | column
    _, lane, column = tmem.accumulator(m, 64, group)
    np.testing.assert_array_equal(address, (lane << 16 | column)[:own])
    address = table(found[f"a {m} {group}"])[:, 0]  # 16-bit elements: twice the lane stride
    _, lanes = tmem.a_operand(m, group)
    np.testing.assert_array_equal(address >> 17, lanes[:, :own].ravel())
