"""What is measured: sizes, masks and counts of work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coflash.bench import shapes
from coflash.bench.shapes import Shape


def pairs_by_hand(s: Shape) -> int:
    lengths = s.lengths or (None,) * s.batch
    total = 0
    for length in lengths:
        nq, nk = (length, length) if length else (s.seqlen_q, s.seqlen_k)
        left, right = s.window or (nq + nk, nq + nk)
        if s.causal:
            right = min(right, 0)
        total += sum(-left <= j - (i + nk - nq) <= right for i in range(nq) for j in range(nk))
    return total * s.heads


BASE = Shape("t", "t", 2, 3, 3, 64, 64, 20, 30)


@pytest.mark.parametrize(
    "shape",
    [
        BASE,
        replace(BASE, causal=True),
        replace(BASE, causal=True, seqlen_q=30, seqlen_k=20),
        replace(BASE, window=(5, 3)),
        replace(BASE, window=(5, 3), causal=True),
        replace(BASE, batch=3, lengths=(1, 7, 20), causal=True),
    ],
    ids=str,
)
def test_pairs(shape):
    assert shape.pairs() == pairs_by_hand(shape)
    assert shape.flop("forward") == 2 * (64 + 64) * shape.pairs()
    assert shape.flop("backward") == 2.5 * shape.flop("forward")


def test_the_table_is_the_published_one():
    table = shapes.suite("table")
    assert len(table) == 18 == len(set(table))
    for s in table:
        assert s.batch * s.seqlen_q == 32768 and s.heads * s.head_dim == 2048
    assert {(s.head_dim, s.causal, s.seqlen_q) for s in table} == {
        (d, c, n) for d in (64, 128, 256) for c in (False, True) for n in (1024, 4096, 16384)
    }


@pytest.mark.parametrize("name", shapes.SUITES)
def test_every_shape_is_well_formed(name):
    for s in shapes.suite(name):
        assert s.heads % s.heads_kv == 0
        assert s.suite == name
        assert not s.lengths or (s.batch, s.seqlen_q) == (len(s.lengths), max(s.lengths))
        assert s.problem("cuda").batch == s.batch
    assert len({s.name for s in shapes.suite(name)}) == len(shapes.suite(name))


def test_log_uniform_lengths():
    lengths = shapes.log_uniform_lengths(65536, 64, 16384)
    assert sum(lengths) == 65536
    assert all(64 <= n <= 16384 for n in lengths[:-1])
    assert lengths == shapes.log_uniform_lengths(65536, 64, 16384)
    assert sum(n < 1024 for n in lengths) > len(lengths) / 4  # half of them, on average


def test_an_unknown_suite():
    with pytest.raises(ValueError, match="one of table"):
        shapes.suite("tables")
