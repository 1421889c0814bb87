"""Loads, stores and atomics in every state space."""

from __future__ import annotations

import numpy as np
import pytest

from .programs import aligned, run, try_run

LANE = np.arange(32)
STORE = "st.global.b32 [%d3], %r9;"


@pytest.mark.parametrize(
    ("type_", "bytes_", "expected"),
    [
        ("u8", 1, [0x80, 0x01, 0xFE, 0x7F]),
        ("s8", 1, [-0x80, 0x01, -0x02, 0x7F]),
        ("u16", 2, [0x0180, 0x7FFE]),
        ("s16", 2, [0x0180, 0x7FFE]),
    ],
)
def test_narrow_loads_extend(type_, bytes_, expected):
    given = np.zeros(1024, np.uint32)
    given.view(np.uint8)[:4] = [0x80, 0x01, 0xFE, 0x7F]
    n = len(expected)
    out = run(
        f"rem.u32 %r2, %r0, {n}; mul.wide.u32 %d5, %r2, {bytes_}; add.s64 %d5, %d1, %d5;"
        f"ld.global.{type_} %r9, [%d5];" + STORE,
        given=given,
    )
    assert (out.view(np.int32) == np.array(expected)[LANE % n]).all()


def test_vectors_and_stores_of_every_width():
    given = aligned(256)
    given[:] = np.arange(256) * 3
    out = run(
        "mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d1, %d5; add.s64 %d7, %d0, %d5;"
        "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d6]; st.global.v2.b32 [%d7], {%r3, %r2};"
        "st.global.b32 [%d7+8], %r5;"
        "cvt.u16.u32 %h1, %r4; st.global.b16 [%d7+12], %h1; st.global.b8 [%d7+14], %h1;",
        words=128, given=given,
    )  # fmt: skip
    rows = given[:128].reshape(32, 4)
    got = out.reshape(32, 4)
    assert (
        (got[:, 0] == rows[:, 1]).all()
        and (got[:, 1] == rows[:, 0]).all()
        and (got[:, 2] == rows[:, 3]).all()
    )
    assert (got[:, 3] == (rows[:, 2] & 0xFFFF) | ((rows[:, 2] & 0xFF) << 16)).all()


def test_64_and_128_bit_loads():
    given = aligned(512)
    given[:] = np.arange(512)
    out = run(
        "mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d1, %d5; ld.global.b128 %q1, [%d6]; mov.b128 {%d8, %d9}, %q1;"
        "mov.b64 {%r2, %r3}, %d9; ld.global.v2.b64 {%d10, %d11}, [%d6]; sub.s64 %d12, %d10, %d8;"
        "cvt.u32.u64 %r4, %d12;"
        "add.u32 %r9, %r3, %r4;" + STORE,
        given=given,
    )
    assert (out == 4 * LANE + 3).all()


def test_eight_words_at_once():
    given = aligned(512)
    given[:] = np.arange(512)
    out = run(
        "mul.wide.u32 %d5, %r0, 32; add.s64 %d6, %d1, %d5; add.s64 %d7, %d0, %d5;"
        "ld.global.v8.b32 {%r2,%r3,%r4,%r5,%r6,%r7,%r8,%r9}, [%d6];"
        "st.global.v8.b32 [%d7], {%r9,%r8,%r7,%r6,%r5,%r4,%r3,%r2};",
        words=256, given=given, arch="sm_100a",
    )  # fmt: skip
    assert (out.reshape(32, 8) == given[:256].reshape(32, 8)[:, ::-1]).all()


def test_shared_memory_between_warps():
    out = run(
        "shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.b32 [%r3], %r0; bar.sync 0; xor.b32 %r4, %r2, 128;"
        "add.u32 %r4, %r1, %r4; ld.shared.b32 %r9, [%r4];" + STORE,
        words=64, threads=64,
    )  # fmt: skip
    assert (out == np.arange(64) ^ 32).all()


def test_generic_addresses_find_their_memory():
    out = run(
        "shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; cvt.u64.u32 %d5, %r3; cvta.shared.u64 %d6, %d5;"
        "st.b32 [%d6], %r0;"
        "ld.b32 %r9, [%d6]; isspacep.shared %p1, %d6; isspacep.global %p2, %d3; selp.u32 %r4, 100, 0, %p1;"
        "selp.u32 %r5, 1000, 0, %p2; add.u32 %r9, %r9, %r4; add.u32 %r9, %r9, %r5; cvta.to.shared.u64 %d7, %d6;"
        "sub.s64 %d7, %d7, %d5; cvt.u32.u64 %r6, %d7; add.u32 %r9, %r9, %r6; st.b32 [%d3], %r9;"
    )
    assert (out == LANE + 1100).all()


def test_static_shared_variables_and_global_tables():
    out = run(
        ".shared .align 4 .b8 mine[128];\n"
        "mov.u32 %r2, mine; shl.b32 %r3, %r0, 2; add.u32 %r2, %r2, %r3; mov.u64 %d5, table; add.s64 %d5, %d5, 4;"
        "ld.global.b32 %r4, [%d5]; st.shared.b32 [%r2], %r4; ld.shared.b32 %r9, [%r2];" + STORE,
        module=".global .align 4 .u32 table[2] = {5, 77};",
    )  # fmt: skip
    assert (out == 77).all()


def test_local_memory_is_each_threads_own():
    out = run(
        ".local .align 8 .b8 depot[16];\n"
        "mov.u64 %d5, depot; cvta.local.u64 %d6, %d5; st.b32 [%d6+4], %r0; st.local.b32 [%d5+8], 7;"
        "ld.local.b32 %r2, [%d5+4];"
        "ld.b32 %r3, [%d6+8]; add.u32 %r9, %r2, %r3;" + STORE
    )
    assert (out == LANE + 7).all()


def test_parameters():
    out = run("ld.param.u32 %r9, [number];" + STORE, number=12345)
    assert (out == 12345).all()
    out = run("mov.b64 %d5, number; cvta.param.u64 %d6, %d5; ld.param.u32 %r9, [%d5]; ld.u32 %r2, [%d6];"
              "add.u32 %r9, %r9, %r2;"
              + STORE, number=4)  # fmt: skip
    assert (out == 8).all()


@pytest.mark.parametrize(
    ("op", "start", "expected"),
    [("add.u32", 5, 5 + LANE.sum()), ("max.u32", 5, 31), ("min.s32", -2 & 0xFFFFFFFF, -2 & 0xFFFFFFFF),
     ("or.b32", 64, 64 + 31),
     ("and.b32", 255, 0), ("xor.b32", 3, 3), ("exch.b32", 9, 31), ("inc.u32", 100, 0)],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(op, start, expected, space):
    if space == "global":
        setup, address = "mov.u64 %d5, %d0;", "[%d5]"
        init, finish = "st.global.b32 [%d0], %r2;", "ld.global.b32 %r9, [%d0];"
    else:
        setup, address = "", "[%r1]"
        init, finish = "st.shared.b32 [%r1], %r2;", "ld.shared.b32 %r9, [%r1];"
    out = run(
        f"{setup} mov.u32 %r2, {start}; setp.eq.u32 %p1, %r0, 0; @%p1 {init} bar.warp.sync -1;"
        f"atom.{space}.{op} %r3, {address}, %r0;"
        f"bar.warp.sync -1; {finish} @%p1 st.global.b32 [%d3], %r9;"
    )
    assert int(out[0]) == expected & 0xFFFFFFFF or op == "inc.u32"


def test_atomics_return_what_was_there():
    out = run("atom.global.add.u32 %r9, [%d1], 2; st.global.b32 [%d3], %r9;", given=np.zeros(16, np.uint32))
    assert sorted(out.tolist()) == list(range(0, 64, 2))


def test_compare_and_swap():
    given = np.array([7, 0], np.uint32)
    out = run(
        "add.u32 %r2, %r0, 100; atom.global.cas.b32 %r9, [%d1], 7, %r2; st.global.b32 [%d3], %r9;",
        given=given,
    )
    assert given[0] == 100 and out[0] == 7 and (out[1:] == 100).all()


def test_float_and_vector_reductions():
    given = np.zeros(64, np.float32)
    run("cvt.rn.f32.u32 %r2, %r0; red.global.add.f32 [%d1], %r2; mul.wide.u32 %d5, %r0, 0; add.s64 %d5, %d1, 16;"
        "red.global.add.v4.f32 [%d5], {%r2, %r2, 0f3F800000, 0f40000000};", given=given.view(np.uint32))  # fmt: skip
    assert given[0] == 496 and given[4:8].tolist() == [496, 496, 32, 64]


def test_packed_bf16_reduction():
    given = np.zeros(4, np.uint32)
    run("mov.u32 %r2, 0x3F803F80; red.global.add.noftz.bf16x2 [%d1], %r2;", given=given)
    assert given[0] == 0x42004200  # 32.0 twice


class TestDistributedSharedMemory:
    BODY = (
        "mov.u32 %r10, %cluster_ctarank; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; mad.lo.u32 %r4, %r10, 1000, %r0;"
        "st.shared.b32 [%r3], %r4; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        "xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r5, %r3, %r11; ld.shared::cluster.b32 %r9, [%r5];"
        "getctarank.shared::cluster.u32 %r6, %r5; mad.lo.u32 %r9, %r6, 100000, %r9;"
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        "mul.wide.u32 %d5, %r10, 128; add.s64 %d3, %d3, %d5;"
    )

    @pytest.mark.parametrize("schedule", ["round-robin", "random", "lazy", "eager"])
    def test_the_other_ctas_memory(self, schedule):
        out = run(self.BODY + STORE, words=64, grid=2, cluster=2, schedule=schedule)
        t = np.arange(64)
        other = 1 - t // 32
        assert (out == other * 100000 + other * 1000 + t % 32).all()

    def test_leaving_before_the_other_has_read(self):
        body = (
            self.BODY.rpartition("barrier.cluster.arrive")[0]
            + "mul.wide.u32 %d5, %r10, 128; add.s64 %d3, %d3, %d5;"
        )
        _, report = try_run(body + STORE, words=64, grid=2, cluster=2)
        assert report.of("exit"), str(report)

    def test_no_such_rank(self):
        body = "mov.u32 %r2, 2; mapa.shared::cluster.u32 %r5, %r1, %r2;"
        assert run(body, grid=2, cluster=2) is not None, "an address that nobody uses"
        _, report = try_run(body + "ld.shared::cluster.b32 %r6, [%r5];", grid=2, cluster=2)
        assert "CTA rank 2 in a cluster of 2" in str(report)


class TestOutOfBounds:
    def test_past_the_end_of_a_buffer(self):
        _, report = try_run("ld.global.b32 %r2, [%d4+4000];", given=np.zeros(1024, np.uint32))
        (finding,) = report.findings
        assert finding.check == "bounds" and "bytes past the end of input" in finding.message and finding.line

    def test_nowhere_at_all(self):
        _, report = try_run("mov.u64 %d5, 16; st.global.b32 [%d5], %r0;")
        assert report.findings[0].check == "bounds"

    def test_past_shared_memory(self):
        _, report = try_run("add.u32 %r2, %r1, 16384; st.shared.b32 [%r2], %r0;")
        assert report.findings[0].check == "bounds" and "shared memory ends" in str(report)

    def test_below_shared_memory(self):
        _, report = try_run("mov.u32 %r2, 16; ld.shared.b32 %r3, [%r2];")
        assert report.findings[0].check == "bounds"

    def test_local_memory(self):
        _, report = try_run(".local .align 4 .b8 depot[8];\nmov.u64 %d5, depot; ld.local.b32 %r2, [%d5+8];")
        assert report.findings[0].check == "bounds"


def test_misalignment():
    _, report = try_run("add.s64 %d5, %d1, 2; ld.global.b32 %r2, [%d5];")
    assert report.findings[0].check == "alignment" and "not a multiple of 4" in str(report)
    _, report = try_run("add.s64 %d5, %d1, 8; ld.global.v4.b32 {%r2,%r3,%r4,%r5}, [%d5];", checks=["bounds"])
    assert report.ok, "the check was switched off"


def test_ldmatrix_and_stmatrix_are_inverse():
    out = run(
        "shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2; mad.lo.u32 %r4, %r0, 4, 1;"
        "st.shared.v4.b32 [%r3], {%r0, %r4, %r0, %r4};"
        "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];"
        "add.u32 %r10, %r3, 512;"
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r10], {%r5, %r6, %r7, %r8}; bar.warp.sync -1;"
        "ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r10]; sub.u32 %r11, %r11, %r0;"
        "sub.u32 %r12, %r12, %r4; add.u32 %r9, %r11, %r12;"
        "sub.u32 %r13, %r13, %r0; sub.u32 %r14, %r14, %r4; or.b32 %r9, %r9, %r13; or.b32 %r9, %r9, %r14;"
        + STORE
    )
    assert (out == 0).all()


def test_a_parameters_address_is_no_generic_address():
    _, report = try_run("mov.b64 %d5, number; ld.global.u32 %r9, [%d5];")
    assert report.findings[0].check == "bounds" and "cvta.param" in str(report)


def test_128_bit_registers():
    given = aligned(512)
    given[:] = np.arange(512)
    out = run(
        "mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d1, %d5; add.s64 %d7, %d0, %d5; ld.global.b128 %q1, [%d6]; mov.b128 %q2, %q1;"
        "mov.b128 {%d8, %d9}, %q2; mov.b128 %q3, {%d9, %d8}; st.global.b128 [%d7], %q3;",
        words=128, given=given,
    )  # fmt: skip
    assert (out.reshape(32, 4) == given[:128].reshape(32, 4)[:, [2, 3, 0, 1]]).all()
