"""The order in which tiles are worked on.

Heads are taken in sections whose K and V fit into L2 together.  Inside a section the longest tiles come first and
all heads of the section stand side by side, so that the blocks running at one time share K and V, and the tiles
that are left for the end are short ones.
"""

from cutlass import Int32

from coflash.kernels.parts.ptx import least, most

L2_BYTES = 24 * 2**20  # of K and V that a section may hold: the cache also serves Q and out
ROUNDS = 3  # ... unless that leaves a block fewer tiles than this: the last section then ends raggedly


def section_heads(kv_bytes, m_blocks: Int32, heads, blocks: Int32) -> Int32:
    """Heads in a section, when one head's K and V are `kv_bytes` long and `blocks` work at a time."""
    fitting = Int32(L2_BYTES) // most(Int32(kv_bytes), Int32(1))
    enough = (ROUNDS * blocks + m_blocks - 1) // most(m_blocks, Int32(1))
    return most(least(most(fitting, enough), Int32(heads)), Int32(1))


def place(index: Int32, m_blocks: Int32, heads: Int32, section: Int32) -> tuple[Int32, Int32]:
    """Tile `index` of `m_blocks * heads` as (m_block, head)."""
    tiles = section * m_blocks
    number = index // tiles
    within = index - number * tiles
    width = least(section, heads - number * section)
    row = within // width
    return m_blocks - 1 - row, number * section + within - row * width
