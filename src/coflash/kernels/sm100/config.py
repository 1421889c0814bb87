"""Static choices of the Blackwell forward kernel, and the proof that they fit the chip.

Nothing here imports the DSL: planning and the cache work on machines that cannot compile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coflash.kernels.features import Features

__all__ = ["ForwardConfig", "choose"]

SHARED_BYTES = 232_448  # what one CTA may use: 227 KB
TENSOR_COLUMNS = 512  # of 128 lanes and 4 bytes each
REGISTERS = 65_536  # of one multiprocessor
ROWS = 128  # query rows of a tile in one CTA: the lanes of tensor memory
BLOCK = 128  # keys in a block
WARPS = 16
WORK_SLOTS = 2  # tiles the scheduler may be ahead
WORK_WORDS = 8  # 32-bit words in a slot


@dataclass(frozen=True)
class ForwardConfig(Features):
    """One compiled forward kernel: what it computes and how."""

    ctas: int = 1  # CTAs that issue their products together: 2 is the pair mode
    q_stages: int = 1  # buffers of each Q tile: 2 loads the next tile's queries early
    kv_stages: int = 5  # buffers of a K or V block, in one ring
    softmax: str = "online"  # "held": no maximum in blocks that are seen whole, bfloat16 alone has the range
    polynomial: int = 3  # of 16 pairs of exponentials, how many by polynomial in unmasked blocks
    early_keys: int = 96  # of a block's 128 keys, those whose P is handed over first (held: all)
    dynamic: bool = False  # tiles by cluster launch control; else every cluster strides through them
    registers: tuple[int, int, int] = (184, 96, 48)  # of a thread: softmax, epilogue, other warps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ctas not in (1, 2):
            raise ValueError(f"ctas {self.ctas}: 1 or 2")
        if self.ctas == 2 and self.head_dim_v % 32:
            raise ValueError(f"head_dim_v {self.head_dim_v}: a CTA pair splits V, multiples of 32")
        if self.pack_heads < 1 or ROWS % self.pack_heads:
            raise ValueError(f"pack_heads {self.pack_heads}: a divisor of {ROWS}")
        if not 0 <= self.polynomial <= 16:
            raise ValueError(f"polynomial {self.polynomial}: 0 to 16 of 16")
        if self.early_keys % 32 or not 32 <= self.early_keys <= BLOCK:
            raise ValueError(f"early_keys {self.early_keys}: a multiple of 32 up to {BLOCK}")
        if self.softmax not in ("online", "held"):
            raise ValueError(f"softmax {self.softmax!r}: online or held")
        if self.softmax == "held" and (self.dtype != "bf16" or self.q_tiles == 1 or self.early_keys != BLOCK):
            raise ValueError("softmax held: bfloat16, two Q tiles, and P handed over at once")
        if self.q_stages not in (1, 2):
            raise ValueError(f"q_stages {self.q_stages}: 1 or 2")
        if self.kv_stages < 2:
            raise ValueError(f"kv_stages {self.kv_stages}: at least 2, K and V share the ring")
        if self.tensor_columns > TENSOR_COLUMNS:
            raise ValueError(
                f"tensor memory: {self.tensor_sum()} = {self.tensor_columns} of {TENSOR_COLUMNS}"
            )
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"shared memory: {self.shared_sum()} = {self.shared_bytes} of {SHARED_BYTES}")
        softmax, epilogue, other = self.registers
        held = 32 * (8 * softmax + 4 * epilogue + 4 * other)
        if held > REGISTERS or any(count % 8 or not 24 <= count <= 256 for count in self.registers):
            raise ValueError(
                f"registers: 256 x {softmax} + 128 x {epilogue} + 128 x {other} = {held} of {REGISTERS}"
            )

    # ---- tiles ----

    @property
    def q_tiles(self) -> int:
        """Q tiles in ping-pong: two, unless O alone fills tensor memory, or Q shared memory."""
        return 2 if self.head_dim_v <= 128 and self.head_dim <= 192 else 1

    @property
    def early(self) -> bool:
        """Whether a part of P is handed over before the rest."""
        return self.q_tiles == 2 and self.early_keys < BLOCK

    @property
    def tile_d(self) -> int:
        """head_dim as the products see it; the copy engine fills what lies beyond with zeros."""
        return _round_up(self.head_dim, 16)

    @property
    def tile_d_v(self) -> int:
        # With one Q tile each warpgroup brings half of O's columns down, 16 at a time.
        return _round_up(self.head_dim_v, 16 * self.ctas * (3 - self.q_tiles))

    @property
    def rows(self) -> int:
        """Query rows that one work item covers."""
        return ROWS * self.q_tiles * self.ctas

    @property
    def positions(self) -> int:
        """Query positions in them."""
        return self.rows // self.pack_heads

    @property
    def keys(self) -> int:
        """Keys of a block in one CTA's shared memory."""
        return BLOCK // self.ctas

    @property
    def columns_v(self) -> int:
        """Columns of V in one CTA's shared memory."""
        return self.tile_d_v // self.ctas

    @property
    def panel(self) -> int:
        """Columns of a panel of Q and K: the swizzled row is as long as the dimension allows, up to 128 bytes."""
        return _panel(self.tile_d)

    @property
    def panel_v(self) -> int:
        return _panel(self.columns_v)

    # ---- shared memory, in bytes ----

    @property
    def q_bytes(self) -> int:
        """One Q tile."""
        return 2 * ROWS * self.tile_d

    @property
    def k_bytes(self) -> int:
        return 2 * self.keys * self.tile_d

    @property
    def v_bytes(self) -> int:
        return 2 * BLOCK * self.columns_v

    @property
    def kv_bytes(self) -> int:
        """One stage of the ring."""
        return max(self.k_bytes, self.v_bytes)

    @property
    def barriers(self) -> dict[str, int]:
        """Name and number of the barriers (0: this config has none); the kernel's documentation says who arrives and
        who waits."""
        q_buffers = self.q_tiles * self.q_stages
        return {
            "q_full": q_buffers,
            "q_empty": q_buffers,
            "kv_full": self.kv_stages,
            "kv_empty": self.kv_stages,
            "s_full": 2,
            "p_early": 2 * self.early,
            "p_late": 2,
            "o_full": self.q_tiles,
            "o_done": int(self.q_tiles == 1),
            "o_free": self.q_tiles,
            "stats_full": self.q_tiles,
            "stats_free": self.q_tiles,
            "work_full": WORK_SLOTS,
            "work_free": WORK_SLOTS,
            "launch_answer": int(self.dynamic),
            "launch_read": int(self.dynamic and self.ctas == 2),
        }

    def shared_parts(self) -> dict[str, int]:
        """What lies in shared memory, in order."""
        return {
            "q": self.q_bytes * self.q_tiles * self.q_stages,
            "kv": self.kv_bytes * self.kv_stages,
            "stats": 2 * 2 * 4 * ROWS,  # two warpgroups, row sum and reference
            "tops": 2 * 2 * 4 * ROWS if self.q_tiles == 1 else 0,  # maxima of half rows, two turns
            "work": 4 * WORK_WORDS * WORK_SLOTS,
            "launch": 16,
            "barriers": 8 * sum(self.barriers.values()),
            "tensor_base": 16,
        }

    @property
    def shared_offsets(self) -> dict[str, int]:
        """Offset of every part, and of the first barrier of every name."""
        offsets, at = {}, 0
        for name, size in self.shared_parts().items():
            offsets[name] = at
            at += _round_up(size, 16)
        at = offsets["barriers"]
        for name, copies in self.barriers.items():
            offsets[name] = at
            at += 8 * copies
        return offsets

    @property
    def shared_bytes(self) -> int:
        return sum(_round_up(size, 16) for size in self.shared_parts().values())

    def shared_sum(self) -> str:
        """The budget in words."""
        return " + ".join(f"{name} {size}" for name, size in self.shared_parts().items())

    # ---- tensor memory, in columns ----

    @property
    def s_columns(self) -> int:
        """First column of S of tile 0; tile 1 follows. P overlays the S it comes from."""
        return 0

    @property
    def o_columns(self) -> int:
        """First column of O of tile 0; tile 1, where there is one, follows."""
        return 2 * BLOCK

    @property
    def tensor_columns(self) -> int:
        return 2 * BLOCK + self.q_tiles * self.tile_d_v

    def tensor_sum(self) -> str:
        return f"S 2 x {BLOCK} + O {self.q_tiles} x {self.tile_d_v}"


def choose(arch: str, **features: Any) -> ForwardConfig:
    """The config for these features (the fields of `Features`, and any of the config's own) on `arch`."""
    draft = {"kv_stages": 2} | features
    dim, dim_v = features["head_dim"], features["head_dim_v"]
    bounded = features.get("bounded_left", False) or features.get("bounded_right", False)
    # Options that keep more in registers, in the softmax warps or the epilogue.
    crowded = any(features.get(name, False) for name in ("softcap", "sink", "seqused_q", "seqused_k"))
    crowded = crowded or features["dtype"] != "bf16" or features.get("pack_heads", 1) > 1
    if "polynomial" not in features:
        draft["polynomial"] = _share(arch, max(dim, dim_v), crowded)
    if "ctas" not in features and dim_v % 32 == 0:
        # A pair reads half of K and V: it makes room for wide heads, and spares shared memory where all blocks are
        # whole.  Its 512 rows at a time waste work on a triangle, and on short sequences.
        alone = bounded or features.get("packed_q", False) or features.get("pack_heads", 1) > 1
        draft["ctas"] = 2 if max(dim, dim_v) > 128 or (dim == 128 and not alone) else 1
    config = ForwardConfig(**draft)
    if "softmax" not in features and config.dtype == "bf16" and config.q_tiles == 2:
        config = replace(config, softmax="held", early_keys=BLOCK)
    if "registers" not in features and config.q_tiles == 2:
        config = replace(config, registers=(192, 80, 48) if config.polynomial > 2 else (184, 88, 56))
    if "q_stages" not in features:
        config = _grown(config, "q_stages", 2, keep=4 * BLOCK * 128 * 2 // config.kv_bytes)
    if "kv_stages" not in features:
        while (larger := _fits(config, kv_stages=config.kv_stages + 1)) and config.kv_stages < 12:
            config = larger
    return config


def _share(arch: str, dim: int, crowded: bool) -> int:
    """Of 16 pairs of exponentials, how many go by polynomial: as many as registers have room for."""
    if arch.startswith("sm_103"):
        return 0  # twice the special-function rate: the polynomial would only cost issue slots
    if dim > 128:
        return 0  # the products take twice as long as the exponentials
    return 2 if crowded else 5


def _grown(config: ForwardConfig, field: str, value: int, keep: int) -> ForwardConfig:
    """`config` with the larger value, where the ring then still has `keep` stages."""
    larger = _fits(config, **{field: value})
    return larger if larger and _fits(larger, kv_stages=keep) else config


def _fits(config: ForwardConfig, **changes: Any) -> ForwardConfig | None:
    try:
        return replace(config, **changes)
    except ValueError:
        return None


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _panel(dim: int) -> int:
    return next(width for width in (64, 32, 16) if dim % width == 0)
