"""A ring of shared-memory stages between the copy engine and the warps that compute.

Each stage has two barriers: `full` (the bytes have landed) and `empty` (every reader is done).  Both sides walk
the ring in the same order, so a side only remembers its next stage and that stage's phase.
"""

from cutlass import Int32, cute

from coflash.kernels.parts.fixture import Fixture, Registers


class Ring(Fixture):
    """One side's place in the ring: the producer starts on stages that are empty, a consumer on ones not yet full."""

    def __init__(self, full: cute.Pointer, empty: cute.Pointer, stages: int, producer: bool) -> None:
        self.full = full
        self.empty = empty
        self.stages = stages
        self.place = Registers(Int32, 2)
        self.place[0] = Int32(0)
        self.place[1] = Int32(1 if producer else 0)

    @property
    def stage(self) -> Int32:
        return self.place[0]

    @property
    def phase(self) -> Int32:
        return self.place[1]

    def wait_full(self) -> None:
        cute.arch.mbarrier_wait(self.full + self.stage, self.phase)

    def wait_empty(self) -> None:
        cute.arch.mbarrier_wait(self.empty + self.stage, self.phase)

    def advance(self) -> None:
        if self.stages == 1:
            self.place[1] = self.place[1] ^ 1
        elif self.stages == 2:
            self.place[1] = self.place[1] ^ self.place[0]
            self.place[0] = self.place[0] ^ 1
        else:
            following = self.place[0] + 1
            wrapped = Int32(following == self.stages)
            self.place[0] = following - wrapped * self.stages
            self.place[1] = self.place[1] ^ wrapped


def init(full: cute.Pointer, empty: cute.Pointer, stages: int, readers: int) -> None:
    """One thread, before anybody uses the ring: a copy fills a stage, `readers` arrivals empty it."""
    for stage in range(stages):
        cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init(empty + stage, readers)
