"""Tensor copies end to end: loads, multicast, stores, reductions through tensor maps; plain bulk copies."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu import tensormap
from coflash.vgpu.launch import Buffer, Launch
from coflash.vgpu.machine import Machine
from coflash.vgpu.tensormap import TensorMap

from .on_hardware import Watch
from .test_tma import swizzle

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 map[128], .param .u64 other)
{
.reg .pred %p<16>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b64 %d<32>;
mov.b64 %d0, map;
cvta.param.u64 %d0, %d0;
ld.param.b64 %d1, [other];
mov.u32 %r0, %tid.x;
mov.u32 %r2, smem;
setp.eq.u32 %p11, %r0, 0;
"""
BARRIER = 32768
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def run(
    body: str, map_: TensorMap, buffers: list[Buffer], other: int, ctas: int = 1, schedule: str = "lazy"
) -> None:
    params = tensormap.encode(map_).ljust(128, b"\0") + other.to_bytes(8, "little")
    launch = Launch(
        HEAD + body + "\nret;\n}\n",
        "test",
        (ctas, 1, 1),
        (128, 1, 1),
        params,
        cluster=(ctas, 1, 1),
        shared_bytes=BARRIER + 1024,
        buffers=buffers,
    )
    watch = Watch(launch, map_)
    report = Machine(arch="sm_90a", schedule=schedule, seed=3).run(launch)
    assert not report.findings, "\n\n".join(str(f) for f in report.findings)
    watch.finished()


def make_map(array: np.ndarray, element: str, box: tuple[int, ...], span: int = 0) -> TensorMap:
    shape, strides = array.shape[::-1], array.strides[::-1]
    return TensorMap(array.ctypes.data, element, shape, strides, box, (1,) * len(shape), span)


WAIT = f"""
again:
mbarrier.try_wait.parity.shared.b64 %p12, [%r2+{BARRIER}], 0;
@!%p12 bra again;
"""


def dump(count: int) -> str:
    """Every thread copies its 16-byte pieces of shared memory to `other` (CTA after CTA)."""
    lines = ["mov.u32 %r9, %ctaid.x;", f"mul.wide.u32 %d8, %r9, {count};", "add.s64 %d1, %d1, %d8;"]
    lines += [
        "shl.b32 %r10, %r0, 4;",
        "add.s32 %r11, %r10, %r2;",
        "cvt.u64.u32 %d7, %r10;",
        "add.s64 %d7, %d7, %d1;",
    ]
    for offset in range(0, count, 2048):
        lines.append(f"ld.shared.v4.b32 {{%r12, %r13, %r14, %r15}}, [%r11+{offset}];")
        lines.append(f"st.global.v4.b32 [%d7+{offset}], {{%r12, %r13, %r14, %r15}};")
    return "\n".join(lines)


def laid_out(box: np.ndarray, span: int) -> np.ndarray:
    """A dense box (bytes [rows, row bytes]) as the swizzle stores it from address 0."""
    flat = box.reshape(-1)
    out = np.zeros_like(flat)
    for i in range(0, flat.size, 16):
        target = swizzle(i, span, 16)
        out[target : target + 16] = flat[i : i + 16]
    return out


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
@pytest.mark.parametrize(("span", "first", "row"), [(128, 0, 8), (128, 0, 60), (64, 32, 56), (0, -8, -3)])
def test_load(span: int, first: int, row: int, schedule: str) -> None:
    source = np.random.default_rng(1).integers(0, 65536, (72, 64), dtype=np.uint16)
    columns = 32 if span == 64 else 64
    map_ = make_map(source, "bf16", (columns, 16), span)
    got = np.zeros(2048, np.uint8)
    body = f"""
@%p11 mbarrier.init.shared.b64 [%r2+{BARRIER}], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p11 mbarrier.arrive.expect_tx.shared.b64 _, [%r2+{BARRIER}], {columns * 32};
mov.b32 %r3, {first};
mov.b32 %r4, {row};
add.s32 %r5, %r2, {BARRIER};
@%p11 {LOAD} [%r2], [%d0, {{%r3, %r4}}], [%r5];
{WAIT}
setp.lt.u32 %p1, %r0, {columns * 2};
@!%p1 bra out;
{dump(2048)}
out:
"""
    run(body, map_, [Buffer.of(source, "source"), Buffer.of(got, "got")], got.ctypes.data, schedule=schedule)
    padded = np.zeros((72 + 40, 64 + 128), np.uint16)
    padded[20:92, 64:128] = source
    box = np.ascontiguousarray(padded[20 + row : 36 + row, 64 + first : 64 + first + columns])
    np.testing.assert_array_equal(got[: columns * 32], laid_out(box.view(np.uint8), span))


def test_multicast() -> None:
    """One CTA of a pair loads for both; each waits at its own mbarrier."""
    source = np.random.default_rng(2).integers(0, 65536, (32, 64), dtype=np.uint16)
    map_ = make_map(source, "f16", (64, 16), 128)
    got = np.zeros((2, 2048), np.uint8)
    body = f"""
@%p11 mbarrier.init.shared.b64 [%r2+{BARRIER}], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p11 mbarrier.arrive.expect_tx.shared.b64 _, [%r2+{BARRIER}], 2048;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r6, %cluster_ctarank;
setp.eq.and.u32 %p13, %r6, 1, %p11;
mov.b32 %r3, 0;
mov.b32 %r4, 4;
mov.b16 %h1, 3;
add.s32 %r5, %r2, {BARRIER};
@%p13 {LOAD}.multicast::cluster [%r2], [%d0, {{%r3, %r4}}], [%r5], %h1;
{WAIT}
{dump(2048)}
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    run(body, map_, [Buffer.of(source, "source"), Buffer.of(got, "got")], got.ctypes.data, ctas=2)
    want = laid_out(np.ascontiguousarray(source[4:20]).view(np.uint8), 128)
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], want)


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
@pytest.mark.parametrize("operation", ["store", "add", "max"])
def test_store_and_reduce(operation: str, schedule: str) -> None:
    """A 16 x 32 tile at the lower right edge: what lies outside is not written."""
    rng = np.random.default_rng(3)
    element, dtype = ("s32", np.int32) if operation == "max" else ("f32", np.float32)
    target = rng.integers(-50, 50, (40, 64)).astype(dtype)
    tile = rng.integers(-50, 50, (16, 32)).astype(dtype)
    before = target.copy()
    map_ = make_map(target, element, (32, 16), 128)
    image = laid_out(tile.view(np.uint8), 128)
    verb = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    if operation != "store":
        verb = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    body = f"""
shl.b32 %r10, %r0, 4;
add.s32 %r11, %r10, %r2;
cvt.u64.u32 %d7, %r10;
add.s64 %d7, %d7, %d1;
ld.global.v4.b32 {{%r12, %r13, %r14, %r15}}, [%d7];
st.shared.v4.b32 [%r11], {{%r12, %r13, %r14, %r15}};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b32 %r3, 32;
mov.b32 %r4, 30;
@!%p11 bra out;
{verb} [%d0, {{%r3, %r4}}], [%r2];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
out:
"""
    run(
        body,
        map_,
        [Buffer.of(target, "target"), Buffer.of(image, "image")],
        image.ctypes.data,
        schedule=schedule,
    )
    want = before.copy()
    part = want[30:40, 32:64]
    combine = {"store": lambda a, b: b, "add": np.add, "max": np.maximum}[operation]
    part[:] = combine(part, tile[:10])
    np.testing.assert_array_equal(target, want)


def test_plain_bulk_copies() -> None:
    """Global to shared with an mbarrier, and an adding bulk copy back."""
    source = np.arange(512, dtype=np.float32)
    target = np.full(512, 0.5, np.float32)
    body = f"""
@%p11 mbarrier.init.shared.b64 [%r2+{BARRIER}], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@!%p11 bra out;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2+{BARRIER}], 2048;
add.s32 %r5, %r2, {BARRIER};
ld.param.b64 %d2, [map];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d2], 2048, [%r5];
{WAIT}
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r2], 2048;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
out:
"""
    # The map's first word is its address: a convenient second pointer.
    map_ = make_map(source, "f32", (4,))
    run(body, map_, [Buffer.of(source, "source"), Buffer.of(target, "target")], target.ctypes.data)
    np.testing.assert_array_equal(target, source + 0.5)
