"""Which tiles there are: where each sequence's tokens lie, and which keys each block of queries may see.

A *query block* is the same range of positions in several sequences at once; its *tiles* are the key blocks
some of its queries see, in ascending order.  All sequences and heads of a tile are computed by one batched
product.  Tiles that causality, window, lengths or a BlockMask prove empty are never made, and tiles that
they prove fully visible are not masked.  Sequences are sorted by their number of tiles, so that those still
at work after t tiles are a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coflash.operands import BlockTables, Operands
from coflash.problem import Problem

__all__ = ["BlockMap", "QueryBlock", "Schedule", "Tile", "Tokens"]

TILE_SCORES = 1 << 20  # scores in one batched tile: enough to amortise a call, small enough for a cache
TILE_VALUES = 1 << 21  # elements in one batched tile of k or v

SMALLEST_TILE = 64  # queries or keys in a tile, where there are that many
Sequences = slice | Tensor  # some sequences of the batch: a range of it, or their indices


class Tokens:
    """One side of a call, queries or keys: where token t of sequence b lies.

    Either every sequence is a full row of a dense tensor (`even`), and tiles are slices; or tokens are
    gathered by index, positions past a sequence's end reading its last token.
    """

    def __init__(
        self,
        shape: torch.Size,
        batch: int,
        cu_seqlens: Tensor | None = None,
        seqused: Tensor | None = None,
        page_table: Tensor | None = None,
        batch_idx: Tensor | None = None,
        leftpad: Tensor | None = None,
        *,
        device: torch.device,
        even: bool = True,
    ) -> None:
        self.even = all(t is None for t in (cu_seqlens, seqused, page_table, batch_idx, leftpad)) and even
        self.packed = cu_seqlens is not None
        self.page_table = page_table
        self.page_size = shape[1] if page_table is not None else 0
        self.row_length = shape[1]  # tokens in a dense row or a page
        self.batch_idx = batch_idx
        self.start: Tensor | None = None
        if self.even:
            self.lengths = [shape[1]] * batch
            return
        if cu_seqlens is not None:
            self.start = cu_seqlens[:-1].long()
            lengths = cu_seqlens.diff()
        else:
            lengths = torch.full((batch,), shape[1], device=device)
        if seqused is not None:
            lengths = seqused
        if leftpad is not None:
            self.start = leftpad.long() if self.start is None else self.start + leftpad
            lengths = lengths - leftpad
        self.length = lengths.long().clamp(min=0)
        self.lengths = self.length.tolist()

    def index(self, sequences: Sequences, positions: Tensor) -> tuple[Tensor, ...]:
        """Index of `(n, count)` positions in the leading dimensions of a tensor of tokens."""
        assert isinstance(sequences, Tensor)
        at = torch.minimum(positions, (self.length[sequences, None] - 1).clamp_(min=0))
        if self.start is not None:
            at = at + self.start[sequences, None]
        if self.packed:
            return (at,)
        if self.page_table is not None:
            pages = self.page_table[sequences[:, None], at // self.page_size].long()
            return pages, at % self.page_size
        row = sequences if self.batch_idx is None else self.batch_idx[sequences].long()
        return row[:, None].expand_as(at), at

    def past_end(self, sequences: Sequences, positions: Tensor) -> Tensor | None:
        """Which of `(n, count)` positions lie past the end of their sequence; None: none can."""
        if self.even:
            return None
        assert isinstance(sequences, Tensor)
        return positions >= self.length[sequences, None]

    def load(self, tensor: Tensor, sequences: Sequences, positions: Tensor, low: int, high: int) -> Tensor:
        """Tokens of `tensor` as `(n, count, ...)`: of an even side the range, else the positions."""
        if self.even:
            return tensor[sequences, low:high]
        return tensor[self.index(sequences, positions)]

    def store(self, tensor: Tensor, sequences: Sequences, positions: Tensor, low: int, tile: Tensor) -> None:
        """Write a tile of tokens; positions past a sequence's end are left alone."""
        if self.even:
            tensor[sequences, low : low + tile.shape[1]] = tile
            return
        exists = (positions < self.length[sequences, None]).expand(tile.shape[:2])
        index = self.index(sequences, positions)
        tensor[tuple(i.expand(tile.shape[:2])[exists] for i in index)] = tile[exists].to(tensor.dtype)

    def add(self, tensor: Tensor, sequences: Sequences, positions: Tensor, low: int, tile: Tensor) -> None:
        """Add a tile of tokens.  What stands past a sequence's end must be zero.

        Two sequences never share a token, save through `cache_batch_idx`, so that the order of additions, and
        with it the result, is the same every run.
        """
        if self.even:
            tensor[sequences, low : low + tile.shape[1]] += tile
            return
        index = self.index(sequences, positions)
        row = index[0] if len(index) == 1 else index[0] * self.row_length + index[1]
        flat = tensor.view(-1, *tensor.shape[len(index) :])
        flat.index_add_(0, row.flatten(), tile.flatten(0, 1))


@dataclass(slots=True)
class Tile:
    """One key block of one query block, for the first `count` sequences of the block."""

    count: int
    sequences: Sequences
    indices: Tensor  # (count,) the same sequences as indices
    queries: Tensor  # (rows,) positions
    keys: Tensor  # (columns,) positions, or (count, columns) where sequences differ
    low: int  # first key position (of an even side)
    high: int
    offset: int | Tensor  # len_k - len_q: an int, or (count,)
    length: int | Tensor  # len_k: an int, or (count,)
    banded: bool  # part of the tile may lie outside the causal or window band, or past the keys' end
    blocked: bool  # part of the tile may be masked by mask_mod or BlockMask


@dataclass(slots=True)
class QueryBlock:
    count: int
    sequences: Sequences
    queries: Tensor
    low: int
    high: int
    tiles: list[Tile]


class BlockMap:
    """BlockMask's tables as maps over (b, h, query block, key block): seen in part, seen in full."""

    def __init__(self, tables: BlockTables, size: tuple[int, int], key_blocks: int) -> None:
        self.size = size
        self.partial = self._map(tables.num, tables.indices, key_blocks)
        self.full = None
        if tables.full_num is not None and tables.full_indices is not None:
            self.full = self._map(tables.full_num, tables.full_indices, key_blocks)
        seen = self.partial if self.full is None else self.partial | self.full
        # What the schedule asks: does any sequence and head see this block, do all see it fully?
        self.seen = seen.flatten(0, 1).any(0).cpu()
        self.whole = (
            torch.zeros_like(self.seen) if self.full is None else self.full.flatten(0, 1).all(0).cpu()
        )

    @staticmethod
    def _map(num: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
        width = indices.shape[-1]
        listed = torch.arange(width, device=indices.device) < num[..., None]
        listed &= indices < key_blocks  # a mask for longer keys lists blocks past their end
        target = torch.where(listed, indices.long(), key_blocks)
        seen = torch.zeros(*indices.shape[:-1], key_blocks + 1, dtype=torch.bool, device=indices.device)
        return seen.scatter_(-1, target, True)[..., :key_blocks]

    def covers(self, blocks: Tensor, low: int, high: int, first: int, last: int) -> Tensor:
        """The part of a block map that queries low..high-1 and keys first..last-1 touch."""
        rows, columns = self.size
        return blocks[low // rows : (high - 1) // rows + 1, first // columns : (last - 1) // columns + 1]


class Schedule:
    """The tiles of one call."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        o = operands
        self.problem = problem
        self.device = o.q.device
        queries = (o.cu_seqlens_q, o.seqused_q)
        keys = (o.cu_seqlens_k, o.seqused_k, o.page_table, o.cache_batch_idx, o.cache_leftpad)
        self.even = all(t is None for t in (*queries, *keys))
        self.q = Tokens(o.q.shape, problem.batch, *queries, device=self.device, even=self.even)
        self.k = Tokens(o.k.shape, problem.batch, *keys, device=self.device, even=self.even)
        self.blocks: BlockMap | None = None
        if o.block_tables is not None and problem.block_mask_size is not None:
            key_blocks = -(-max(problem.seqlen_k, 1) // problem.block_mask_size[1])
            self.blocks = BlockMap(o.block_tables, problem.block_mask_size, key_blocks)
        self.longest_q = max(self.q.lengths, default=0)
        self.longest_k = max(self.k.lengths, default=0)
        self.rows, self.columns = self._tile_shape()

    def _tile_shape(self) -> tuple[int, int]:
        """Queries and keys in a tile."""
        p = self.problem
        rows = SMALLEST_TILE
        while rows < 512 and p.nheads_q * (2 * rows) ** 2 <= TILE_SCORES:
            rows *= 2
        rows = max(1, min(rows, self.longest_q))
        columns = SMALLEST_TILE
        while (
            columns < 4096
            and 2 * columns * p.nheads_q * rows <= TILE_SCORES
            and 2 * columns * p.nheads_kv * max(p.head_dim, p.head_dim_v) <= TILE_VALUES
        ):
            columns *= 2
        return rows, max(1, min(columns, self.longest_k))

    def query_blocks(self) -> Iterator[QueryBlock]:
        """Every block of queries that exist, for as many sequences at a time as make a good tile."""
        p = self.problem
        at_once = max(1, TILE_SCORES // max(1, p.nheads_q * self.rows * self.columns))
        for low in range(0, self.longest_q, self.rows):
            high = min(low + self.rows, self.longest_q)
            queries = torch.arange(low, high, device=self.device)
            if self.even:
                starts = self._visible(0, low, high)
                for first in range(0, p.batch, at_once):
                    yield self._even_block(first, min(first + at_once, p.batch), queries, low, high, starts)
                continue
            work = [(b, self._visible(b, low, high)) for b in range(p.batch) if self.q.lengths[b] > low]
            work.sort(key=lambda item: -len(item[1]))
            for first in range(0, len(work), at_once):
                yield self._gathered_block(work[first : first + at_once], queries, low, high)

    def _visible(self, b: int, low: int, high: int) -> list[int]:
        """First key of every block of keys that some query low..high-1 of sequence b may see."""
        length = self.k.lengths[b]
        offset = length - self.q.lengths[b]
        high = min(high, self.q.lengths[b])
        left, right = self.problem.window
        first = 0 if left is None else max(0, low + offset - left)
        last = length - 1 if right is None else min(length - 1, high - 1 + offset + right)
        starts = range(first // self.columns * self.columns, last + 1, self.columns) if last >= first else ()
        if self.blocks is None:
            return list(starts)
        seen = self.blocks.covers
        return [
            j
            for j in starts
            if bool(seen(self.blocks.seen, low, high, j, min(j + self.columns, length)).any())
        ]

    def _banded(self, b: int, low: int, high: int, start: int, columns: int) -> bool:
        """Whether queries low..high-1 of sequence b miss some of the keys start..start+columns-1."""
        length = self.k.lengths[b]
        offset = length - self.q.lengths[b]
        high = min(high, self.q.lengths[b])
        left, right = self.problem.window
        return (
            start + columns > length
            or (left is not None and start < high - 1 + offset - left)
            or (right is not None and start + columns - 1 > low + offset + right)
        )

    def _blocked(self, low: int, high: int, start: int, stop: int) -> bool:
        """Whether mask_mod or BlockMask may hide something in the tile."""
        if self.blocks is None:
            return self.problem.mask_mod is not None
        return not bool(self.blocks.covers(self.blocks.whole, low, high, start, stop).all())

    def _even_block(
        self, first: int, last: int, queries: Tensor, low: int, high: int, starts: list[int]
    ) -> QueryBlock:
        length = self.longest_k
        sequences = slice(first, last)
        indices = torch.arange(first, last, device=self.device)
        tiles = []
        for start in starts:
            stop = min(start + self.columns, length)
            tiles.append(
                Tile(
                    count=last - first,
                    sequences=sequences,
                    indices=indices,
                    queries=queries,
                    keys=torch.arange(start, stop, device=self.device),
                    low=start,
                    high=stop,
                    offset=length - self.longest_q,
                    length=length,
                    banded=self._banded(0, low, high, start, stop - start),
                    blocked=self._blocked(low, high, start, stop),
                )
            )
        return QueryBlock(last - first, sequences, queries, low, high, tiles)

    def _gathered_block(
        self, work: list[tuple[int, list[int]]], queries: Tensor, low: int, high: int
    ) -> QueryBlock:
        members = [b for b, _ in work]
        high = min(high, max(self.q.lengths[b] for b in members))
        queries = queries[: high - low]
        sequences = torch.tensor(members, device=self.device)
        length_k = torch.tensor([self.k.lengths[b] for b in members], device=self.device)
        length_q = torch.tensor([self.q.lengths[b] for b in members], device=self.device)
        tiles = []
        for step in range(len(work[0][1])):
            active = [(b, starts[step]) for b, starts in work if len(starts) > step]
            count = len(active)
            furthest = max(min(start + self.columns, self.k.lengths[b]) - start for b, start in active)
            first_keys = torch.tensor([start for _, start in active], device=self.device)
            keys = first_keys[:, None] + torch.arange(furthest, device=self.device)
            tiles.append(
                Tile(
                    count=count,
                    sequences=sequences[:count],
                    indices=sequences[:count],
                    queries=queries,
                    keys=keys,
                    low=0,
                    high=0,
                    offset=(length_k - length_q)[:count],
                    length=length_k[:count],
                    banded=any(self._banded(b, low, high, start, furthest) for b, start in active),
                    blocked=any(
                        self._blocked(low, high, start, min(start + furthest, self.k.lengths[b]))
                        for b, start in active
                    ),
                )
            )
        return QueryBlock(len(members), sequences, queries, low, high, tiles)
