"""Barriers of all kinds: what they order, what misuse and deadlocks look like."""

from __future__ import annotations

import numpy as np
import pytest

from .programs import run, try_run, wait

SCHEDULES = ["round-robin", "random", "lazy", "eager"]
STORE = "st.global.b32 [%d3], %r9;"
INIT = (
    "setp.eq.u32 %p1, %r0, 0; @!%p1 bra initialised; mbarrier.init.shared.b64 [%r1], {count};"
    "fence.mbarrier_init.release.cluster; initialised: bar.sync 0;"
)


class TestNamedBarriers:
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_producer_arrives_consumer_waits(self, schedule):
        out = run(
            "add.u32 %r2, %r1, 64; setp.ge.u32 %p1, %r0, 32; @%p1 bra consumer; st.shared.b32 [%r2], 42;"
            "bar.arrive 1, 64; bra end;"
            "consumer: bar.sync 1, 64; ld.shared.b32 %r9, [%r2]; st.global.b32 [%d3], %r9; end:",
            words=64, threads=64, schedule=schedule,
        )  # fmt: skip
        assert (out[32:] == 42).all()

    def test_reductions(self):
        out = run(
            "setp.lt.u32 %p1, %r0, 40; bar.red.popc.u32 %r9, 0, %p1; bar.red.and.pred %p2, 0, %p1;"
            "bar.red.or.pred %p3, 0, %p1;"
            "selp.u32 %r2, 1000, 0, %p2; selp.u32 %r3, 2000, 0, %p3; add.u32 %r9, %r9, %r2;"
            "add.u32 %r9, %r9, %r3;" + STORE,
            words=64, threads=64,
        )  # fmt: skip
        assert (out == 2040).all()

    def test_a_warp_may_arrive_and_then_wait_in_one_round(self):
        run("bar.arrive 1, 96; setp.ge.u32 %p1, %r0, 32; @%p1 ret; bar.sync 1, 96;", words=64, threads=64)

    def test_different_counts(self):
        _, report = try_run(
            "setp.ge.u32 %p1, %r0, 32; @%p1 bra b; bar.sync 1, 64; ret;b: bar.sync 1, 96;", threads=64
        )
        assert any("told to expect 96 threads here, but 64" in f.message or "told to expect 64" in f.message
                   for f in report.of("barriers")), str(report)  # fmt: skip

    def test_a_count_that_is_no_multiple_of_32(self):
        _, report = try_run("bar.sync 1, 40;", threads=64)
        assert "not a multiple of 32" in str(report)

    def test_a_barrier_that_does_not_exist(self):
        _, report = try_run("bar.sync 16, 32;")
        assert "there are 16" in str(report)

    def test_a_deadlock_names_who_is_missing(self):
        _, report = try_run(
            "setp.ge.u32 %p1, %r0, 32; @%p1 bra b; bar.sync 1, 64; ret;b: bar.sync 2, 64;", threads=64
        )
        (finding,) = report.findings
        assert finding.check == "deadlock"
        assert "warp 0" in finding.message and "named barrier 1: 32 of 64 threads" in finding.message
        assert (
            "warp 1" in finding.message
            and "named barrier 2" in finding.message
            and "PTX line" in finding.message
        )


class TestMbarriers:
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_phases(self, schedule):
        """Two warps hand a word back and forth through one full and one empty barrier."""
        out = run(
            "setp.eq.u32 %p1, %r0, 0; @!%p1 bra ready; mbarrier.init.shared.b64 [%r1], 32;"
            "mbarrier.init.shared.b64 [%r1+8], 32;"
            "ready: bar.sync 0; mov.u32 %r5, 0; mov.u32 %r9, 0; setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer;"
            "produce: xor.b32 %r6, %r5, 1; and.b32 %r6, %r6, 1; add.u32 %r10, %r1, 8;" + wait("%r10", "%r6")
            + "mad.lo.u32 %r7, %r5, 10, %r0; shl.b32 %r8, %r0, 2; add.u32 %r8, %r1, %r8; st.shared.b32 [%r8+64], %r7;"
            "mbarrier.arrive.shared.b64 %d5, [%r1]; add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 5;"
            "@%p3 bra produce; ret;"
            "consumer: and.b32 %r6, %r5, 1;" + wait("%r1", "%r6")
            + "and.b32 %r8, %r0, 31; shl.b32 %r8, %r8, 2; add.u32 %r8, %r1, %r8;"
              "ld.shared.b32 %r7, [%r8+64]; add.u32 %r9, %r9, %r7;"
            "mbarrier.arrive.shared.b64 _, [%r1+8]; add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 5;"
            "@%p3 bra consumer;" + STORE,
            words=64, threads=64, schedule=schedule, seed=7,
        )  # fmt: skip
        assert (out[32:] == 100 + 5 * np.arange(32)).all()

    def test_state_tokens(self):
        run(INIT.format(count=32) + "mbarrier.arrive.shared.b64 %d5, [%r1];"
                                    "again: mbarrier.test_wait.shared.b64 %p2, [%r1], %d5;"
            "@!%p2 bra again;"
            "mbarrier.inval.shared.b64 [%r1];".replace("mbarrier.inval", "setp.ne.u32 %p1, %r0, 0;"
                "@!%p1 mbarrier.inval")
            )  # fmt: skip

    def test_arrive_with_a_count_and_drop(self):
        run(
            INIT.format(count=64) + "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.arrive.shared.b64 _, [%r1], 33; @!%p1"
            " mbarrier.arrive_drop.shared.b64 _, [%r1];" + wait("%r1", 0)
            + "@%p1 mbarrier.arrive.shared.b64 _, [%r1], 33;" + wait("%r1", 1)
        )  # fmt: skip

    def test_remote_arrival(self):
        out = run(
            INIT.format(count=32) + "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
                                    "mov.u32 %r10, %cluster_ctarank;"
            "xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r5, %r1, %r11;"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];" + wait("%r1", 0)
            + "mov.u32 %r9, 1; mul.wide.u32 %d5, %r10, 128; add.s64 %d3, %d3, %d5;" + STORE
            + "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
            words=64, grid=2, cluster=2,
        )  # fmt: skip
        assert (out == 1).all()

    def test_an_arrival_too_many(self):
        _, report = try_run(INIT.format(count=16) + "mbarrier.arrive.shared.b64 _, [%r1];")
        assert "32 arrivals" in str(report.of("barriers")[0])

    def test_initialised_twice(self):
        _, report = try_run(INIT.format(count=1) + "@%p1 mbarrier.init.shared.b64 [%r1], 1;")
        assert "initialises" in str(report.of("barriers")[0]) and "no mbarrier.inval" in str(report)

    def test_inval_makes_it_legal(self):
        run(
            INIT.format(count=1)
            + "@%p1 mbarrier.inval.shared.b64 [%r1]; @%p1 mbarrier.init.shared.b64 [%r1], 1;"
        )

    def test_used_before_anything_orders_its_initialisation(self):
        _, report = try_run(
            "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 64;"
            "mbarrier.arrive.shared.b64 _, [%r1];",
            threads=64,
        )
        assert any("initialisation" in f.message for f in report.of("races")), str(report)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_wait_that_is_told_not_yet_goes_on_where_it_was(self, seed):
        """Warps 0 and 1 wait for phases 0 to 5 of a barrier each. Warp 2 completes these, one after the other, each
        when a wait for another barrier, which nobody completes, has run out of time: all waits have then."""
        run(
            "setp.eq.u32 %p1, %r0, 0; @!%p1 bra initialised; "
            + "".join(f"mbarrier.init.shared.b64 [%r1+{8 * i}], 1;" for i in range(8))
            + "fence.mbarrier_init.release.cluster; initialised: bar.sync 0; mov.u32 %r4, 0;"
            "shr.u32 %r2, %r0, 5; shl.b32 %r3, %r2, 3; add.u32 %r3, %r3, %r1; setp.eq.u32 %p2, %r2, 2;"
            "setp.eq.u32 %p4, %r0, 64; @%p2 bra clock;"
            "next: and.b32 %r5, %r4, 1;"
            "again: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], %r5; @!%p3 bra again;"
            "add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 6; @%p3 bra next; bra end;"
            "clock: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;"
            "@%p4 mbarrier.arrive.shared.b64 _, [%r1]; @%p4 mbarrier.arrive.shared.b64 _, [%r1+8];"
            "add.u32 %r3, %r3, 8; add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 6; @%p3 bra clock; end:",
            words=96, threads=96, schedule="random", seed=seed,
        )  # fmt: skip

    def test_never_initialised(self):
        _, report = try_run("mbarrier.arrive.shared.b64 _, [%r1];")
        assert "no initialised mbarrier" in str(report)

    def test_a_transaction_count_that_overflows(self):
        _, report = try_run(
            INIT.format(count=32) + "mov.u32 %r2, 900000;mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2;"
        )
        assert any("overflows" in f.message for f in report.of("barriers"))

    def test_wrong_parity_is_a_deadlock_in_words(self):
        _, report = try_run(INIT.format(count=32) + "mbarrier.arrive.shared.b64 _, [%r1];" + wait("%r1", 1)
                            + wait("%r1", 1) + "mbarrier.arrive.shared.b64 _, [%r1];" + wait("%r1", 0)
                            + wait("%r1", 0) + wait("%r1", 1))  # fmt: skip
        (finding,) = report.findings
        assert finding.check == "deadlock" and "32 of 32 arrivals missing" in finding.message

    def test_missing_bytes_are_named(self):
        _, report = try_run(INIT.format(count=32) + "setp.eq.u32 %p1, %r0, 0;"
            "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 512;"
                            "mbarrier.arrive.shared.b64 _, [%r1];" + wait("%r1", 0))  # fmt: skip
        assert "512 bytes still expected" in str(report)


class TestClusterBarrier:
    def test_waiting_without_arriving(self):
        _, report = try_run("barrier.cluster.wait.acquire;", grid=2, cluster=2)
        assert "without having arrived" in str(report)

    def test_arriving_twice(self):
        _, report = try_run(
            "barrier.cluster.arrive.release; barrier.cluster.arrive.release;barrier.cluster.wait.acquire;",
            grid=2,
            cluster=2,
        )
        assert "second arrival at the cluster barrier" in str(report)

    def test_relaxed_arrivals_hand_over_what_a_fence_made_visible(self):
        body = (
            "setp.eq.u32 %p1, %r0, 0; mov.u32 %r10, %cluster_ctarank; @%p1 st.shared.b32 [%r1], %r10; {fence}"
            "barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; xor.b32 %r11, %r10, 1;"
            "mapa.shared::cluster.u32 %r5, %r1, %r11;"
            "ld.shared::cluster.b32 %r9, [%r5]; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        )
        _, report = try_run(body.format(fence="fence.acq_rel.cluster;"), grid=2, cluster=2)
        assert report.ok, str(report)
        _, report = try_run(body.format(fence=""), grid=2, cluster=2)
        assert report.of("races")


class TestFlags:
    """Synchronisation through memory: release and acquire."""

    BODY = (
        "add.u32 %r2, %r1, 64; setp.ge.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0; @%p1 bra consumer;"
        "@%p2 st.shared.b32 [%r2], 42; bar.warp.sync -1; @%p2 {store} [%d1], 1; ret;"
        "consumer: spin: {load} %r3, [%d1]; setp.eq.u32 %p3, %r3, 0; @%p3 bra spin;"
        "ld.shared.b32 %r9, [%r2]; st.global.b32 [%d3], %r9;"
    )

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_a_released_flag_orders(self, schedule):
        out = run(self.BODY.format(store="st.release.gpu.global.b32", load="ld.acquire.gpu.global.b32"),
                  words=64, threads=64,
                  schedule=schedule)  # fmt: skip
        assert (out[32:] == 42).all()

    def test_polling_what_nobody_writes(self):
        _, report = try_run(
            "spin: ld.acquire.gpu.global.b32 %r3, [%d1]; setp.eq.u32 %p3, %r3, 0; @%p3 bra spin;"
        )
        assert report.findings[0].check == "deadlock" and "polls" in str(report)

    def test_a_later_block_may_free_an_earlier_one(self):
        """Blocks run in order, but one that waits for a later one does not starve it."""
        out = run(
            "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 0; @%p1 bra first; setp.eq.u32 %p2, %r0, 0;"
            "@%p2 st.release.gpu.global.b32 [%d1], 5; ret; first: spin: ld.acquire.gpu.global.b32 %r9, [%d1];"
            "setp.eq.u32 %p3, %r9, 0; @%p3 bra spin;" + STORE,
            grid=3,
        )  # fmt: skip
        assert (out == 5).all()


def test_a_waiter_that_misses_a_phase():
    """Two phases end while a warp sleeps: nothing made the arrivals wait for it."""
    body = (
        "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0;"
        "setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer;"
        "nanosleep.u32 20; mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.arrive.shared.b64 _, [%r1]; ret; consumer:"
    ) + wait("%r1", 0)  # fmt: skip
    _, report = try_run(body, threads=64)
    assert "has missed its end" in str(report.of("barriers")[0])


def test_a_deadlock_says_who_used_to_arrive():
    body = (
        "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0;"
        "setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer;"
        "mbarrier.arrive.shared.b64 _, [%r1]; ret; consumer:"
    ) + wait("%r1", 0) + wait("%r1", 1)  # fmt: skip
    _, report = try_run(body, threads=64)
    assert "in earlier phases warp 0" in str(report) and "mbarrier.arrive" in str(report)
