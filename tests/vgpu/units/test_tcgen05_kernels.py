"""tcgen05 end to end: kinds, types, shapes, pairs, A in tensor memory, loads, stores, copies, shifts."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import arith, descriptors, tmem
from coflash.vgpu.units.descriptors import MatrixDescriptor

from .kernels import THREADS, load_all, place, registers, run, small_numbers, store_all

B_START, BYTES = 16384, 49152
SLOT, BARRIER = BYTES, BYTES + 16  # in the shared memory behind the image
FORMAT = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
}
D_FORMAT = {"f16": 0, "f32": 1, "s32": 2}


def prologue(columns: int, ctas: int = 1) -> str:
    """Warp 0 allocates; %r20 is the tensor memory address, %r21 the warp's lanes in it. One mbarrier."""
    cluster = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" if ctas == 2 else ""
    return f"""
setp.lt.u32 %p10, %r0, 32;
setp.eq.u32 %p11, %r0, 0;
@%p10 tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [%r2+{SLOT}], {columns};
@%p10 tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;
@%p11 mbarrier.init.shared.b64 [%r2+{BARRIER}], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
{cluster}
ld.shared.b32 %r20, [%r2+{SLOT}];
and.b32 %r21, %r0, 96;
shl.b32 %r21, %r21, 16;
add.s32 %r21, %r21, %r20;
cvt.u64.u32 %d9, %r2;
shr.u64 %d9, %d9, 4;
"""


def epilogue(columns: int, ctas: int = 1) -> str:
    cluster = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" if ctas == 2 else ""
    return f"""
tcgen05.fence::before_thread_sync;
bar.sync 0;
{cluster}
@%p10 tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %r20, {columns};
"""


WAIT = f"""
again:
mbarrier.try_wait.parity.shared.b64 %p12, [%r2+{BARRIER}], 0;
@!%p12 bra again;
tcgen05.fence::after_thread_sync;
"""
SYNC = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
"""


def write_columns(first: int, count: int, column: int = 0) -> str:
    lines = [load_all(first, count)]
    for c in range(0, count, 32):
        n = min(32, count - c)
        lines.append(
            f"tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%r21+{column + c}], {registers(first + c, n)};"
        )
    return "\n".join([*lines, "tcgen05.wait::st.sync.aligned;"])


def read_columns(first: int, count: int, column: int = 0) -> str:
    lines = []
    for c in range(0, count, 32):
        n = min(32, count - c)
        lines.append(
            f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {registers(first + c, n)}, [%r21+{column + c}];"
        )
    return "\n".join([*lines, "tcgen05.wait::ld.sync.aligned;", store_all(first, count)])


def tile(rows: int, k: int, bits: int, k_major: bool, swizzle: int, start: int) -> MatrixDescriptor:
    bits = max(bits, 8)
    if k_major:
        return MatrixDescriptor(start, 128, 8 * swizzle if swizzle else 256, swizzle, 16, 0)
    if swizzle:
        atom, depth = (32, 4) if bits == 32 else (16, 8)
        return MatrixDescriptor(start, swizzle * k, depth * swizzle, swizzle, atom, 0)
    return MatrixDescriptor(start, rows * 16, 128, 0, 16, 0)


def raw_descriptor(d: MatrixDescriptor) -> str:
    mode = {(0, 16): 0, (128, 32): 1, (128, 16): 2, (64, 16): 4, (32, 16): 6}[(d.swizzle, d.atom)]
    return f"{d.start >> 4 | d.leading >> 4 << 16 | d.stride >> 4 << 32 | 1 << 46 | mode << 61:#x}"


def fill(memory: np.ndarray, d: MatrixDescriptor, raw: np.ndarray, bits: int, k_major: bool) -> None:
    rows, k = raw.shape
    if bits >= 8:
        place(memory, descriptors.operand_offsets(d, rows, k, bits, k_major), raw)
        return
    chunks = descriptors.operand_chunks(d, rows, k, bits, k_major)
    for r in range(rows):
        for c in range(k // 16):
            word = sum(int(v) << (bits * i) for i, v in enumerate(raw[r, 16 * c : 16 * c + 16]))
            memory[chunks[r, c] : chunks[r, c] + 16] = np.frombuffer(word.to_bytes(16, "little"), np.uint8)


CASES = [
    # kind, a, b, d, m, n, pair, ws, A in tensor memory, A K-major, B K-major, swizzle, accumulate, negate
    ("f16", "bf16", "bf16", "f32", 128, 64, 1, False, False, True, True, 128, True, 0),
    ("f16", "f16", "f16", "f32", 128, 128, 1, False, False, False, False, 128, True, 1),
    ("f16", "f16", "f16", "f16", 128, 32, 1, False, False, True, False, 64, True, 2),
    ("f16", "f16", "f16", "f32", 64, 64, 1, False, False, True, True, 32, True, 0),
    ("f16", "bf16", "bf16", "f32", 64, 24, 1, False, True, True, True, 0, True, 0),
    ("f16", "bf16", "bf16", "f32", 128, 64, 1, False, True, True, False, 128, True, 0),
    ("tf32", "tf32", "tf32", "f32", 128, 64, 1, False, False, True, True, 128, True, 0),
    ("tf32", "tf32", "tf32", "f32", 128, 64, 1, False, False, False, False, 128, True, 0),
    ("tf32", "tf32", "tf32", "f32", 128, 16, 1, False, True, True, True, 64, False, 0),
    ("f8f6f4", "e4m3", "e5m2", "f32", 128, 64, 1, False, False, True, True, 128, True, 0),
    ("f8f6f4", "e4m3", "e4m3", "f32", 128, 64, 1, False, False, False, True, 128, True, 0),
    ("f8f6f4", "e2m1", "e3m2", "f32", 128, 64, 1, False, False, True, True, 128, True, 0),
    ("f8f6f4", "e2m3", "e4m3", "f16", 64, 8, 1, False, False, True, True, 0, True, 0),
    ("i8", "s8", "u8", "s32", 128, 64, 1, False, False, True, True, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 32, 64, 1, True, False, True, True, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 64, 128, 1, True, False, True, True, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 128, 64, 1, True, False, True, False, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 256, 64, 2, False, False, True, True, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 128, 64, 2, False, False, True, True, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 256, 128, 2, False, True, True, False, 128, True, 0),
    ("f16", "bf16", "bf16", "f32", 128, 128, 2, False, True, True, True, 64, True, 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:12])))
def test_mma(case: tuple) -> None:
    kind, a_type, b_type, d_type, m, n, pair, ws, a_in_tensor, a_k, b_k, swizzle, accumulate, negate = case
    a_bits, b_bits = descriptors.ELEMENT_BITS[a_type], descriptors.ELEMENT_BITS[b_type]
    k = descriptors.k_of(kind)
    rng = np.random.default_rng(7)
    a_raw, a = small_numbers(rng, (m, k), a_type)
    b_raw, b = small_numbers(rng, (n, k), b_type)
    memory = np.zeros((pair, BYTES), np.uint8)
    own_m, own_n = m // pair, n // pair
    a_tile, b_tile = tile(own_m, k, a_bits, a_k, swizzle, 0), tile(own_n, k, b_bits, b_k, swizzle, B_START)
    for r in range(pair):
        fill(memory[r], a_tile, a_raw[r * own_m : (r + 1) * own_m], a_bits, a_k)
        fill(memory[r], b_tile, b_raw[r * own_n : (r + 1) * own_n], b_bits, b_k)

    # The accumulator's columns, then A's.
    rank, lane, column = tmem.accumulator(m, n, pair, ws)
    width, a_words = 128, k * a_bits // 32
    c = rng.integers(-50, 50, (m, n)).astype(np.float32)
    c_raw = (
        c.astype(np.int32).view(np.uint32)
        if d_type == "s32"
        else arith.from_float32(c, d_type).astype(np.uint32)
    )
    given = np.zeros((pair, THREADS, width + 32), np.uint32)
    given[rank, lane, column] = c_raw
    if a_in_tensor:
        ranks, lanes = tmem.a_operand(m, pair, ws)
        words = np.ascontiguousarray(a_raw).view(np.uint32)
        for copy in range(len(ranks)):
            given[ranks[copy], lanes[copy], width : width + a_words] = words

    idesc = D_FORMAT[d_type] << 4 | FORMAT[kind][a_type] << 7 | FORMAT[kind][b_type] << 10
    idesc |= (negate & 1) << 13 | (negate >> 1) << 14 | (not a_k) << 15 | (not b_k) << 16
    idesc |= n >> 3 << 17 | m >> 4 << 24
    left = f"[%r22+{width}]" if a_in_tensor else "%d10"
    commit = f"tcgen05.commit.cta_group::{pair}.mbarrier::arrive::one.shared::cluster"
    if pair == 2:
        commit += f".multicast::cluster.b64 [%r2+{BARRIER}], %h1;"
    else:
        commit += f".b64 [%r2+{BARRIER}];"
    sync = (
        SYNC
        if pair == 1
        else SYNC.replace(
            "bar.sync 0;", "bar.sync 0;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
        )
    )
    body = f"""
{prologue(256, pair)}
{write_columns(100, width + 32)}
{sync}
mov.b16 %h1, 3;
mov.b32 %r22, %r20;
mov.u32 %r23, %cluster_ctarank;
setp.eq.and.u32 %p13, %r23, 0, %p11;
add.s64 %d10, %d9, {raw_descriptor(a_tile)};
add.s64 %d11, %d9, {raw_descriptor(b_tile)};
mov.b32 %r24, {idesc:#x};
setp.ne.b32 %p14, {int(accumulate)}, 0;
@%p13 tcgen05.mma{".ws" if ws else ""}.cta_group::{pair}.kind::{kind} [%r20], {left}, %d11, %r24, %p14;
@%p13 {commit}
{WAIT}
{read_columns(100, width)}
{epilogue(256, pair)}
"""
    wide = np.zeros((pair, THREADS, width + 32), np.uint32)
    wide[:] = given
    got = run("sm_100a", body, memory, width + 32, wide, ctas=pair)
    # store_all wrote `width` words a thread, densely.
    got = got.reshape(pair, -1)[:, : THREADS * width].reshape(pair, THREADS, width)
    signs = (-1 if negate & 1 else 1) * (-1 if negate & 2 else 1)
    want = signs * (a.astype(np.float64) @ b.astype(np.float64).T) + (c if accumulate else 0)
    if d_type == "s32":
        want_raw = want.astype(np.int32).view(np.uint32)
    else:
        want_raw = arith.from_float32(want.astype(np.float32), d_type).astype(np.uint32)
    np.testing.assert_array_equal(got[rank, lane, column], want_raw)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
@pytest.mark.parametrize(
    "form", ["32x32b.x8", "16x64b.x4", "16x128b.x2", "16x256b.x1", "16x32bx2.x2", "16x64b.x2.16b"]
)
def test_store_and_load(form: str, schedule: str) -> None:
    """What st writes in one shape, ld reads back in the same shape and, word by word, in 32x32b."""
    shape, repeat, *packed = form.split(".")
    num = int(repeat[1:])
    split = ", 16" if shape == "16x32bx2" else ""
    count = tmem.registers(shape, num)
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    rng = np.random.default_rng(8)
    given = rng.integers(0, 2**32, (1, THREADS, 32), dtype=np.uint32)
    body = f"""
{prologue(32)}
{write_columns(100, 32)}
{load_all(100, 32)}
tcgen05.st.sync.aligned.{shape}.x{num}{unpack}.b32 [%r21]{split}, {registers(100, count)};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.{shape}.x{num}{pack}.b32 {registers(200, count)}, [%r21]{split};
tcgen05.wait::ld.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(216, 32)}, [%r21];
tcgen05.wait::ld.sync.aligned;
{"".join(f"mov.b32 %r{200 + i}, 0;" for i in range(count, 16))}
{store_all(200, 48)}
{epilogue(32)}
"""
    wide = np.zeros((1, THREADS, 48), np.uint32)
    wide.reshape(-1)[: THREADS * 32] = given.reshape(-1)
    got = run("sm_100a", body, np.zeros(2048, np.uint8), 48, wide, extra_shared=BYTES, schedule=schedule)[0]
    np.testing.assert_array_equal(got[:, :count], given[0, :, :count])
    memory = given[0].copy()
    lane, column = tmem.ldst(shape, num, 16 if split else 0, bool(packed))
    for w in range(4):
        values = given[0, 32 * w : 32 * w + 32, :count]
        if packed:
            memory[lane[..., 0] + 32 * w, column[..., 0]] = values & 0xFFFF
            memory[lane[..., 1] + 32 * w, column[..., 1]] = values >> 16
        else:
            memory[lane + 32 * w, column] = values
    np.testing.assert_array_equal(got[:, 16:], memory)


@pytest.mark.parametrize(
    "form",
    ["128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4", "4x256b"],
)
def test_copy_from_shared_memory(form: str) -> None:
    shape, _, multicast = form.partition(".")
    plan = tmem.cp(shape, multicast)
    rng = np.random.default_rng(9)
    rows = rng.integers(0, 2**32, (plan.rows, plan.words), dtype=np.uint32)
    memory = np.zeros(16384, np.uint8)
    d = MatrixDescriptor(0, 128, 128 * plan.words // 4, 0, 16, 0)
    padded = max(plan.rows, 8)
    offsets = descriptors.operand_offsets(d, padded, 4 * plan.words, 8, True)[: plan.rows]
    place(memory, offsets, rows.view(np.uint8))
    body = f"""
{prologue(32)}
{write_columns(100, 32)}
{SYNC}
add.s64 %d10, %d9, {raw_descriptor(d)};
@%p11 tcgen05.cp.cta_group::1.{form} [%r20+8], %d10;
@%p11 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+{BARRIER}];
{WAIT}
{read_columns(100, 32)}
{epilogue(32)}
"""
    got = run("sm_100a", body, memory, 32, extra_shared=BYTES)[0]
    want = np.zeros((128, 32), np.uint32)
    for row, lanes in enumerate(plan.lanes):
        want[lanes, 8 : 8 + plan.words] = rows[row]
    np.testing.assert_array_equal(got, want)


def test_shift() -> None:
    given = np.random.default_rng(10).integers(0, 2**32, (1, THREADS, 32), dtype=np.uint32)
    body = f"""
{prologue(32)}
{write_columns(100, 32)}
{SYNC}
add.s32 %r22, %r20, 0x200008;
@%p11 tcgen05.shift.cta_group::1.down [%r22];
@%p11 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+{BARRIER}];
{WAIT}
{read_columns(100, 32)}
{epilogue(32)}
"""
    got = run("sm_100a", body, np.zeros(2048, np.uint8), 32, given, extra_shared=BYTES)[0]
    want = given[0].copy()
    want[32:63, 8:16] = given[0, 33:64, 8:16]
    np.testing.assert_array_equal(got, want)
