"""The order in which tiles are worked on.

Head after head, so that the blocks running at one time share K and V, and the memory is asked for the next head's
while the cache serves this one's; within a head from the longest tile of a causal triangle to the shortest.  Blocks
fetch tiles as they go, so tiles of different length balance by themselves, but for the end: there the last heads
stand side by side, their longest tiles first, and what is left for the very end is short.
"""

from cutlass import Int32

from coflash.kernels.parts.ptx import choose, least

ROUNDS = 3  # tiles of a block among the heads that stand side by side


def heads_beside(m_blocks: Int32, heads: Int32, blocks: Int32) -> Int32:
    """How many of the last heads stand side by side, when `blocks` work at a time."""
    return least((ROUNDS * blocks + m_blocks - 1) // m_blocks, heads)


def place(index: Int32, m_blocks: Int32, heads: Int32, beside: Int32) -> tuple[Int32, Int32]:
    """Tile `index` of `m_blocks * heads` as (m_block, head)."""
    alone = heads - beside
    last = index >= alone * m_blocks
    within = index - choose(last, alone * m_blocks, 0)
    width = choose(last, beside, m_blocks)
    major = within // width
    minor = within - major * width
    row = choose(last, major, minor)
    return m_blocks - 1 - row, choose(last, alone + minor, major)
