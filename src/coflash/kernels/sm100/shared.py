"""Names for places in shared memory: barriers, rings of buffers, work slots."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from coflash.kernels.parts.fixture import Fixture
from coflash.kernels.sm100 import instructions as op


class Barrier(Fixture):
    """Barriers of one name, and this thread's place in their sequence of phases.

    `first` is the parity of the phase this side waits for first: 0 for a side that waits until something was
    produced, 1 for a side that may go ahead at once because everything starts out free.
    """

    def __init__(self, address: Int32, first: int = 0) -> None:
        self.address = address
        self.parity = cute.make_rmem_tensor(
            (1,), Int32
        )  # a tensor: loops carry its contents without being told to
        self.parity[0] = Int32(first)

    def wait(self, order: str = "acquire.cta") -> None:
        op.wait(self.address, self.parity[0], order=order)
        self.parity[0] = self.parity[0] ^ 1


class Ring(Fixture):
    """One side's walk round a ring of buffers, each with a `full` and an `empty` barrier."""

    def __init__(self, full: Int32, empty: Int32, stages: int, producer: bool) -> None:
        self.full, self.empty, self.stages = full, empty, stages
        self.place = cute.make_rmem_tensor((2,), Int32)
        self.place[0] = Int32(0)
        self.place[1] = Int32(1 if producer else 0)

    @property
    def stage(self) -> Int32:
        return self.place[0]

    def full_at(self, stage: Int32) -> Int32:
        return self.full + 8 * stage

    def empty_at(self, stage: Int32) -> Int32:
        return self.empty + 8 * stage

    def wait_full(self, order: str = "acquire.cta") -> None:
        op.wait(self.full_at(self.stage), self.place[1], order=order)

    def wait_empty(self) -> None:
        op.wait(self.empty_at(self.stage), self.place[1])

    def drain(self) -> None:
        """Wait until every stage is empty: nothing may still signal a barrier of a CTA that has ended."""
        for _ in range(self.stages):
            self.wait_empty()
            self.advance()

    def advance(self) -> None:
        if self.stages == 1:
            self.place[1] = self.place[1] ^ 1
        else:
            following = self.place[0] + 1
            wrapped = Int32(following == self.stages)
            self.place[0] = following - wrapped * self.stages
            self.place[1] = self.place[1] ^ wrapped


class Shared(Fixture):
    """Addresses of everything in shared memory, by the names of the config's table."""

    def __init__(self, base: Int32, offsets: dict[str, int]) -> None:
        self.base, self.offsets = base, offsets

    def __getattr__(self, name: str) -> Any:
        try:
            offset = self.offsets[name]
        except KeyError:
            raise AttributeError(name) from None
        return self.base + offset
