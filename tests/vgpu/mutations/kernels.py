"""Two small kernels, written by hand, that use every kind of synchronisation attention kernels use.

`hopper`: a cluster of two CTAs computes bfloat16 C = A Bᵀ. A producer warp fills a ring of two stages by
TMA, B by multicast from both CTAs; a warpgroup multiplies with wgmma and frees a stage in both CTAs; C
leaves by TMA.

`blackwell`: one CTA computes C = bfloat16(A Bᵀ) Vᵀ. A producer warp fills the ring, one thread issues
tcgen05.mma, the first product goes from tensor memory through registers back into tensor memory as the
second one's A operand.

Inputs are small integers, so every sum is exact and the right C is known to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coflash.vgpu import Buffer, Launch
from coflash.vgpu.tensormap import TensorMap, encode

BLOCKS = 6  # of 64 columns of A and B: three rounds of a ring of two stages


_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def _wait(barrier: str, parity: str, label: str) -> str:
    return f"""
{label}:
  mbarrier.try_wait.parity.shared::cta.b64 %ready, [{barrier}], {parity};
  @!%ready bra {label};"""


def _registers(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%f{first + i}" for i in range(count)) + "}"


_THREAD = """\
  mov.u32 %thread, %tid.x;
  shr.u32 %warp, %thread, 5;
  and.b32 %lane, %thread, 31;
  mov.u32 %smem, smem;"""


def _maps(names: str) -> str:
    """Addresses of the tensor maps of these names."""
    return "\n".join(f"  mov.u64 %m{n}, map_{n};\n  cvta.param.u64 %m{n}, %m{n};" for n in names)


# The stage of round %i, its barriers, and where its tiles of A and B lie.
_PHASE = """\
  and.b32 %stage, %i, 1;
  shr.u32 %phase, %i, 1;
  and.b32 %phase, %phase, 1;"""
_BARRIERS = """\
  shl.b32 %x, %stage, 3;
  add.u32 %full, %bars, %x;
  add.u32 %empty, %full, 16;"""
_HOPPER_TILES = """\
  shl.b32 %x, %stage, 13;
  add.u32 %a, %smem, %x;
  add.u32 %b, %a, 16384;"""
_BLACKWELL_TILES = """\
  shl.b32 %x, %stage, 14;
  add.u32 %a, %smem, %x;
  shl.b32 %x, %stage, 13;
  add.u32 %b, %smem, %x;
  add.u32 %b, %b, 32768;"""


def _descriptor(tile: str) -> str:
    return f"""\
  shr.u32 %x, %{tile}, 4;
  cvt.u64.u32 %wide, %x;
  or.b64 %desc_{tile}, %wide, %fixed;"""


# ---- Hopper ---------------------------------------------------------------------------------------------

_WGMMA = "\n".join(
    f"""  add.s64 %da, %desc_a, {2 * k};
  add.s64 %db, %desc_b, {2 * k};
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {_registers(32)}, %da, %db, %accumulate, 1, 1, 0, 0;
  setp.eq.u32 %accumulate, 0, 0;"""
    for k in range(4)
)
_STORE_ACCUMULATOR = "\n".join(
    f"""  cvt.rn.bf16x2.f32 %pair, %f{4 * j + 1}, %f{4 * j};
  st.shared.b32 [%c_row+{16 * j}], %pair;
  cvt.rn.bf16x2.f32 %pair, %f{4 * j + 3}, %f{4 * j + 2};
  st.shared.b32 [%c_row+{1024 + 16 * j}], %pair;"""
    for j in range(8)
)

# Shared memory: A stages at 0 and 8192, B stages at 16384 and 24576, C at 32768, barriers at 40960:
# full 0 and 1, empty 0 and 1.
HOPPER = f"""
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry gemm(
  .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128], .param .align 64 .b8 map_c[128],
  .param .u32 blocks
)
.reqntid 160, 1, 1
.reqnctapercluster 2, 1, 1
{{
  .reg .pred %p, %ready, %accumulate, %first, %leader;
  .reg .b32 %thread, %warp, %lane, %smem, %bars, %rank, %row, %blocks, %i, %stage, %phase, %other, %x, %y;
  .reg .b32 %full, %empty, %a, %b, %bd, %peer, %remote, %pair, %c, %c_row;
  .reg .b16 %both;
  .reg .b64 %ma, %mb, %mc, %da, %db, %desc_a, %desc_b, %fixed, %wide, %state;
  .reg .f32 %f<32>;
{_THREAD}
  add.u32 %bars, %smem, 40960;
  mov.u32 %rank, %cluster_ctarank;
  mov.u32 %row, %ctaid.x;
  shl.b32 %row, %row, 6;
{_maps("abc")}
  ld.param.u32 %blocks, [blocks];
  setp.eq.u32 %first, %thread, 0;
  @!%first bra initialised;
  mbarrier.init.shared::cta.b64 [%bars], 1;
  mbarrier.init.shared::cta.b64 [%bars+8], 1;
  mbarrier.init.shared::cta.b64 [%bars+16], 8;
  mbarrier.init.shared::cta.b64 [%bars+24], 8;
  fence.mbarrier_init.release.cluster;
initialised:
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  setp.lt.u32 %p, %warp, 4;
  @%p bra consumer;

  // Producer: one thread of warp 4.
  setp.ne.u32 %p, %lane, 0;
  @%p bra finish;
  mov.b16 %both, 3;
  mov.u32 %i, 0;
produce:
{_PHASE}
  xor.b32 %other, %phase, 1;
{_BARRIERS}
{_HOPPER_TILES}
{_wait("%empty", "%other", "wait_empty")}
  mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%full], 16384;
  shl.b32 %x, %i, 6;
  {_LOAD} [%a], [%ma, {{%x, %row}}], [%full];
  shl.b32 %y, %rank, 12;
  add.u32 %bd, %b, %y;
  shl.b32 %y, %rank, 5;
  {_LOAD}.multicast::cluster [%bd], [%mb, {{%x, %y}}], [%full], %both;
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, %blocks;
  @%p bra produce;
  bra finish;

consumer:
  mov.u32 %i, 0;
  setp.ne.u32 %accumulate, 0, 0;
  xor.b32 %peer, %rank, 1;
  mov.b64 %fixed, 0x4000004000010000;
consume:
{_PHASE}
{_BARRIERS}
{_HOPPER_TILES}
{_wait("%full", "%phase", "wait_full")}
{_descriptor("a")}
{_descriptor("b")}
  wgmma.fence.sync.aligned;
{_WGMMA}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  setp.ne.u32 %p, %lane, 0;
  @%p bra freed;
  mbarrier.arrive.shared::cta.b64 %state, [%empty];
  mapa.shared::cluster.u32 %remote, %empty, %peer;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%remote];
freed:
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, %blocks;
  @%p bra consume;

  // Epilogue: row 16 warp + lane / 4 and the one 8 below, columns 2 (lane mod 4) + 8 j.
  add.u32 %c, %smem, 32768;
  shr.u32 %x, %lane, 2;
  shl.b32 %y, %warp, 4;
  add.u32 %x, %x, %y;
  shl.b32 %x, %x, 7;
  and.b32 %y, %lane, 3;
  shl.b32 %y, %y, 2;
  add.u32 %x, %x, %y;
  add.u32 %c_row, %c, %x;
{_STORE_ACCUMULATOR}
  fence.proxy.async.shared::cta;
  bar.sync 1, 128;
  @!%first bra finish;
  cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%mc, {{0, %row}}], [%c];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
finish:
  barrier.cluster.arrive;
  barrier.cluster.wait;
  ret;
}}
"""

# ---- Blackwell ------------------------------------------------------------------------------------------


_FIRST_PRODUCT = "\n".join(
    f"""  add.s64 %da, %desc_a, {2 * k};
  add.s64 %db, %desc_b, {2 * k};
  tcgen05.mma.cta_group::1.kind::f16 [%tmem], %da, %db, %idesc, %accumulate;
  setp.eq.u32 %accumulate, 0, 0;"""
    for k in range(4)
)
_SECOND_PRODUCT = "\n".join(
    f"""  add.u32 %x, %tmem_p, {8 * k};
  add.s64 %db, %desc_b, {2 * k};
  tcgen05.mma.cta_group::1.kind::f16 [%tmem_o], [%x], %db, %idesc, %accumulate;
  setp.eq.u32 %accumulate, 0, 0;"""
    for k in range(4)
)
_TO_PAIRS = "\n".join(f"  cvt.rn.bf16x2.f32 %h{j}, %f{2 * j + 1}, %f{2 * j};" for j in range(32))
_PAIRS = "{" + ", ".join(f"%h{j}" for j in range(32)) + "}"
_STORE_PAIRS = "\n".join(
    f"  st.shared.v4.b32 [%c_row+{16 * j}], {{%h{4 * j}, %h{4 * j + 1}, %h{4 * j + 2}, %h{4 * j + 3}}};"
    for j in range(8)
)

# Shared memory: A stages at 0 and 16384, B stages at 32768 and 40960, V at 49152, C at 57344; at 73728 the
# barriers full 0 and 1, empty 0 and 1, s_ready, p_ready, v_ready, o_ready, and at 73792 the address of
# tensor memory. Tensor memory: S in columns 0 to 63, P in 64 to 95, O in 128 to 191.
BLACKWELL = f"""
.version 8.6
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry chained(
  .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128], .param .align 64 .b8 map_v[128],
  .param .align 64 .b8 map_c[128], .param .u32 blocks
)
.reqntid 192, 1, 1
{{
  .reg .pred %p, %ready, %accumulate, %first;
  .reg .b32 %thread, %warp, %lane, %smem, %bars, %blocks, %i, %stage, %phase, %other, %x, %y, %idesc, %slot;
  .reg .b32 %full, %empty, %a, %b, %c, %c_row, %tmem, %tmem_p, %tmem_o, %tmem_row, %tmem_at;
  .reg .b32 %h<32>, %s_ready, %p_ready, %v_ready, %o_ready;
  .reg .b64 %ma, %mb, %mv, %mc, %da, %db, %desc_a, %desc_b, %fixed, %wide, %state;
  .reg .f32 %f<64>;
{_THREAD}
  add.u32 %bars, %smem, 73728;
  add.u32 %s_ready, %bars, 32;
  add.u32 %p_ready, %bars, 40;
  add.u32 %v_ready, %bars, 48;
  add.u32 %o_ready, %bars, 56;
  add.u32 %slot, %bars, 64;
{_maps("abvc")}
  ld.param.u32 %blocks, [blocks];
  setp.eq.u32 %first, %thread, 0;
  @!%first bra initialised;
  mbarrier.init.shared::cta.b64 [%bars], 1;
  mbarrier.init.shared::cta.b64 [%bars+8], 1;
  mbarrier.init.shared::cta.b64 [%bars+16], 1;
  mbarrier.init.shared::cta.b64 [%bars+24], 1;
  mbarrier.init.shared::cta.b64 [%s_ready], 1;
  mbarrier.init.shared::cta.b64 [%p_ready], 128;
  mbarrier.init.shared::cta.b64 [%v_ready], 1;
  mbarrier.init.shared::cta.b64 [%o_ready], 1;
  fence.mbarrier_init.release.cluster;
initialised:
  setp.ne.u32 %p, %warp, 5;
  @%p bra allocated;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 256;
  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
  bar.sync 0;
  ld.shared.b32 %tmem, [%slot];
  add.u32 %tmem_p, %tmem, 64;
  add.u32 %tmem_o, %tmem, 128;
  setp.lt.u32 %p, %warp, 4;
  @%p bra compute;
  setp.ne.u32 %p, %lane, 0;
  @%p bra finish;
  setp.eq.u32 %p, %warp, 5;
  @%p bra multiply;

  // Producer: one thread of warp 4.
  mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%v_ready], 8192;
  add.u32 %a, %smem, 49152;
  {_LOAD} [%a], [%mv, {{0, 0}}], [%v_ready];
  mov.u32 %i, 0;
produce:
{_PHASE}
  xor.b32 %other, %phase, 1;
{_BARRIERS}
{_BLACKWELL_TILES}
{_wait("%empty", "%other", "wait_empty")}
  mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%full], 24576;
  shl.b32 %x, %i, 6;
  {_LOAD} [%a], [%ma, {{%x, 0}}], [%full];
  {_LOAD} [%b], [%mb, {{%x, 0}}], [%full];
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, %blocks;
  @%p bra produce;
  bra finish;

  // One thread of warp 5 issues all products: M 128, N 64, bfloat16 in, float32 out.
multiply:
  mov.u32 %idesc, 0x8100490;
  mov.b64 %fixed, 0x4000404000010000;
  mov.u32 %i, 0;
  setp.ne.u32 %accumulate, 0, 0;
product:
{_PHASE}
{_BARRIERS}
{_BLACKWELL_TILES}
{_wait("%full", "%phase", "wait_full")}
{_descriptor("a")}
{_descriptor("b")}
{_FIRST_PRODUCT}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%empty];
  add.u32 %i, %i, 1;
  setp.lt.u32 %p, %i, %blocks;
  @%p bra product;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%s_ready];
{_wait("%p_ready", "0", "wait_p")}
{_wait("%v_ready", "0", "wait_v")}
  tcgen05.fence::after_thread_sync;
  add.u32 %b, %smem, 49152;
{_descriptor("b")}
  setp.ne.u32 %accumulate, 0, 0;
{_SECOND_PRODUCT}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%o_ready];
  bra finish;

  // Warps 0 to 3: a thread owns a row of S, and of O.
compute:
  shl.b32 %x, %warp, 21;
  add.u32 %tmem_row, %tmem, %x;
{_wait("%s_ready", "0", "wait_s")}
  tcgen05.fence::after_thread_sync;
  tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(32)}, [%tmem_row];
  tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(32, 32)}, [%tmem_row+32];
  tcgen05.wait::ld.sync.aligned;
{_TO_PAIRS}
  tcgen05.st.sync.aligned.32x32b.x32.b32 [%tmem_row+64], {_PAIRS};
  tcgen05.wait::st.sync.aligned;
  tcgen05.fence::before_thread_sync;
  mbarrier.arrive.shared::cta.b64 %state, [%p_ready];
{_wait("%o_ready", "0", "wait_o")}
  tcgen05.fence::after_thread_sync;
  tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(32)}, [%tmem_row+128];
  tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(32, 32)}, [%tmem_row+160];
  tcgen05.wait::ld.sync.aligned;
{_TO_PAIRS}
  add.u32 %c, %smem, 57344;
  shl.b32 %x, %thread, 7;
  add.u32 %c_row, %c, %x;
{_STORE_PAIRS}
  fence.proxy.async.shared::cta;
  bar.sync 1, 128;
  @!%first bra finish;
  cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%mc, {{0, 0}}], [%c];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
finish:
  barrier.sync 0;
  setp.ne.u32 %p, %warp, 5;
  @%p bra done;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 256;
done:
  ret;
}}
"""

# ---- Launches and right answers -------------------------------------------------------------------------


@dataclass
class Problem:
    """A launch, its inputs in memory, and the C it must leave."""

    launch: Launch
    maps: list[TensorMap]
    c: np.ndarray  # raw bfloat16
    right: np.ndarray

    def is_right(self) -> bool:
        return np.array_equal(self.c, self.right)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Raw bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _float32(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _map(buffer: Buffer, rows: int, columns: int, box_rows: int, swizzle: int) -> TensorMap:
    box = (64, box_rows)
    return TensorMap(buffer.address, "bf16", (columns, rows), (2, 2 * columns), box, (1, 1), swizzle)


def _aligned(rows: int, columns: int) -> np.ndarray:
    """Zeroed raw bfloat16 whose address suits a tensor map."""
    spare = np.zeros(rows * columns + 128, np.uint16)
    start = -spare.ctypes.data % 256 // 2
    return spare[start : start + rows * columns].reshape(rows, columns)


def _integers(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    made = _aligned(rows, columns)
    made[...] = _bfloat16(rng.integers(-2, 3, (rows, columns)))
    return made


def hopper(ptx: str = HOPPER, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    a, b, c = _integers(rng, 128, 64 * BLOCKS), _integers(rng, 64, 64 * BLOCKS), _aligned(128, 64)
    c[...] = 0x7FC0
    buffers = [Buffer.of(x, name) for x, name in ((a, "A"), (b, "B"), (c, "C"))]
    maps = [
        _map(buffers[0], *a.shape, 64, 128),
        _map(buffers[1], *b.shape, 32, 128),
        _map(buffers[2], *c.shape, 64, 0),
    ]
    launch = Launch(
        ptx=ptx,
        kernel="gemm",
        grid=(2, 1, 1),
        block=(160, 1, 1),
        cluster=(2, 1, 1),
        shared_bytes=40992,
        params=b"".join(map(encode, maps)) + BLOCKS.to_bytes(4, "little"),
        buffers=buffers,
    )
    return Problem(launch, maps, c, _bfloat16(_float32(a) @ _float32(b).T))


def blackwell(ptx: str = BLACKWELL, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    a, b = _integers(rng, 128, 64 * BLOCKS), _integers(rng, 64, 64 * BLOCKS)
    v, c = _integers(rng, 64, 64), _aligned(128, 64)
    c[...] = 0x7FC0
    named = ((a, "A"), (b, "B"), (v, "V"), (c, "C"))
    buffers = [Buffer.of(x, name) for x, name in named]
    maps = [
        _map(buffers[0], *a.shape, 128, 128),
        _map(buffers[1], *b.shape, 64, 128),
        _map(buffers[2], *v.shape, 64, 128),
        _map(buffers[3], *c.shape, 128, 0),
    ]
    launch = Launch(
        ptx=ptx,
        kernel="chained",
        grid=(1, 1, 1),
        block=(192, 1, 1),
        shared_bytes=73796,
        params=b"".join(map(encode, maps)) + BLOCKS.to_bytes(4, "little"),
        buffers=buffers,
    )
    p = _float32(_bfloat16(_float32(a) @ _float32(b).T))
    return Problem(launch, maps, c, _bfloat16(p @ _float32(v).T))
