"""The machine as a whole: launches that do not fit, unknown instructions, schedules, counters, events, checks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coflash.vgpu import CHECKS, Buffer, Launch, Machine, PtxError

from .programs import aligned, launch, run, try_run

STORE = "st.global.b32 [%d3], %r9;"


class TestBadInput:
    @pytest.mark.parametrize(
        "text",
        ["frobnicate.b32 %r1, %r2;", "add.q32 %r1, %r2, %r3;",
         "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %d1, %d2, %r3, %p1;",
         "call foo;", "wgmma.mma_async.sync.aligned.m64n8k99.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %d1, %d2, 1, 1, 1;",
         "ld.shared.v3.b32 {%r1, %r2, %r3}, [%r1];", "cvt.rn.f32.q7 %r1, %r2;"],
    )  # fmt: skip
    def test_an_unknown_instruction_stops_with_text_and_line(self, text):
        with pytest.raises(PtxError) as caught:
            run(text)
        assert caught.value.line == 22 and "PTX line 22" in str(caught.value)

    def test_nothing_has_run_by_then(self):
        out = np.zeros(32, np.uint32)
        with pytest.raises(PtxError):
            run("mov.u32 %r9, 1;" + STORE + "frobnicate.b32 %r1;", words=out)
        assert not out.any()

    def test_wrong_register_width(self):
        with pytest.raises(PtxError, match=r"32|64"):
            run("add.u64 %d5, %r1, %d6;")

    def test_wrong_number_of_operands(self):
        with pytest.raises(PtxError, match="3 operands"):
            run("add.u32 %r1, %r2;")

    def test_an_undefined_symbol(self):
        with pytest.raises(PtxError, match="neither a register nor a variable"):
            run("mov.u64 %d5, missing;")

    def test_parameters_that_are_too_short(self):
        what = launch("ret;", aligned(32))
        with pytest.raises(ValueError, match="takes 20 bytes of parameters, the launch has 8"):
            Machine("sm_90a").run(dataclasses.replace(what, params=what.params[:8]))

    def test_a_block_that_the_kernel_does_not_allow(self):
        what = launch("ret;", aligned(32), threads=64, directives=".reqntid 128, 1, 1")
        with pytest.raises(ValueError, match="demands blocks of"):
            Machine("sm_90a").run(what)

    def test_a_cluster_that_the_kernel_does_not_allow(self):
        what = launch("ret;", aligned(32), directives=".reqnctapercluster 2, 1, 1")
        with pytest.raises(ValueError, match="demands clusters of"):
            Machine("sm_90a").run(what)

    def test_too_much_shared_memory(self):
        with pytest.raises(ValueError, match="232448"):
            run("ret;", shared=300_000)

    def test_a_missing_kernel(self):
        what = dataclasses.replace(launch("ret;", aligned(32)), kernel="nothing")
        with pytest.raises(PtxError, match="no kernel named 'nothing'"):
            Machine("sm_90a").run(what)

    def test_unsupported_architectures(self):
        with pytest.raises(ValueError, match="unsupported architecture 'sm_80'"):
            Machine("sm_80")
        with pytest.raises(ValueError, match="does not run on sm_90a"):
            Machine("sm_90a").run(launch("ret;", aligned(32), arch="sm_100a"))
        with pytest.raises(ValueError, match="unsupported target 'sm_75'"):
            Machine("sm_90a").run(launch("ret;", aligned(32), arch="sm_75"))

    def test_unknown_options(self):
        with pytest.raises(ValueError, match="unknown schedule"):
            Machine(schedule="fair")
        with pytest.raises(ValueError, match="unknown checks.*'speed'"):
            Machine(checks=["speed"])

    @pytest.mark.parametrize(
        ("grid", "block", "cluster", "what"),
        [((0, 1, 1), (32, 1, 1), (1, 1, 1), "grid"), ((3, 1, 1), (32, 1, 1), (2, 1, 1), "multiple of cluster"),
         ((1, 1, 1), (2048, 1, 1), (1, 1, 1), "larger than 1024")],
    )  # fmt: skip
    def test_launches_that_cannot_be(self, grid, block, cluster, what):
        with pytest.raises(ValueError, match=what):
            Launch("", "k", grid, block, b"", cluster)

    def test_buffers(self):
        with pytest.raises(ValueError, match="not contiguous"):
            Buffer.of(np.zeros((4, 4))[:, :2])
        data = np.zeros(16, np.uint8)
        both = [Buffer(4096, data, "a"), Buffer(4100, data, "b")]
        with pytest.raises(ValueError, match="a and b overlap"):
            Machine("sm_90a").run(dataclasses.replace(launch("ret;", aligned(32)), buffers=both))


@pytest.mark.parametrize(
    ("target", "arch", "runs"),
    [("sm_90a", "sm_90a", True), ("sm_90", "sm_100a", True), ("sm_90a", "sm_100a", False), ("sm_100a", "sm_103a", False),
     ("sm_100f", "sm_103a", True), ("sm_103f", "sm_100a", False), ("sm_100", "sm_90a", False)],
)  # fmt: skip
def test_which_chip_runs_which_target(target, arch, runs):
    what = launch("ret;", aligned(32), arch=target)
    if runs:
        assert Machine(arch).run(what).ok
    else:
        with pytest.raises(ValueError, match="does not run on"):
            Machine(arch).run(what)


class TestRaces:
    """Shared memory between two warps, with the barrier and without."""

    BODY = (
        "shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; {first} {barrier} xor.b32 %r4, %r2, 128;"
        "add.u32 %r4, %r1, %r4; {second}"
    )
    WRITE, READ = "st.shared.b32 [{}], %r0;", "ld.shared.b32 %r9, [{}];"

    def program(self, first, second, barrier):
        return self.BODY.format(first=first.format("%r3"), second=second.format("%r4"), barrier=barrier)

    @pytest.mark.parametrize(("first", "second"), [(WRITE, READ), (WRITE, WRITE)])
    @pytest.mark.parametrize("schedule", ["round-robin", "random", "lazy", "eager"])
    def test_a_missing_barrier(self, first, second, schedule):
        run(self.program(first, second, "bar.sync 0;"), threads=64, schedule=schedule)
        _, report = try_run(self.program(first, second, ""), threads=64, schedule=schedule)
        assert report.of("races"), str(report)
        assert "a barrier is missing" in str(report.of("races")[0]) or report.of("uninitialised")

    def test_reading_before_another_writes(self):
        start = "shl.b32 %r5, %r0, 2; add.u32 %r5, %r1, %r5; st.shared.b32 [%r5], 0; bar.sync 0;"
        run(start + self.program(self.READ, self.WRITE, "bar.sync 0;"), threads=64)
        _, report = try_run(start + self.program(self.READ, self.WRITE, ""), threads=64)
        (finding,) = report.of("races")
        assert " read at PTX line" in finding.message and "warp" in finding.message

    def test_the_wrong_barrier_does_not_help(self):
        _, report = try_run(
            "setp.ge.u32 %p1, %r0, 32; @%p1 bra b; bar.sync 1, 32; bra both; b: bar.sync 2, 32; both:"
            + self.program(self.WRITE, self.READ, ""), threads=64
        )  # fmt: skip
        assert report.of("races")

    def test_switched_off(self):
        _, report = try_run(
            self.program(self.WRITE, self.WRITE, ""), threads=64, checks=set(CHECKS) - {"races"}
        )
        assert report.ok

    def test_a_finding_is_one_readable_paragraph(self):
        _, report = try_run(self.program(self.WRITE, self.WRITE, ""), threads=64)
        text = str(report.findings[0])
        assert "\n" not in text
        for part in (
            "[races]",
            "kernel test",
            "CTA (0, 0, 0)",
            "warp ",
            "PTX line 22",
            "st.shared.b32",
            "shared+0x",
        ):
            assert part in text, part


class TestUninitialised:
    def test_shared_memory(self):
        _, report = try_run("ld.shared.b32 %r9, [%r1+64];")
        (finding,) = report.findings
        assert finding.check == "uninitialised" and "nobody has written" in finding.message

    def test_switched_off(self):
        _, report = try_run("ld.shared.b32 %r9, [%r1+64];", checks=set(CHECKS) - {"uninitialised"})
        assert report.ok


class TestTensorMemory:
    ALLOC = (
        "setp.lt.u32 %p1, %r0, 32; @!%p1 bra got;"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {columns};"
        "got: bar.sync 0; ld.shared.b32 %r2, [%r1]; shr.u32 %r3, %r0, 5; shl.b32 %r3, %r3, 21; add.u32 %r3, %r2, %r3;"
    )
    FREE = "bar.sync 0; @!%p1 bra free; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, {columns}; free:"
    USE = (
        "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3+{column}], {{%r0, %r1}}; {wait_st}"
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r4, %r5}}, [%r3+{column}]; {wait_ld} mov.u32 %r9, %r4;"
    )
    WAITS = {"wait_st": "tcgen05.wait::st.sync.aligned;", "wait_ld": "tcgen05.wait::ld.sync.aligned;"}

    def go(self, body, **options):
        return try_run(body, words=128, threads=128, arch="sm_100a", **options)

    def body(self, columns=32, column=0, free=None, **waits):
        use = self.USE.format(column=column, **{**self.WAITS, **waits})
        return (
            self.ALLOC.format(columns=columns)
            + use
            + STORE
            + (self.FREE.format(columns=columns) if free is None else free)
        )

    @pytest.mark.parametrize("schedule", ["round-robin", "random", "lazy", "eager"])
    def test_store_and_load(self, schedule):
        out, report = self.go(self.body(), schedule=schedule)
        assert report.ok, str(report)
        assert (out == np.arange(128)).all()

    def test_not_freed(self):
        _, report = self.go(self.body(free=""))
        assert "without freeing the 32 columns" in str(report.of("tensor_memory")[0])

    def test_freed_with_the_wrong_size(self):
        _, report = self.go(self.body(free=self.FREE.format(columns=64)))
        assert "which is no allocation" in str(report.of("tensor_memory")[0])

    def test_outside_the_allocation(self):
        _, report = self.go(self.body(column=40))
        assert "not allocated" in str(report.of("tensor_memory")[0])

    def test_past_the_end(self):
        _, report = self.go(self.body(columns=512, column=511))
        assert report.of("bounds")

    def test_a_number_of_columns_that_cannot_be(self):
        _, report = self.go(self.body(columns=48))
        assert "power of two" in str(report)

    def test_another_warps_lanes(self):
        _, report = self.go(self.body().replace("shr.u32 %r3, %r0, 5; shl", "mov.u32 %r3, 1; shl"))
        assert "can reach lanes" in str(report.of("tensor_memory")[0])

    def test_read_before_written(self):
        body = self.body().replace("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3+0], {%r0, %r1};", "")
        _, report = self.go(body)
        assert report.of("uninitialised")

    def test_a_missing_wait_for_a_store(self):
        for schedule in ("eager", "lazy"):
            out, report = self.go(self.body(wait_st=""), schedule=schedule)
            assert report.of("races") or report.of("uninitialised"), schedule
            assert (out == np.arange(128)).all() == (schedule == "eager")

    def test_a_missing_wait_for_a_load(self):
        _, report = self.go(self.body(wait_ld=""))
        assert report.of("tensor_load_wait")

    def test_waiting_for_columns_that_nobody_frees(self):
        twice = self.ALLOC.format(columns=512) + "@!%p1 bra again; add.u32 %r6, %r1, 8;"
        twice += "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 32; again: bar.sync 0;"
        _, report = self.go(twice)
        assert report.findings[0].check == "deadlock" and "waits for tensor memory" in str(report)


class TestReport:
    def test_counters(self):
        _, report = try_run(
            "shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; fma.rn.f32 %r4, %r2, %r3, %r2; ex2.approx.ftz.f32 %r5, %r4;"
            "st.shared.b32 [%r3], %r5; bar.sync 0; ld.shared.b32 %r6, [%r3]; st.global.b32 [%d3], %r6;",
            words=64, threads=64,
        )  # fmt: skip
        total = report.counters["total"]
        assert total["exp2"] == 64 and total["fma"] == 64
        assert total["shared_write_bytes"] == total["shared_read_bytes"] == 256
        assert total["global_write_bytes"] == 256 and total["barriers"] == 2
        assert total["instructions"] == report.instructions == 2 * (15 + 1)
        assert list(report.counters) == ["warps 0-1", "total"]

    def test_roles_are_told_apart(self):
        _, report = try_run(
            "setp.lt.u32 %p1, %r0, 32; @%p1 bra end; ex2.approx.ftz.f32 %r5, %r4; end:", threads=96
        )
        assert set(report.counters) == {"warp 0", "warps 1-2", "total"}
        assert "exp2" not in report.counters["warp 0"] and report.counters["warps 1-2"]["exp2"] == 64

    def test_events(self):
        _, report = try_run("bar.sync 0;", threads=64, events=True)
        assert [e.kind for e in report.events] == ["barrier"] * 2
        assert {e.warp for e in report.events} == {0, 1}
        _, report = try_run("bar.sync 0;", threads=64)
        assert not report.events

    def test_text(self):
        _, report = try_run("ret;")
        assert "no findings" in str(report) and "sm_90a" in str(report)

    def test_progress(self):
        seen = []
        what = launch("ret;", aligned(32), grid=3)
        Machine("sm_90a", progress=lambda done, total: seen.append((done, total))).run(what)
        assert seen == [(1, 3), (2, 3), (3, 3)]

    def test_findings_are_told_once_per_place(self):
        _, report = try_run("mov.u32 %r2, 0; loop: ld.shared.b32 %r9, [%r1+64]; add.u32 %r2, %r2, 1;"
                            "setp.lt.u32 %p1, %r2, 9;"
                            "@%p1 bra loop;", grid=4)  # fmt: skip
        assert len(report.findings) == 1


def test_a_seed_gives_the_same_run_again():
    def events(seed):
        _, report = try_run(
            "bar.sync 0; bar.sync 1, 256;bar.sync 0;", threads=256, schedule="random", seed=seed, events=True
        )
        return [(e.time, e.warp, e.detail) for e in report.events]

    assert events(1) == events(1)
    assert any(events(1) != events(seed) for seed in range(2, 6))


class TestGlobalRaces:
    def test_two_blocks_write_different_values_to_one_place(self):
        _, report = try_run("mov.u32 %r2, %ctaid.x; st.global.b32 [%d3], %r2;", grid=2)
        (finding,) = report.findings
        assert finding.check == "races" and "output at byte 0, which block 0 written" in finding.message

    def test_the_same_value_is_no_conflict(self):
        run("mov.u32 %r2, 7; st.global.b32 [%d3], %r2;", grid=2)

    def test_reductions_commute(self):
        run("red.global.add.u32 [%d3], 1;", grid=3)
        _, report = try_run("red.global.add.u32 [%d3], 1; ld.global.b32 %r9, [%d3];", grid=2)
        assert report.of("races"), "but reading a sum that is not complete is one"

    def test_warps_of_a_block(self):
        body = "st.global.b32 [%d3], %r0; {barrier} xor.b32 %r2, %r0, 32;"
        body += "mul.wide.u32 %d5, %r2, 4; add.s64 %d5, %d0, %d5; ld.global.b32 %r9, [%d5];"
        run(body.format(barrier="bar.sync 0;"), words=64, threads=64)
        _, report = try_run(body.format(barrier=""), words=64, threads=64)
        assert "which warp" in str(report.of("races")[0])

    def test_kernels_with_flags_are_trusted_across_blocks(self):
        run("mov.u32 %r2, %ctaid.x; atom.global.add.u32 %r3, [%d1], 1; st.global.b32 [%d3], %r2;", grid=2)

    def test_reading_what_a_bulk_store_has_not_finished_writing(self):
        body = (
            "shl.b32 %r4, %r0, 2; add.u32 %r4, %r1, %r4; st.shared.b32 [%r4], %r0;"
            "fence.proxy.async.shared::cta; bar.sync 0;"
            "setp.eq.u32 %p1, %r0, 0; @!%p1 bra issued;"
            "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 0; issued: bar.sync 0;"
            "ld.global.b32 %r9, [%d3];"
        )
        run(body.format(read=""))
        for schedule in ("eager", "lazy"):
            _, report = try_run(body.format(read=".read"), schedule=schedule)
            if schedule == "eager":
                assert report.of("races"), "waiting for the reads does not make the writes visible"

    def test_scratch_that_nobody_initialised(self):
        what = launch("ld.global.b32 %r9, [%d4];", aligned(32), aligned(32))
        what.buffers[1].initialised = False
        report = Machine("sm_90a").run(what)
        assert "reads input at byte 0, which nobody has written" in str(report.of("uninitialised")[0])
        what.ptx = what.ptx.replace(
            "ld.global.b32 %r9, [%d4];", "st.global.b32 [%d4], %r0;ld.global.b32 %r9, [%d4];"
        )
        assert Machine("sm_90a").run(what).ok


@pytest.mark.parametrize(
    ("body", "check"),
    [("loop: bra loop;", "deadlock"), ("bar.sync 1, 64;", "deadlock"), ("trap;", "trap"),
     ("mov.u64 %d5, 64; st.global.b32 [%d5], 1;", "bounds"), ("bar.sync 17;", "barriers")],
)  # fmt: skip
def test_what_ends_a_run_is_told_even_without_checks(body, check):
    _, report = try_run(body, checks=[])
    assert [f.check for f in report.findings][:1] == [check] and not report.ok
