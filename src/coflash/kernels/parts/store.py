"""Accumulator to global memory, 16 bytes a lane, without shared memory.

In an accumulator the four lanes of a quad hold 4 bytes each of every 8-column chunk of a row.  A transpose inside
the quad, four chunks at a time, leaves each lane with one whole chunk: 16 contiguous bytes.  No staging buffer,
no barrier, and every row is predicated on its own, so short tiles, packed sequences and shared rows need no other way.
"""

from cutlass import Boolean, Int32, Int64

from coflash.kernels.parts import ptx
from coflash.kernels.parts.control import when


def transpose_quad(words: list[Int32], lane: Int32) -> list[Int32]:
    """Lane q of a quad, holding its share of chunks 0..3, gets all four shares of chunk q."""
    odd, upper = (lane & 1) != 0, (lane & 2) != 0
    a = list(words)
    for low, high, mask, swap in ((0, 1, 1, odd), (2, 3, 1, odd), (0, 2, 2, upper), (1, 3, 2, upper)):
        received = ptx.exchange(ptx.choose(swap, a[low], a[high]), mask)
        a[low], a[high] = (
            ptx.choose(swap, received, a[low]),
            ptx.choose(swap, a[high], received),
        )
    return a


def store_rows(
    words: list[Int32], rows: list[Int64], valid: list[Boolean], columns: int, lane: Int32
) -> None:
    """Write a thread's two rows to `rows`, their addresses; `columns` of the tile exist.

    `words`: the accumulator rounded to 16 bits, two columns a word; of each chunk one for each row."""
    quad = lane % 4
    for half in range(2):
        for group in range(0, len(words) // 2, 4):
            mine = transpose_quad([words[2 * chunk + half] for chunk in range(group, group + 4)], lane)
            column = 8 * (group + quad)
            there = valid[half]
            if 8 * (group + 4) > columns:
                there = there & (column < columns)
            with when(there):
                ptx.store_16_bytes(rows[half] + Int64(2 * column), mine)
