"""Static choices of the Hopper forward kernel, and the proof that they fit the chip.

Nothing here imports the DSL: planning and the cache work on machines that cannot compile.
"""

from __future__ import annotations

from dataclasses import dataclass

from coflash.kernels.features import Features

__all__ = ["ForwardConfig", "positions"]

SHARED_BYTES = 232_448  # what one block may use: 227 KB
REGISTERS = 65_536  # of one multiprocessor
WARPGROUP = 128  # threads
ROWS = 64  # query rows of one warpgroup: the M of a wgmma
WORK_SLOTS = 2  # tiles the scheduler may be ahead, each with a verdict to come back (see load.py)

# Registers a thread of a warpgroup holds after the split: (load warpgroup, compute warpgroup).
REGISTER_SPLIT = {1: (56, 256 - 8), 2: (40, 232), 3: (32, 160), 4: (24, 112)}


@dataclass(frozen=True)
class ForwardConfig(Features):
    """One compiled forward kernel: what it computes and how."""

    warpgroups: int = 2  # that compute, 64 rows each
    tile_n: int = 128  # keys in a block
    k_stages: int = 2
    v_stages: int = 2
    q_stages: int = 1
    softmax: str = "held"  # "held": the first block's maximum is kept; "online": the running maximum
    dynamic: bool = True  # tiles are handed out by a counter; else every block strides through them
    blocks_per_sm: int = 1
    q_registers: int = 0  # steps of 16 columns of Q that stay in registers
    in_place: bool = True  # probabilities are made in the registers of their scores, else in others
    v_ahead: int = (
        0  # steps of 16 keys of O += P V issued before the exponentials, the rest among them; 0: all
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.softmax not in ("held", "online"):
            raise ValueError(f"softmax {self.softmax!r}: held or online")
        if self.softmax == "held" and self.dtype != "bf16":
            raise ValueError("a held maximum needs bf16's range for P: fp16 takes softmax='online'")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n {self.tile_n}: multiples of 16 up to 256 (wgmma's N, and K of P V)")
        if not 0 <= self.q_registers < self.tile_d // 16 or (self.q_registers and self.tile_d % 64):
            raise ValueError(
                f"q_registers {self.q_registers}: fewer than the {self.tile_d // 16} steps of head_dim"
                f" {self.tile_d}, and none unless it is a multiple of 64 (rows of 128 bytes in shared memory)"
            )
        if not 0 <= self.v_ahead < self.tile_n // 16 or (self.v_ahead and self.softmax != "held"):
            raise ValueError(
                f"v_ahead {self.v_ahead}: fewer than the {self.tile_n // 16} steps of a block,"
                " and 0 without a held maximum"
            )
        if self.warpgroups not in REGISTER_SPLIT:
            raise ValueError(f"warpgroups {self.warpgroups}: one of {sorted(REGISTER_SPLIT)}")
        if not positions(self.pack_heads):
            raise ValueError(
                f"pack_heads {self.pack_heads}: no multiple of it fills 8-row groups up to {ROWS}"
            )
        if self.shared_bytes * self.blocks_per_sm > SHARED_BYTES:
            raise ValueError(f"shared memory: {self.shared_sum()} of {SHARED_BYTES // self.blocks_per_sm}")
        load, compute = self.registers
        split = WARPGROUP * (load + compute * self.warpgroups)
        if split > self.threads * self.entry_registers:  # a warpgroup would wait for registers for ever
            raise ValueError(f"register split: {split} of the {self.threads * self.entry_registers} at entry")
        if self.accumulator_registers > self.registers[1] - 20:
            raise ValueError(
                f"registers: S {self.tile_n // 2} + O {self.tile_d_v // 2}"
                f" + P {self.tile_n // 4} + Q {4 * self.q_registers} + 20 of {self.registers[1]}"
            )

    # ---- what follows from the choices ----

    @property
    def tile_m(self) -> int:
        """Rows of a block's tile."""
        return ROWS * self.warpgroups

    @property
    def tile_d(self) -> int:
        """head_dim as the tile holds it; the copy engine fills what lies beyond with zeros."""
        return _tile_dim(self.head_dim)

    @property
    def tile_d_v(self) -> int:
        return _tile_dim(self.head_dim_v)

    @property
    def exact_n(self) -> int:
        """Keys that the exact way takes at a time: as few as a product can, for the sake of its code's size."""
        return 16

    @property
    def positions(self) -> int:
        """Query positions in one warpgroup's 64 rows."""
        return positions(self.pack_heads)

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread after the split: load warpgroup, compute warpgroups."""
        if self.blocks_per_sm == 1:
            return REGISTER_SPLIT[self.warpgroups]
        return {2: (24, 104)}[self.warpgroups]

    @property
    def entry_registers(self) -> int:
        """Registers the assembler may give a thread at launch, before the split."""
        return REGISTERS // (self.threads * self.blocks_per_sm) // 8 * 8

    @property
    def accumulator_registers(self) -> int:
        """Of a computing thread: scores, output, the P of the block before, and what is kept of Q."""
        return self.tile_n // 2 + self.tile_d_v // 2 + self.tile_n // 4 + 4 * self.q_registers

    @property
    def shared_bytes(self) -> int:
        return sum(self._shared_parts().values())

    def shared_sum(self) -> str:
        """The budget in words."""
        return " + ".join(f"{name} {size}" for name, size in self._shared_parts().items())

    def _shared_parts(self) -> dict[str, int]:
        return {
            "Q": 2 * self.tile_m * self.tile_d * self.q_stages,
            "K": 2 * self.tile_n * self.tile_d * self.k_stages,
            "V": 2 * self.tile_n * self.tile_d_v * self.v_stages,
            "barriers and work slots": 1024,
        }


def positions(pack_heads: int) -> int:
    """Query positions of `pack_heads` heads in 64 rows: as many as fill whole groups of 8 rows, the grain of the
    swizzle; 0 where none do."""
    fits = (p for p in range(ROWS // max(pack_heads, 1), 0, -1) if p * pack_heads % 8 == 0)
    return next(fits, 0) if pack_heads > 0 else 0


def _tile_dim(dim: int) -> int:
    return next(size for size in (64, 96, 128, 192, 256) if dim <= size)
