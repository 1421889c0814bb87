"""Byte-addressed memories. They move data and say what is out of bounds; who may touch what when is for `clocks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .launch import Buffer

Bytes = NDArray[np.uint8]
UINT: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


class OutOfBounds(Exception):
    """An access that no buffer contains."""

    def __init__(self, address: int, nbytes: int, near: str = ""):
        super().__init__(f"{nbytes} bytes at {address:#x}" + (f" ({near})" if near else ""))
        self.address = address
        self.nbytes = nbytes
        self.near = near


class GlobalMemory:
    """The launch's buffers, addressed as the host addresses them."""

    def __init__(self, buffers: Sequence[Buffer]):
        ordered = sorted((b for b in buffers if b.nbytes), key=lambda b: b.address)
        for a, b in zip(ordered, ordered[1:], strict=False):
            if a.address + a.nbytes > b.address:
                raise ValueError(f"buffers {a.name or '?'} and {b.name or '?'} overlap")
        self.buffers = ordered
        self.starts = np.array([b.address for b in ordered], np.uint64)
        self.ends = np.array([b.address + b.nbytes for b in ordered], np.uint64)
        self.data: list[Bytes] = []
        for b in ordered:
            flat = b.data.reshape(-1).view(np.uint8)
            self.data.append(flat)
        self._views: dict[tuple[int, int, int], NDArray] = {}

    def find(self, low: int, high: int) -> int:
        """The number of the buffer that holds all of [low, high)."""
        i = int(np.searchsorted(self.starts, np.uint64(low), side="right")) - 1
        if i < 0 or high > int(self.ends[i]):
            raise OutOfBounds(low, high - low, self.neighbour(low))
        return i

    def neighbour(self, address: int) -> str:
        """Words for where an address lies relative to the nearest buffer."""
        best = None
        for b in self.buffers:
            past = address - (b.address + b.nbytes)
            before = b.address - address
            distance = past if past >= 0 else before if before > 0 else 0
            if best is None or distance < best[0]:
                best = (distance, b, past)
        if best is None or best[0] > 1 << 24:
            if address < 0x2000:
                return (
                    "near no buffer; is it the address of a parameter that cvta.param has not made generic?"
                )
            return "near no buffer"
        distance, b, past = best
        if distance == 0 and past < 0:
            return f"across the end of {b.name or 'a buffer'}"
        return f"{distance} bytes {'past the end' if past >= 0 else 'before the start'} of {b.name or 'a buffer'}"

    def view(self, i: int, width: int, phase: int) -> NDArray:
        """Buffer i as elements of `width` bytes, the first one `phase` bytes in."""
        key = (i, width, phase)
        found = self._views.get(key)
        if found is None:
            data = self.data[i][phase:]
            found = self._views[key] = data[: data.size // width * width].view(UINT[width])
        return found

    def locate(
        self, addresses: NDArray[np.uint64], width: int, count: int
    ) -> tuple[NDArray, NDArray[np.int64]]:
        """A typed view and the element index of each address, for accesses of `count` elements of `width` bytes."""
        low, high = int(addresses.min()), int(addresses.max())
        i = self.find(low, high + width * count)
        base = int(self.starts[i])
        phase = (low - base) % width
        index = (addresses - np.uint64(base + phase)).astype(np.int64) // width
        return self.view(i, width, phase), index

    def load(self, addresses: NDArray[np.uint64], width: int, count: int = 1) -> NDArray:
        """[count, n] elements."""
        if addresses.size == 0:
            return np.empty((count, 0), UINT[width])
        try:
            view, index = self.locate(addresses, width, count)
        except OutOfBounds:
            return self._each(addresses, width, count, None)
        if count == 1:
            return view[index][None]
        return view[index + np.arange(count)[:, None]]

    def store(self, addresses: NDArray[np.uint64], values: NDArray, width: int, count: int = 1) -> None:
        """values: [count, n]."""
        if addresses.size == 0:
            return
        try:
            view, index = self.locate(addresses, width, count)
        except OutOfBounds:
            self._each(addresses, width, count, values)
            return
        for k in range(count):
            view[index + k] = values[k]

    def _each(self, addresses: NDArray[np.uint64], width: int, count: int, values: NDArray | None) -> NDArray:
        """The slow way, for lanes in different buffers: buffer by buffer; raises for the first lane in none."""
        which = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        past = addresses + np.uint64(width * count)
        bad = (which < 0) | (past > self.ends[np.maximum(which, 0)])
        if bad.any():
            address = int(addresses[bad][0])
            raise OutOfBounds(address, width * count, self.neighbour(address))
        out = np.empty((count, addresses.size), UINT[width])
        for i in np.unique(which):
            lanes = which == i
            if values is None:
                out[:, lanes] = self.load(addresses[lanes], width, count)
            else:
                self.store(addresses[lanes], values[:, lanes], width, count)
        return out

    def bytes_at(self, address: int, nbytes: int) -> Bytes:
        """A view of consecutive bytes."""
        i = self.find(address, address + nbytes)
        start = address - int(self.starts[i])
        return self.data[i][start : start + nbytes]


class SharedMemory:
    """One CTA's shared memory. Offsets start at 0; the first kilobyte is the system's, as on the hardware."""

    RESERVED = 1024

    def __init__(self, nbytes: int):
        self.size = nbytes
        padded = -(-nbytes // 16) * 16
        self.data: Bytes = np.zeros(padded, np.uint8)
        self.views = {width: self.data.view(dtype) for width, dtype in UINT.items()}

    def check(self, offsets: NDArray, nbytes: int) -> None:
        if offsets.size == 0:
            return
        low, high = int(offsets.min()), int(offsets.max())
        if low < self.RESERVED:
            raise OutOfBounds(low, nbytes, "shared memory below the kernel's own")
        if high + nbytes > self.size:
            raise OutOfBounds(high, nbytes, f"shared memory ends at {self.size:#x}")

    def load(self, offsets: NDArray, width: int, count: int = 1) -> NDArray:
        self.check(offsets, width * count)
        index = offsets // width
        if width > 1 and (offsets % width).any():
            raw = self.data[offsets + np.arange(width * count)[:, None]]
            return np.ascontiguousarray(raw.T).view(UINT[width]).T
        if count == 1:
            return self.views[width][index][None]
        return self.views[width][index + np.arange(count)[:, None]]

    def store(self, offsets: NDArray, values: NDArray, width: int, count: int = 1) -> None:
        self.check(offsets, width * count)
        if width > 1 and (offsets % width).any():
            raw = np.ascontiguousarray(values.T).view(np.uint8).reshape(offsets.size, -1)
            self.data[offsets[:, None] + np.arange(width * count)] = raw
            return
        index = offsets // width
        view = self.views[width]
        for k in range(count):
            view[index + k] = values[k]
