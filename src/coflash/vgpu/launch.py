"""One kernel launch, as the driver would have received it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Dim3 = tuple[int, int, int]


@dataclass
class Buffer:
    """A piece of device memory the kernel may touch.

    `address` is where the bytes live in this process: device addresses of the virtual GPU are host addresses, so
    pointers and tensor maps that the compiled host code wrote are used unchanged. `data` keeps the bytes alive and is
    what the kernel reads and writes (in place).
    """

    address: int
    data: np.ndarray
    name: str = ""
    initialised: bool = True
    """False for scratch memory whose contents the kernel must not read before it wrote them."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def of(cls, array: np.ndarray, name: str = "", initialised: bool = True) -> Buffer:
        """The buffer that a contiguous, writable array stands for."""
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name or '?'} is not contiguous")
        flat = array.reshape(-1).view(np.uint8)
        return cls(flat.ctypes.data, flat, name, initialised)


@dataclass
class Launch:
    """Everything the hardware gets to know about one launch.

    `params` is the parameter space as one byte string, each parameter at the offset its `.param` declaration has
    (natural alignment, in order). `buffers` lists the global memory that the launch may touch; an access outside is
    a finding.
    """

    ptx: str
    kernel: str
    grid: Dim3
    block: Dim3
    params: bytes
    cluster: Dim3 = (1, 1, 1)
    shared_bytes: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    name: str = ""
    """What reports call this launch; the kernel's symbol when empty."""

    def __post_init__(self) -> None:
        for what, dim in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if len(dim) != 3 or min(dim) < 1:
                raise ValueError(f"{what} must be three positive numbers, not {dim!r}")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"grid {self.grid} is not a multiple of cluster {self.cluster}")
        threads = self.block[0] * self.block[1] * self.block[2]
        if threads > 1024:
            raise ValueError(f"a block of {threads} threads is larger than 1024")
