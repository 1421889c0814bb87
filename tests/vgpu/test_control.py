"""Branches, divergence, and what the threads of a warp do together."""

from __future__ import annotations

import numpy as np
import pytest

from .programs import run, try_run

LANE = np.arange(32)
STORE = "st.global.b32 [%d3], %r9;"


def test_both_sides_of_a_branch_and_the_join():
    out = run(
        "and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra even;"
        "add.u32 %r9, %r0, 100; bra join;"
        "even: add.u32 %r9, %r0, 200;"
        "join: add.u32 %r9, %r9, 1;" + STORE
    )
    assert (out == LANE + np.where(LANE % 2, 101, 201)).all()


def test_guards_limit_what_is_written():
    out = run(
        "setp.lt.u32 %p1, %r0, 5; mov.u32 %r9, 7; @%p1 add.u32 %r9, %r0, 50;"
        "@!%p1 mul.lo.u32 %r9, %r0, 3;" + STORE
    )
    assert (out == np.where(LANE < 5, LANE + 50, LANE * 3)).all()


def test_a_loop_that_threads_leave_one_by_one():
    out = run(
        "mov.u32 %r9, 0; mov.u32 %r2, 0;"
        "loop: add.u32 %r9, %r9, %r2; add.u32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r0; @%p1 bra loop;"
        "add.u32 %r9, %r9, 1000;" + STORE
    )
    assert (out == LANE * (LANE + 1) // 2 + 1000).all()


def test_nested_divergence():
    out = run(
        "setp.ge.u32 %p1, %r0, 16; mov.u32 %r9, 1; @%p1 bra outer;"
        "setp.ge.u32 %p2, %r0, 8; @%p2 bra inner; add.u32 %r9, %r9, 10;"
        "inner: add.u32 %r9, %r9, 100;"
        "outer: vote.sync.ballot.b32 %r3, %p1, -1; popc.b32 %r3, %r3; add.u32 %r9, %r9, %r3;" + STORE
    )
    assert (out == np.select([LANE < 8, LANE < 16], [127, 117], 17)).all()


def test_threads_that_return_early_leave_the_rest_running():
    out = run("setp.lt.u32 %p1, %r0, 10; @%p1 ret; mov.u32 %r9, 5;" + STORE)
    assert (out == np.where(LANE < 10, 0, 5)).all()


def test_a_partial_last_warp():
    out = run("mov.u32 %r9, %ntid.x;" + STORE, words=64, threads=40)
    assert (out == np.where(np.arange(64) < 40, 40, 0)).all()


@pytest.mark.parametrize("schedule", ["round-robin", "random", "lazy", "eager"])
def test_warps_that_go_different_ways(schedule):
    out = run(
        "shr.u32 %r2, %r0, 5; and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra even;"
        "mul.lo.u32 %r9, %r2, 1000; bra join; even: mul.lo.u32 %r9, %r2, 10;"
        "join: bar.sync 0; add.u32 %r9, %r9, 1;" + STORE,
        words=256, threads=256, schedule=schedule, seed=3,
    )  # fmt: skip
    warp = np.arange(256) // 32
    assert (out == np.where(warp % 2, warp * 1000, warp * 10) + 1).all()


@pytest.mark.parametrize(
    ("mode", "b", "c", "expected"),
    [
        ("idx", 5, 31, np.full(32, 5)),
        ("bfly", 1, 31, LANE ^ 1),
        ("up", 2, 0, np.where(LANE >= 2, LANE - 2, LANE)),
        ("down", 3, 31, np.where(LANE + 3 <= 31, LANE + 3, LANE)),
        # Segments of 8 lanes: c = segment mask 0x18 in bits 8..12, clamp 31 (0 for up).
        ("idx", 3, 0x181F, LANE // 8 * 8 + 3),
        ("up", 1, 0x1800, np.where(LANE % 8 >= 1, LANE - 1, LANE)),
        ("down", 1, 0x181F, np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(mode, b, c, expected):
    out = run(f"shfl.sync.{mode}.b32 %r9, %r0, {b}, {c}, -1;" + STORE)
    assert (out == expected).all()


def test_a_shuffle_says_whether_its_source_was_in_range():
    out = run("shfl.sync.down.b32 %r9|%p1, %r0, 4, 31, -1; selp.u32 %r9, 1, 0, %p1;" + STORE)
    assert (out == (LANE + 4 <= 31)).all()


def test_votes():
    out = run(
        "setp.lt.u32 %p1, %r0, 3; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;"
        "vote.sync.uni.pred %p4, %p1, -1; vote.sync.ballot.b32 %r9, %p1, -1;"
        "selp.u32 %r2, 256, 0, %p2; selp.u32 %r3, 512, 0, %p3; selp.u32 %r4, 1024, 0, %p4;"
        "add.u32 %r9, %r9, %r2; add.u32 %r9, %r9, %r3; add.u32 %r9, %r9, %r4;" + STORE
    )
    assert (out == 7 + 256).all()


def test_elect_chooses_the_lowest_thread_of_the_mask():
    out = run("elect.sync %r9|%p1, -1; selp.u32 %r2, 100, 0, %p1; add.u32 %r9, %r9, %r2;" + STORE)
    assert (out == np.where(LANE == 0, 100, 0)).all()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add.u32", LANE.sum()),
        ("min.u32", 0),
        ("max.u32", 31),
        ("and.b32", 0),
        ("or.b32", 31),
        ("xor.b32", 0),
    ],
)
def test_redux(op, expected):
    assert (run(f"redux.sync.{op} %r9, %r0, -1;" + STORE) == expected).all()


def test_redux_of_floats_ignores_nan():
    given = np.arange(32, dtype=np.float32) - 7
    given[3] = np.nan
    out = run(
        "ld.global.f32 %r2, [%d4]; redux.sync.max.f32 %r9, %r2, -1;" + STORE, given=given.view(np.uint32)
    )
    assert (out.view(np.float32) == 24).all()


def test_match_any_and_all():
    out = run("and.b32 %r2, %r0, 3; match.any.sync.b32 %r9, %r2, -1;" + STORE)
    assert (out == (np.uint32(0x11111111) << (LANE % 4).astype(np.uint32))).all()
    out = run("mov.u32 %r2, 9; match.all.sync.b32 %r9|%p1, %r2, -1; @!%p1 mov.u32 %r9, 1;" + STORE)
    assert (out == 0xFFFFFFFF).all()


def test_activemask_in_a_branch():
    out = run("setp.lt.u32 %p1, %r0, 4; mov.u32 %r9, 0; @!%p1 bra over; activemask.b32 %r9; over:" + STORE)
    assert (out == np.where(LANE < 4, 15, 0)).all()


def test_a_full_mask_gathers_a_diverged_warp():
    """A shuffle whose mask names threads that are elsewhere waits for them."""
    out = run(
        "setp.lt.u32 %p1, %r0, 16; mov.u32 %r2, %r0; @%p1 bra low; add.u32 %r2, %r2, 100; bra both;"
        "low: add.u32 %r2, %r2, 200; both: shfl.sync.bfly.b32 %r9, %r2, 16, 31, -1;" + STORE
    )
    assert (out == np.where(LANE < 16, (LANE ^ 16) + 100, (LANE ^ 16) + 200)).all()


def test_special_registers():
    out = run(
        "mov.u32 %r9, %laneid; mov.u32 %r2, %warpid; mad.lo.u32 %r9, %r2, 100, %r9; mov.u32 %r3, %ctaid.x;"
        "mad.lo.u32 %r9, %r3, 10000, %r9; mov.u32 %r4, %nctaid.x; mad.lo.u32 %r9, %r4, 100000, %r9;"
        "mul.wide.u32 %d5, %r3, 256; add.s64 %d3, %d3, %d5;" + STORE,
        words=128, threads=64, grid=2,
    )  # fmt: skip
    t = np.arange(128)
    assert (out == t % 32 + t // 32 % 2 * 100 + t // 64 * 10000 + 200000).all()


def test_lane_masks():
    out = run("mov.u32 %r9, %lanemask_lt; mov.u32 %r2, %lanemask_eq; add.u32 %r9, %r9, %r2;" + STORE)
    assert (out.astype(np.uint64) == 2 * (1 << LANE.astype(np.uint64)) - 1).all()


def test_trap_is_a_finding():
    _, report = try_run("setp.eq.u32 %p1, %r0, 7; @%p1 trap;")
    assert "the kernel stops itself" in str(report) and report.findings[0].line


def test_an_endless_loop_is_found():
    _, report = try_run("loop: bra loop;")
    assert [f.check for f in report.findings] == ["deadlock"] and "endless loop" in str(report)


def test_running_off_the_end_is_a_return():
    assert (run("mov.u32 %r9, 3;" + STORE) == 3).all()


class TestRegisterReallocation:
    def test_dec_pays_for_inc(self):
        out = run(
            "setp.ge.u32 %p1, %r0, 128; @%p1 bra second; setmaxnreg.inc.sync.aligned.u32 240;"
            "mov.u32 %r9, 1; bra end;"
            "second: setmaxnreg.dec.sync.aligned.u32 24; mov.u32 %r9, 2; end:" + STORE,
            words=384, threads=384, directives=".reqntid 384, 1, 1",
        )  # fmt: skip
        assert (out == np.where(np.arange(384) < 128, 1, 2)).all()

    def test_an_increase_that_nobody_pays_for(self):
        _, report = try_run(
            "setmaxnreg.inc.sync.aligned.u32 240;", threads=384, directives=".reqntid 384, 1, 1"
        )
        assert [f.check for f in report.findings] == ["deadlock"] and "waits for registers" in str(report)

    def test_a_decrease_must_not_increase(self):
        _, report = try_run("setmaxnreg.dec.sync.aligned.u32 248;", threads=512)
        assert [f.check for f in report.findings] == ["registers"]
