"""How much of the score matrix a call computes, tile by tile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coflash.problem import Problem


@dataclass(frozen=True)
class Row:
    """The blocks of keys that one tile of queries visits."""

    blocks: int
    masked: int  # of these, blocks in which some query does not see some key


def visible_pairs(problem: Problem) -> int:
    """Query-key pairs of one head and sequence that the masks let through (lengths, causal, window)."""
    left, right = problem.window
    offset = problem.seqlen_k - problem.seqlen_q
    if left is None and right is None:
        return problem.seqlen_q * problem.seqlen_k
    total = 0
    for i in range(problem.seqlen_q):
        low = 0 if left is None else max(0, i + offset - left)
        high = problem.seqlen_k if right is None else min(problem.seqlen_k, i + offset + right + 1)
        total += max(0, high - low)
    return total


def rows(problem: Problem, tile_positions: int, tile_n: int) -> Counter[Row]:
    """For each kind of query tile of one head and sequence, how many there are."""
    left, right = problem.window
    offset = problem.seqlen_k - problem.seqlen_q
    found: Counter[Row] = Counter()
    for first in range(0, problem.seqlen_q, tile_positions):
        last = min(first + tile_positions, problem.seqlen_q) - 1
        low = 0 if left is None else max(0, first + offset - left)
        high = problem.seqlen_k if right is None else min(problem.seqlen_k, last + offset + right + 1)
        if high <= low:
            found[Row(0, 0)] += 1
            continue
        begin, end = low // tile_n, -(-high // tile_n)
        # Every query of the tile sees [all_low, all_high): blocks inside need no mask.
        all_low = 0 if left is None else max(0, last + offset - left)
        all_high = problem.seqlen_k if right is None else min(problem.seqlen_k, first + offset + right + 1)
        clear = max(0, all_high // tile_n - -(-all_low // tile_n))
        found[Row(end - begin, max(0, end - begin - clear))] += 1
    return found
