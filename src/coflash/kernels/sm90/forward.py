"""Attention forward for Hopper (sm_90a)."""

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from coflash.kernels.parts import ptx
from coflash.kernels.parts.control import Branch, when
from coflash.kernels.sm90.compute import Warpgroup
from coflash.kernels.sm90.config import ROWS, ForwardConfig
from coflash.kernels.sm90.load import Loader
from coflash.kernels.sm90.shared import DTYPES, Operands, Shared, k_layout, q_layout, v_layout


class Forward:
    """out = softmax(scale * q k^T, masked) v, a tile of query rows of one head at a time.

    One block a multiprocessor stays there and takes tiles until there are none:

        load warpgroup (one warp works)      compute warpgroups, 64 rows each
        find tile, publish it  --work slot-->  S = Q K^T      64 x tile_n   float32, registers
        copy Q                 --Q ring----->  P = exp2(S * scale - reference), rounded to 16 bits
        copy K, one ahead of V --K ring----->  O += P V       64 x d_v      float32, registers
        copy V                 --V ring----->  O / row sums, to global memory straight from registers,
                                               beside the next tile's first product

    Keys go from the last block to the first: the cut blocks of a causal tile come first.

    Budget of a 128 x 128 tile at head_dim 128 (bf16, two warpgroups, two stages of each of Q, K, V):
    shared memory 64 + 64 + 64 KB of 227; registers of a computing thread S 64 + O 64 + P 32 of 240; clocks of a
    block of keys: tensor cores 2048, exponentials 1024, issue about 900, shared memory 1792.

    Barriers (full: the copy engine's bytes have landed; empty: every reader is done):
      q_full, q_empty   one pair for each warpgroup and Q stage; emptied by the warpgroup's 4 warps
      k_full, k_empty   for each K stage; emptied by every compute warp; so v_full, v_empty
      v_landed          a V block that ends early has landed and may be cleared behind its last key; load warp alone
      work_full         a tile is published; by the load warp, for every compute warp
      work_empty        the tile is done and its verdict written; by every compute warp, for the load warp
    """

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config

    @cute.jit(preprocess=False)
    def __call__(self, *arguments):
        config = self.config
        given = dict(zip(argument_names(config), arguments, strict=True))
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        heads_q, heads_kv = q.shape[q_head_mode(config)], k.shape[k_head_mode(config)]
        batch = given["cu_seqlens_q"].shape[0] - 1 if config.packed_q else q.shape[0]
        seqlen_q = given["max_seqlen_q"] if config.packed_q else q.shape[1]
        seqlen_k = given["max_seqlen_k"] if config.packed_k else k.shape[1]

        q_atom, q_tensor = self.make_q_copy(q, heads_kv)
        k_atom, k_tensor = self.make_kv_copy(k, config.packed_k, k_layout(config), transposed=False)
        v_atom, v_tensor = self.make_kv_copy(v, config.packed_k, v_layout(config), transposed=True)

        operands = Operands(
            shape=(batch, heads_q, heads_kv, seqlen_q, seqlen_k),
            **{name: given.get(name) for name in Operands._fields if name != "shape"},
        )
        tile_heads = heads_kv if config.pack_heads > 1 else heads_q
        m_blocks = cute.ceil_div(seqlen_q, config.positions * config.warpgroups)
        grid = ptx.least(m_blocks * tile_heads * batch, given["num_blocks"])
        self.kernel(q_atom, q_tensor, k_atom, k_tensor, v_atom, v_tensor, operands).launch(
            grid=[grid, 1, 1],
            block=[config.threads, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=config.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    # ---- copies ----

    def make_q_copy(self, q, heads_kv):
        """Q as ((heads in a tile, positions), dim, heads, batch), 64 rows of one warpgroup at a time."""
        c = self.config
        packed, group = c.packed_q, c.pack_heads
        s, h = (0, 1) if packed else (1, 2)
        shape, stride = q.shape, q.stride
        rows, row_stride = shape[s], stride[s]
        heads, head_stride = shape[h], stride[h]
        if group > 1:
            rows, row_stride = (group, rows), (head_stride, row_stride)
            heads, head_stride = heads_kv, head_stride * group
        modes = [(rows, row_stride), (shape[h + 1], 1), (heads, head_stride)]
        if not packed:
            modes.append((shape[0], stride[0]))
        tensor = cute.make_tensor(
            q.iterator, cute.make_layout(tuple(m[0] for m in modes), stride=tuple(m[1] for m in modes))
        )
        layout = cute.slice_(q_layout(c), (None, None, 0))
        tile = (ROWS, c.tile_d)
        if group > 1:
            tile = ((group, c.positions), c.tile_d)
            if group * c.positions < ROWS:
                some = cute.make_layout((group * c.positions, c.tile_d), stride=(1, ROWS))
                layout = cute.composition(layout, some)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tile)

    def make_kv_copy(self, x, packed: bool, layout, transposed: bool):
        """K as (seqlen, dim, heads[, batch]); V as (dim, seqlen, heads[, batch]), the way its product reads it."""
        c = self.config
        s = 0 if packed else 1
        order = [s + 2, s] if transposed else [s, s + 2]
        order += [s + 1] if packed else [s + 1, 0]
        tensor = cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))
        tile = (c.tile_d_v, c.tile_n) if transposed else (c.tile_n, c.tile_d)
        layout = cute.slice_(layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tile)

    # ---- the kernel ----

    @cute.kernel(preprocess=False)
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tensor: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tensor: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tensor: cute.Tensor,
        operands: Operands,
    ):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = Shared(c)

        if c.pack_heads * c.positions < ROWS:
            shared.clear_q()
        with when(warp == 0):
            for atom in (q_atom, k_atom, v_atom):
                cpasync.prefetch_descriptor(atom)
            shared.start_barriers()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        side = Branch(warp < 4)
        with side.then():
            cute.arch.setmaxregister_decrease(c.registers[0])
            with when(warp == 0):
                atoms, tensors = (q_atom, k_atom, v_atom), (q_tensor, k_tensor, v_tensor)
                Loader(shared, atoms, tensors, operands).tiles()
        with side.otherwise():
            cute.arch.setmaxregister_increase(c.registers[1])
            Warpgroup(shared, operands).tiles()


def argument_names(config: ForwardConfig) -> list[str]:
    """Arguments of the compiled kernel, in call order."""
    used = {
        "lse": config.lse,
        "cu_seqlens_q": config.packed_q,
        "cu_seqlens_k": config.packed_k,
        "seqused_q": config.seqused_q,
        "seqused_k": config.seqused_k,
        "max_seqlen_q": config.packed_q,
        "max_seqlen_k": config.packed_k,
        "sink": config.sink,
        "window_left": config.bounded_left,
        "window_right": config.bounded_right,
        "softcap": config.softcap,
        "tile_counter": config.dynamic,
    }
    names = ["q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"]
    names += ["max_seqlen_q", "max_seqlen_k", "sink", "softmax_scale", "window_left", "window_right"]
    names += ["softcap", "tile_counter", "num_blocks", "stream"]
    return [name for name in names if used.get(name, True)]


def fake_arguments(config: ForwardConfig) -> dict[str, Any]:
    """What `argument_names` names, in types that a kernel is compiled for.

    q, k, v, out have any strides whose last is 1 and whose others are multiples of 8 elements (16 bytes).
    `tile_counter` begins with an int32 that is 0 at the start and that every launch leaves 0: launches that may run at
    the same time need one each.  `num_blocks` is how many blocks the device runs at once."""
    dtype = DTYPES[config.dtype]
    batch, heads_q, heads_kv = (cute.sym_int() for _ in range(3))
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()

    def rows(length, heads, dim, packed: bool):
        shape = (length, heads, dim) if packed else (batch, length, heads, dim)
        stride = tuple(cute.sym_int64(divisibility=8) for _ in shape[:-1]) + (1,)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    def vector(kind, *shape):
        stride = tuple(cute.sym_int64() for _ in shape[:-1]) + (1,)
        return make_fake_tensor(kind, shape, stride, assumed_align=4)

    all_arguments = {
        "q": rows(seqlen_q, heads_q, config.head_dim, config.packed_q),
        "k": rows(seqlen_k, heads_kv, config.head_dim, config.packed_k),
        "v": rows(seqlen_k, heads_kv, config.head_dim_v, config.packed_k),
        "out": rows(seqlen_q, heads_q, config.head_dim_v, config.packed_q),
        "lse": vector(Float32, *((heads_q, seqlen_q) if config.packed_q else (batch, heads_q, seqlen_q))),
        "cu_seqlens_q": vector(Int32, cute.sym_int()),
        "cu_seqlens_k": vector(Int32, cute.sym_int()),
        "seqused_q": vector(Int32, cute.sym_int()),
        "seqused_k": vector(Int32, cute.sym_int()),
        "max_seqlen_q": Int32(0),
        "max_seqlen_k": Int32(0),
        "sink": vector(Float32, heads_q),
        "softmax_scale": Float32(0.0),
        "window_left": Int32(0),
        "window_right": Int32(0),
        "softcap": Float32(0.0),
        "tile_counter": vector(Int32, cute.sym_int()),
        "num_blocks": Int32(0),
        "stream": make_fake_stream(use_tvm_ffi_env_stream=True),
    }
    return {name: all_arguments[name] for name in argument_names(config)}


# ---- small pieces ----


def q_head_mode(config: ForwardConfig) -> int:
    return 1 if config.packed_q else 2


def k_head_mode(config: ForwardConfig) -> int:
    return 1 if config.packed_k else 2
