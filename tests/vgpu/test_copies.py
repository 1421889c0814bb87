"""Asynchronous copies: they may land late, and what happens when nobody waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from .programs import aligned, run, try_run, wait

SCHEDULES = ["round-robin", "random", "lazy", "eager"]
STORE = "st.global.b32 [%d3], %r9;"
INIT = (
    "setp.eq.u32 %p1, %r0, 0; @!%p1 bra ready; mbarrier.init.shared.b64 [%r1], 1;"
    "mbarrier.init.shared.b64 [%r1+8], 1;"
    "fence.mbarrier_init.release.cluster; ready: bar.sync 0; add.u32 %r2, %r1, 1024;"
)
READ = "shl.b32 %r4, %r0, 2; add.u32 %r4, %r2, %r4; ld.shared.b32 %r9, [%r4];"


def numbers(words: int = 1024) -> np.ndarray:
    given = aligned(words)
    given[:] = np.arange(words)
    return given


LOAD = (
    "@!%p1 bra issued; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expected};"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 512, [%r1]; issued:"
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copy_into_shared_memory(schedule):
    out = run(INIT + LOAD.format(expected=512) + wait("%r1", 0) + READ + STORE, words=128, threads=128, given=numbers(),
              schedule=schedule)  # fmt: skip
    assert (out == np.arange(128)).all()


def test_reading_before_the_copy_has_arrived():
    """Right by luck under the eager schedule, wrong under the lazy one, found under both."""
    body = INIT + LOAD.format(expected=512) + READ + STORE
    for schedule in ("eager", "lazy"):
        out, report = try_run(body, words=128, threads=128, given=numbers(), schedule=schedule)
        assert report.of("races") or report.of("uninitialised"), schedule
        assert (out == np.arange(128)).all() == (schedule == "eager")


def test_the_fence_of_the_barriers_initialisation():
    body = (INIT + LOAD.format(expected=512) + wait("%r1", 0)).replace(
        "fence.mbarrier_init.release.cluster;", ""
    )
    _, report = try_run(body, threads=128, given=numbers())
    assert "fence.mbarrier_init" in str(report.of("races")[0])


@pytest.mark.parametrize(("expected", "what"), [(496, "more than expected"), (528, "still expected")])
def test_wrong_byte_counts(expected, what):
    _, report = try_run(
        INIT + LOAD.format(expected=expected) + wait("%r1", 0), threads=128, given=numbers(), schedule="lazy"
    )
    assert what in str(report), str(report)


def test_leaving_while_a_copy_is_on_its_way():
    _, report = try_run(INIT + LOAD.format(expected=512), threads=128, given=numbers(), schedule="lazy")
    assert report.of("exit")


def test_misaligned_sizes():
    _, report = try_run(
        INIT + LOAD.format(expected=512).replace("512, [%r1]", "504, [%r1]"), threads=128, given=numbers()
    )
    assert report.of("alignment")


FILL = "shl.b32 %r4, %r0, 2; add.u32 %r4, %r2, %r4; st.shared.b32 [%r4], %r0;"
OUT = (
    FILL
    + "{fence} bar.sync 0; setp.eq.u32 %p1, %r0, 0; @!%p1 bra end; {op} [%d0], [%r2], 512; {commit} {wait} end:"
)
BULK = "cp.async.bulk.global.shared::cta.bulk_group"
PROPER = {
    "fence": "fence.proxy.async.shared::cta;",
    "commit": "cp.async.bulk.commit_group;",
    "wait": "cp.async.bulk.wait_group.read 0;",
}


class TestBulkStore:
    START = "add.u32 %r2, %r1, 1024;"

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_copies_out(self, schedule):
        out = run(self.START + OUT.format(op=BULK, **PROPER), words=128, threads=128, schedule=schedule)
        assert (out == np.arange(128)).all()

    @pytest.mark.parametrize(
        ("op", "start", "expected"),
        [("add.u32", 5, np.arange(128) + 5), ("max.s32", 60, np.maximum(np.arange(128), 60)),
         ("min.u32", 60, np.minimum(np.arange(128), 60)),
         ("xor.b32", 3, np.arange(128) ^ 3)],
    )  # fmt: skip
    def test_reduces(self, op, start, expected):
        words = aligned(128)
        words[:] = start
        op = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}"
        assert (run(self.START + OUT.format(op=op, **PROPER), words=words, threads=128) == expected).all()

    def test_the_proxy_fence_is_missing(self):
        out, report = try_run(
            self.START + OUT.format(op=BULK, **{**PROPER, "fence": ""}), words=128, threads=128
        )
        assert (out == np.arange(128)).all(), "the answer happens to be right"
        (finding,) = report.findings
        assert finding.check == "races" and "a fence.proxy.async is missing" in finding.message
        assert "st.shared.b32" in finding.message and "cp.async.bulk" in finding.instruction

    @pytest.mark.parametrize("gone", ["commit", "wait"])
    def test_nobody_waits_before_the_end(self, gone):
        _, report = try_run(self.START + OUT.format(op=BULK, **{**PROPER, gone: ""}), words=128, threads=128)
        assert report.of("exit"), str(report)

    def test_overwriting_what_is_still_read(self):
        body = (
            self.START
            + OUT.format(op=BULK, **{**PROPER, "wait": ""})
            + "bar.sync 0; st.shared.b32 [%r4], 99;"
        )
        body += "@!%p1 bra over; cp.async.bulk.wait_group.read 0; over:"
        out, report = try_run(body, words=128, threads=128, schedule="lazy")
        assert "wait_group is missing" in str(report.of("races")[0])
        assert (out != np.arange(128)).any(), "and the lazy schedule shows it"

    def test_wait_group_counts_groups(self):
        body = (
            self.START
            + FILL
            + "fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p1, %r0, 0; @!%p1 bra end;"
        )
        body += f"{BULK} [%d0], [%r2], 256; cp.async.bulk.commit_group; add.s64 %d5, %d0, 256; add.u32 %r5, %r2, 256;"
        body += f"{BULK} [%d5], [%r5], 256; cp.async.bulk.commit_group;"
        body += "cp.async.bulk.wait_group.read 1; st.shared.b32 [%r2], 7;"
        body += "{late} cp.async.bulk.wait_group 0; end:"
        out = run(body.format(late=""), words=128, threads=128, schedule="lazy")
        assert (out == np.arange(128)).all()
        _, report = try_run(body.format(late="st.shared.b32 [%r5], 7;"), words=128, threads=128)
        assert report.of("races")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_reaches_every_cta(schedule):
    out = run(
        INIT + "mov.u32 %r10, %cluster_ctarank; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;"
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; setp.eq.u32 %p2, %r10, 0;"
        "and.pred %p2, %p2, %p1; mov.u16 %h1, 3;"
        "@!%p2 bra issued; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r2], [%d1], 512, [%r1], %h1;"
        "issued:" + wait("%r1", 0) + READ + "mul.wide.u32 %d5, %r10, 512; add.s64 %d3, %d3, %d5;" + STORE
        + "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        words=256, threads=128, grid=2, cluster=2, given=numbers(), schedule=schedule,
    )  # fmt: skip
    assert (out == np.arange(256) % 128).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_memory_of_another_cta(schedule):
    """st.async and a bulk copy from CTA to CTA, each completing on the receiver's barrier."""
    out = run(
        INIT + "mov.u32 %r10, %cluster_ctarank; xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r12, %r2, %r11;"
        "mapa.shared::cluster.u32 %r13, %r1, %r11; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;"
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; shl.b32 %r4, %r0, 2; add.u32 %r5, %r12, %r4;"
        "mad.lo.u32 %r6, %r10, 1000, %r0;"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r6, [%r13];"
        "add.u32 %r7, %r2, %r4; st.shared.b32 [%r7+2048], %r6; fence.proxy.async.shared::cta; bar.sync 0;"
        "@!%p1 bra sent;"
        "add.u32 %r8, %r2, 2048; add.u32 %r14, %r12, 4096;"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14], [%r8], 512, [%r13];"
        "sent:" + wait("%r1", 0)
        + "ld.shared.b32 %r9, [%r7]; ld.shared.b32 %r15, [%r7+4096]; add.u32 %r9, %r9, %r15;"
          "mul.wide.u32 %d5, %r10, 512;"
        "add.s64 %d3, %d3, %d5;" + STORE + "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        words=256, threads=128, grid=2, cluster=2, schedule=schedule,
    )  # fmt: skip
    t = np.arange(256)
    assert (out == 2 * ((1 - t // 128) * 1000 + t % 128)).all()


class TestCpAsync:
    COPY = (
        "add.u32 %r2, %r1, 1024; shl.b32 %r4, %r0, 4; add.u32 %r3, %r2, %r4; mul.wide.u32 %d5, %r0, 16;"
        "add.s64 %d5, %d1, %d5;"
        "cp.async.cg.shared.global [%r3], [%d5], 16{size}; cp.async.commit_group; {wait} bar.sync 0;"
        "mul.lo.u32 %r5, %r0, 4; xor.b32 %r5, %r5, 128; add.u32 %r5, %r5, %r2; ld.shared.b32 %r9, [%r5];"
        + STORE
    )

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_groups(self, schedule):
        out = run(
            self.COPY.format(size="", wait="cp.async.wait_group 0;"),
            words=64,
            threads=64,
            given=numbers(),
            schedule=schedule,
        )
        assert (out == np.arange(64) ^ 32).all()

    def test_without_a_wait(self):
        out, report = try_run(
            self.COPY.format(size="", wait=""), words=64, threads=64, given=numbers(), schedule="lazy"
        )
        assert report.of("races") or report.of("uninitialised")
        assert (out != np.arange(64) ^ 32).any()

    def test_zero_fill(self):
        out = run(
            self.COPY.format(size=", 4", wait="cp.async.wait_all;"), words=64, threads=64, given=numbers()
        )
        expected = np.arange(64) ^ 32
        assert (out == np.where(expected % 4 == 0, expected, 0)).all()

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_arrival_at_an_mbarrier(self, schedule):
        out = run(
            "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 64; bar.sync 0; add.u32 %r2, %r1, 1024;"
            "shl.b32 %r4, %r0, 2; add.u32 %r3, %r2, %r4; cp.async.ca.shared.global [%r3], [%d4], 4;"
            "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];" + wait("%r1", 0)
            + "xor.b32 %r4, %r4, 128; add.u32 %r4, %r2, %r4; ld.shared.b32 %r9, [%r4];" + STORE,
            words=64, threads=64, given=numbers(), schedule=schedule,
        )  # fmt: skip
        assert (out == np.arange(64) ^ 32).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_launch_control(schedule):
    """The first block takes over the work of all others."""
    out = run(
        INIT + "mov.u32 %r5, 0; mov.u32 %r6, %ctaid.x;"
        "work: mul.wide.u32 %d5, %r6, 4; add.s64 %d5, %d0, %d5; add.u32 %r7, %r6, 100; @%p1 st.global.b32 [%d5], %r7;"
        "@!%p1 bra asked; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;"
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r1];"
        "asked:" + wait("%r1", "%r5")
        + "ld.shared.b128 %q1, [%r2]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1; @!%p2 ret;"
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r6, %r10, %r11, _}, %q1;"
        "fence.proxy.async.shared::cta;"
        "bar.sync 0; xor.b32 %r5, %r5, 1; bra work;",
        words=8, threads=32, grid=8, arch="sm_100a", schedule=schedule,
    )  # fmt: skip
    assert (out == 100 + np.arange(8)).all()
