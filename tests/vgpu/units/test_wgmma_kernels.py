"""wgmma and mma.sync end to end: input types, sources of A, major-ness, accumulators and signs."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import arith, descriptors, layouts
from coflash.vgpu.units.descriptors import MatrixDescriptor

from .kernels import load_all, place, registers, run, small_numbers, store_all

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
B_START = 16384


def tile(rows: int, k: int, bits: int, k_major: bool, swizzle: int, start: int) -> MatrixDescriptor:
    if k_major:
        return MatrixDescriptor(start, 128, 8 * swizzle if swizzle else 256, swizzle, 16, 0)
    if swizzle:
        across = swizzle * 8 // bits  # elements of a swizzle row
        leading = swizzle * k
        return (
            MatrixDescriptor(start, leading, 8 * swizzle, swizzle, 16, 0)
            if across <= rows
            else pytest.skip("")
        )
    return MatrixDescriptor(start, rows * 16, 128, 0, 16, 0)


def raw_descriptor(d: MatrixDescriptor) -> str:
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[d.swizzle]
    raw = d.start >> 4 | d.leading >> 4 << 16 | d.stride >> 4 << 32 | d.base_offset << 49 | mode << 62
    return f"{raw:#x}"


CASES = [
    # a, b, d, n, A from registers, A K-major, B K-major, swizzle, accumulate, signs
    ("bf16", "bf16", "f32", 64, False, True, True, 128, False, (1, 1)),
    ("bf16", "bf16", "f32", 128, False, True, False, 128, True, (1, 1)),
    ("f16", "f16", "f32", 64, False, False, False, 128, True, (-1, 1)),
    ("f16", "f16", "f16", 32, False, False, True, 64, True, (1, -1)),
    ("f16", "f16", "f32", 16, False, True, False, 32, True, (1, 1)),
    ("f16", "f16", "f32", 8, False, True, True, 0, False, (1, 1)),
    ("f16", "f16", "f32", 64, False, False, False, 0, True, (1, 1)),
    ("bf16", "bf16", "f32", 256, True, True, False, 128, True, (1, 1)),
    ("f16", "f16", "f16", 64, True, True, True, 128, True, (1, 1)),
    ("tf32", "tf32", "f32", 32, False, True, True, 128, True, (1, 1)),
    ("tf32", "tf32", "f32", 32, True, True, True, 64, True, (1, -1)),
    ("e4m3", "e5m2", "f32", 64, False, True, True, 128, True, (1, 1)),
    ("e5m2", "e4m3", "f16", 64, True, True, True, 32, False, (1, 1)),
    ("s8", "u8", "s32", 64, False, True, True, 128, True, (1, 1)),
    ("u8", "s8", "s32", 32, True, True, True, 64, True, (1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:7])))
def test_wgmma(case: tuple) -> None:
    a_type, b_type, d_type, n, from_registers, a_k, b_k, swizzle, accumulate, signs = case
    bits = BITS[a_type]
    k = 256 // bits
    rng = np.random.default_rng(5)
    a_raw, a = small_numbers(rng, (64, k), a_type)
    b_raw, b = small_numbers(rng, (n, k), b_type)
    memory = np.zeros(32768, np.uint8)
    a_tile, b_tile = tile(64, k, bits, a_k, swizzle, 0), tile(n, k, bits, b_k, swizzle, B_START)
    place(memory, descriptors.operand_offsets(a_tile, 64, k, bits, a_k), a_raw)
    place(memory, descriptors.operand_offsets(b_tile, n, k, bits, b_k), b_raw)

    row, col = layouts.wgmma_accumulator(n, 16 if d_type == "f16" else 32)
    count = row.shape[1]
    c = rng.integers(-50, 50, (64, n)).astype(np.float32)
    c_raw = c.astype(np.int32).view(np.uint32) if d_type == "s32" else arith.from_float32(c, d_type)
    given = np.zeros((1, 128, count + 4), np.uint32)
    given[0, :, :count] = np.ascontiguousarray(c_raw[row, col]).view(np.uint32).reshape(128, count)
    a_row, a_col = layouts.wgmma_a(bits)
    given[0, :, count:] = np.ascontiguousarray(a_raw[a_row, a_col]).view(np.uint32).reshape(128, 4)

    left = registers(100 + count, 4) if from_registers else "%d10"
    tail = "" if d_type == "s32" else f", {signs[0]}, {signs[1]}"
    if bits == 16:
        tail += f", {int(not b_k)}" if from_registers else f", {int(not a_k)}, {int(not b_k)}"
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type}"
    body = f"""
{load_all(100, count + 4)}
cvt.u64.u32 %d9, %r2;
shr.u64 %d9, %d9, 4;
add.s64 %d10, %d9, {raw_descriptor(a_tile)};
add.s64 %d11, %d9, {raw_descriptor(b_tile)};
setp.ne.b32 %p1, {int(accumulate)}, 0;
wgmma.fence.sync.aligned;
{name} {registers(100, count)}, {left}, %d11, %p1{tail};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{store_all(100, count + 4)}
"""
    got = run("sm_90a", body, memory, count + 4, given)[0, :, :count]
    want = (a * signs[0]).astype(np.float64) @ (b * signs[1]).astype(np.float64).T + (c if accumulate else 0)
    want_raw = (
        want.astype(np.int32).view(np.uint32)
        if d_type == "s32"
        else arith.from_float32(want.astype(np.float32), d_type)
    )
    expected = np.ascontiguousarray(want_raw[row, col]).view(np.uint32).reshape(128, count)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("shift", "base"), [(0x180, 0), (0x180, 3), (0x280, 5), (0x20, 0)])
def test_where_the_swizzle_pattern_starts(shift: int, base: int) -> None:
    """Tiles that do not begin at a multiple of 1024 bytes, with and without a base offset."""
    rng = np.random.default_rng(11)
    a_raw, a = small_numbers(rng, (64, 16), "bf16")
    b_raw, b = small_numbers(rng, (16, 16), "bf16")
    memory = np.zeros(32768, np.uint8)
    a_tile = MatrixDescriptor(0, 0, 1024, 128, 16, 0)
    b_tile = MatrixDescriptor(B_START + shift, 0, 1024, 128, 16, base)
    place(memory, descriptors.operand_offsets(a_tile, 64, 16, 16, True), a_raw)
    place(memory, descriptors.operand_offsets(b_tile, 16, 16, 16, True), b_raw)
    body = f"""
cvt.u64.u32 %d9, %r2;
shr.u64 %d9, %d9, 4;
add.s64 %d10, %d9, {raw_descriptor(a_tile)};
add.s64 %d11, %d9, {raw_descriptor(b_tile)};
setp.ne.b32 %p1, 0, 0;
{load_all(100, 8)}
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {registers(100, 8)}, %d10, %d11, %p1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{store_all(100, 8)}
"""
    got = run("sm_90a", body, memory, 8)[0]
    row, col = layouts.wgmma_accumulator(16)
    expected = (a @ b.T)[row, col].view(np.uint32).reshape(128, 8)
    np.testing.assert_array_equal(got, expected)


def test_saturating_integers() -> None:
    memory = np.zeros(32768, np.uint8)
    full = np.full((64, 32), 127, np.uint8)
    a_tile, b_tile = tile(64, 32, 8, True, 128, 0), tile(8, 32, 8, True, 128, B_START)
    place(memory, descriptors.operand_offsets(a_tile, 64, 32, 8, True), full)
    place(memory, descriptors.operand_offsets(b_tile, 8, 32, 8, True), full[:8])
    given = np.full((1, 128, 4), 2**31 - 5, np.uint32)
    for form, want in ((".satfinite", 2**31 - 1), ("", (2**31 - 5 + 32 * 127**2) % 2**32)):
        body = f"""
{load_all(100, 4)}
cvt.u64.u32 %d9, %r2;
shr.u64 %d9, %d9, 4;
add.s64 %d10, %d9, {raw_descriptor(a_tile)};
add.s64 %d11, %d9, {raw_descriptor(b_tile)};
setp.ne.b32 %p1, 1, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k32{form}.s32.s8.s8 {registers(100, 4)}, %d10, %d11, %p1;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{store_all(100, 4)}
"""
        assert (run("sm_90a", body, memory, 4, given) == want).all()


MMA = [
    ("m16n8k16", "f32", "f16", "f16", "f32"),
    ("m16n8k16", "f16", "f16", "f16", "f16"),
    ("m16n8k8", "f32", "bf16", "bf16", "f32"),
    ("m16n8k8", "f32", "tf32", "tf32", "f32"),
    ("m16n8k32", "f32", "e4m3", "e5m2", "f32"),
    ("m16n8k32", "s32", "s8", "u8", "s32"),
    ("m16n8k16", "s32", "u8", "u8", "s32"),
]


@pytest.mark.parametrize("case", MMA, ids=".".join)
def test_mma_sync(case: tuple[str, ...]) -> None:
    shape, d_type, a_type, b_type, c_type = case
    bits, k = BITS[a_type], int(case[0].split("k")[1])
    rng = np.random.default_rng(6)
    a_raw, a = small_numbers(rng, (16, k), a_type)
    b_raw, b = small_numbers(rng, (8, k), b_type)
    c = rng.integers(-50, 50, (16, 8)).astype(np.float32)
    c_raw = c.astype(np.int32).view(np.uint32) if c_type == "s32" else arith.from_float32(c, c_type)
    wide = 16 if c_type == "f16" else 32
    parts = []
    for raw, operand, width in ((a_raw, "a", bits), (b_raw.T, "b", bits), (c_raw, "c", wide)):
        index = layouts.mma_fragment(shape, operand, width)
        parts.append(np.ascontiguousarray(np.ascontiguousarray(raw)[index]).view(np.uint32).reshape(32, -1))
    counts = [p.shape[1] for p in parts]
    given = np.tile(np.concatenate(parts, 1), (4, 1))[None]
    first = np.cumsum([100, *counts])
    a_regs, b_regs, c_regs = [registers(int(f), n) for f, n in zip(first, counts, strict=False)]
    body = f"""
{load_all(100, sum(counts))}
mma.sync.aligned.{shape}.row.col.{".".join(case[1:])} {c_regs}, {a_regs}, {b_regs}, {c_regs};
{store_all(100, sum(counts))}
"""
    got = run("sm_90a", body, np.zeros(2048, np.uint8), sum(counts), given)[0]
    want = a.astype(np.float64) @ b.astype(np.float64).T + c
    want_raw = (
        want.astype(np.int32).view(np.uint32)
        if d_type == "s32"
        else arith.from_float32(want.astype(np.float32), d_type)
    )
    index = layouts.mma_fragment(shape, "d", wide)
    expected = np.ascontiguousarray(want_raw[index]).view(np.uint32).reshape(32, -1)
    np.testing.assert_array_equal(got[:, counts[0] + counts[1] :], np.tile(expected, (4, 1)))


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(num: int, trans: str) -> None:
    """Four warps load the same matrices from padded rows; one stores them elsewhere, as they were."""
    matrices = np.arange(num * 64, dtype=np.uint16).reshape(num, 8, 8)
    memory = np.zeros(4096, np.uint8)
    rows = memory[: num * 8 * 48].view(np.uint16).reshape(num * 8, 24)
    rows[:, :8] = matrices.reshape(-1, 8)
    body = f"""
and.b32 %r9, %r0, 31;
mul.lo.u32 %r10, %r9, 48;
add.s32 %r10, %r10, %r2;
ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {registers(100, num)}, [%r10];
setp.lt.u32 %p1, %r0, 32;
shl.b32 %r11, %r9, 4;
add.s32 %r11, %r11, %r2;
mov.b32 %r{100 + num}, 0;
mov.b32 %r{101 + num}, 0;
mov.b32 %r{102 + num}, 0;
mov.b32 %r{103 + num}, 0;
@!%p1 bra done;
stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [%r11+2048], {registers(100, num)};
bar.warp.sync 0xffffffff;
setp.lt.u32 %p2, %r9, {8 * num};
@%p2 ld.shared.v4.b32 {registers(100 + num, 4)}, [%r11+2048];
done:
{store_all(100, num + 4)}
"""
    got = run("sm_90a", body, memory, num + 4)[0, :32]
    expected = matrices.swapaxes(1, 2) if trans else matrices
    halves = np.ascontiguousarray(got[:, :num]).view(np.uint16).reshape(32, num, 2)
    for t in range(32):
        np.testing.assert_array_equal(halves[t], expected[:, t // 4, t % 4 * 2 : t % 4 * 2 + 2])
    stored = np.ascontiguousarray(got[: 8 * num, num:]).view(np.uint16)
    np.testing.assert_array_equal(stored, matrices.reshape(-1, 8))
