"""What the two sides of a block share: operands, shared memory, and the words of a work slot."""

from typing import Any, NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64, cute
from cutlass.tensor_utils import LayoutEnum

from coflash.kernels.parts import ptx, ring
from coflash.kernels.parts.fixture import Fixture, View
from coflash.kernels.parts.ring import Ring
from coflash.kernels.sm90.config import ROWS, WORK_SLOTS, ForwardConfig

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}

# What a work slot asks for.
END, TILE, EXACT, NOTHING = range(4)
KIND, M_BLOCK, HEAD, BATCH, SEQLEN_Q, SEQLEN_K, FIRST_Q, FIRST_K = range(8)  # words of a work slot
LOW, HIGH = 8, 9  # blocks of keys of the tile
OWN_LOW, OWN_HIGH = 10, 14  # and of each of up to four warpgroups
WORDS = 18


class Operands(NamedTuple):
    """Tensors and numbers of one launch, device side; None where the config has no use for one."""

    out: Any
    lse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    sink: Any
    softmax_scale: Any
    window_left: Any
    window_right: Any
    softcap: Any
    tile_counter: Any
    shape: Any  # batch, query heads, KV heads, seqlen_q, seqlen_k


def q_layout(config: ForwardConfig) -> cute.ComposedLayout:
    """Of all warpgroups' stages."""
    return hopper.make_smem_layout_a(
        LayoutEnum.ROW_MAJOR,
        (ROWS, config.tile_n, config.tile_d),
        DTYPES[config.dtype],
        config.warpgroups * config.q_stages,
    )


def k_layout(config: ForwardConfig) -> cute.ComposedLayout:
    return hopper.make_smem_layout_b(
        LayoutEnum.ROW_MAJOR, (ROWS, config.tile_n, config.tile_d), DTYPES[config.dtype], config.k_stages
    )


def v_layout(config: ForwardConfig) -> cute.ComposedLayout:
    return hopper.make_smem_layout_b(
        LayoutEnum.COL_MAJOR, (ROWS, config.tile_d_v, config.tile_n), DTYPES[config.dtype], config.v_stages
    )


class Shared(Fixture):
    """A block's shared memory."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.storage = cutlass.memory.SmemAllocator().allocate(self.make_storage())
        layouts = q_layout(config), k_layout(config), v_layout(config)
        self.q, self.k, self.v = (
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((self.storage.q, self.storage.k, self.storage.v), layouts, strict=True)
        )

    def make_storage(self) -> Any:
        c = self.config

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.warpgroups * c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.warpgroups * c.q_stages]
            k_full: cute.struct.MemRange[Int64, c.k_stages]
            k_empty: cute.struct.MemRange[Int64, c.k_stages]
            v_full: cute.struct.MemRange[Int64, c.v_stages]
            v_empty: cute.struct.MemRange[Int64, c.v_stages]
            v_landed: cute.struct.MemRange[Int64, 1]
            work_full: cute.struct.MemRange[Int64, WORK_SLOTS]
            work_empty: cute.struct.MemRange[Int64, WORK_SLOTS]
            work: cute.struct.MemRange[Int32, WORDS * WORK_SLOTS]
            failed: cute.struct.MemRange[Int32, 16 * WORK_SLOTS]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout(c))], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout(c))], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout(c))], 1024]

        return Storage

    def slots(self, producer: bool) -> Ring:
        """One side's place in the ring of work slots."""
        return Ring(
            self.storage.work_full.data_ptr(), self.storage.work_empty.data_ptr(), WORK_SLOTS, producer
        )

    def rings(self, producer: bool, group: int | Int32 = 0) -> tuple[Ring, Ring, Ring]:
        """Its places in the rings of the warpgroup's Q, of K and of V."""
        c, storage = self.config, self.storage
        at = group * c.q_stages
        return (
            Ring(storage.q_full.data_ptr() + at, storage.q_empty.data_ptr() + at, c.q_stages, producer),
            Ring(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), c.k_stages, producer),
            Ring(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), c.v_stages, producer),
        )

    def work(self) -> View:
        """Words of the work slots, by word and slot."""
        return View(self.storage.work.get_tensor(cute.make_layout((WORDS, WORK_SLOTS))))

    def verdicts(self) -> View:
        """Whether a held maximum failed a tile, by warp and slot."""
        return View(self.storage.failed.get_tensor(cute.make_layout((16, WORK_SLOTS))))

    def start_barriers(self) -> None:
        """Barriers, and verdicts that nothing failed yet: one warp."""
        c, storage = self.config, self.storage
        with cute.arch.elect_one():
            for w in range(c.warpgroups):
                at = w * c.q_stages
                ring.init(storage.q_full.data_ptr() + at, storage.q_empty.data_ptr() + at, c.q_stages, 4)
            warps = 4 * c.warpgroups
            ring.init(storage.k_full.data_ptr(), storage.k_empty.data_ptr(), c.k_stages, warps)
            ring.init(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), c.v_stages, warps)
            ring.init(storage.work_full.data_ptr(), storage.work_empty.data_ptr(), WORK_SLOTS, warps)
            cute.arch.mbarrier_init(storage.v_landed.data_ptr(), 1)
        verdicts = storage.failed.get_tensor(cute.make_layout(16 * WORK_SLOTS))
        verdicts[cute.arch.lane_idx()] = Int32(0)  # as many as lanes

    @cute.jit
    def clear_q(self):
        """Rows of Q that no copy fills take part in its products: their scores are dropped, but are not chance."""
        thread, _, _ = cute.arch.thread_idx()
        base = self.storage.q.data_ptr()
        i = 8 * thread
        while i < cute.cosize(q_layout(self.config)):
            ptx.zero_16_shared_bytes(base + i)
            i = i + 8 * self.config.threads
        cute.arch.fence_view_async_shared()
