"""What happens to a tile of scores between the two products: softcap, alibi, score_mod, masks, dropout.

A tile of scores is `(sequences, nheads_q, queries, keys)`.  PyTorch's FlexAttention calls its functions under
vmap, one score at a time; so do we, so that whatever works there works here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coflash.operands import Operands
from coflash.portable.schedule import Schedule, Tile
from coflash.problem import Problem

__all__ = ["Scores"]


class Scores:
    """The score transforms of one call."""

    def __init__(self, problem: Problem, operands: Operands, schedule: Schedule) -> None:
        self.problem = problem
        self.schedule = schedule
        self.alibi_slopes = operands.alibi_slopes
        self.dropout_seed = operands.dropout_seed
        self.heads = torch.arange(problem.nheads_q, device=operands.q.device)
        self.transforms = problem.softcap != 0 or problem.has_alibi or problem.score_mod is not None
        left, right = problem.window
        self.left, self.right = left, right

    # -- score -> score ------------------------------------------------------------------------------------

    def transform(self, scores: Tensor, tile: Tile) -> Tensor:
        """Softcap, alibi, score_mod, on scaled scores in natural units."""
        p = self.problem
        if p.softcap:
            scores = p.softcap * torch.tanh(scores / p.softcap)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.to(scores.dtype)
            slopes = slopes if slopes.dim() == 1 else slopes[tile.indices]
            scores = scores - slopes[..., :, None, None] * self._relative(tile).abs().to(scores.dtype)
        if p.score_mod is not None:
            scores = self._over_tile(p.score_mod, tile, scores).to(scores.dtype)
        return scores

    # -- masks -----------------------------------------------------------------------------------------------

    def visible(self, tile: Tile) -> Tensor | None:
        """Which scores of the tile count, broadcasting to it; None: all."""
        keep: Tensor | None = None
        if tile.banded:
            relative = self._relative(tile)
            if self.right is not None:
                keep = relative <= self.right
            if self.left is not None:
                near = relative >= -self.left
                keep = near if keep is None else keep & near
            if isinstance(tile.length, Tensor):
                exists = (tile.keys < tile.length[:, None])[:, None, None, :]
                keep = exists if keep is None else keep & exists
        if tile.blocked:
            chosen = self._chosen(tile)
            keep = chosen if keep is None else keep & chosen
        return keep

    def _relative(self, tile: Tile) -> Tensor:
        """Key position minus the query's position among the keys, broadcasting to the tile."""
        offset = tile.offset
        if isinstance(offset, Tensor):
            offset = offset[:, None, None, None]
        keys = tile.keys if tile.keys.dim() == 1 else tile.keys[:, None, None, :]
        return keys - (tile.queries[:, None] + offset)

    def _chosen(self, tile: Tile) -> Tensor:
        """mask_mod and BlockMask: a block listed as full is seen without asking mask_mod."""
        p, blocks = self.problem, self.schedule.blocks
        keep = None if p.mask_mod is None else self._over_tile(p.mask_mod, tile)
        if blocks is None:
            assert keep is not None
            return keep
        partial = self._blocks_at(blocks.partial, blocks.size, tile)
        keep = partial if keep is None else partial & keep
        return keep if blocks.full is None else keep | self._blocks_at(blocks.full, blocks.size, tile)

    def _blocks_at(self, blocks: Tensor, size: tuple[int, int], tile: Tile) -> Tensor:
        b = tile.indices if blocks.shape[0] > 1 else tile.indices * 0
        h = self.heads if blocks.shape[1] > 1 else self.heads * 0
        keys = self._safe_keys(tile)
        keys = keys if keys.dim() == 1 else keys[:, None, None, :]
        return blocks[
            b[:, None, None, None],
            h[:, None, None],
            tile.queries[:, None] // size[0],
            keys // size[1],
        ]

    def _safe_keys(self, tile: Tile) -> Tensor:
        """Key positions that a table indexed by position can be asked for (those past the end are masked)."""
        return tile.keys if self.schedule.even else tile.keys.clamp(max=self.schedule.longest_k - 1)

    def _over_tile(self, function: Callable[..., Any], tile: Tile, scores: Tensor | None = None) -> Tensor:
        """Call a FlexAttention function at every (sequence, head, query, key) of the tile."""
        keys = self._safe_keys(tile)
        first = () if scores is None else (0,)
        axes = (
            (None, None, None, 0),  # keys, innermost
            (None, None, 0, None),
            (None, 0, None, None),
            (0, None, None, 0 if keys.dim() == 2 else None),  # sequences
        )
        for axis in axes:
            function = torch.vmap(function, in_dims=first + axis)
        arguments = (tile.indices, self.heads, tile.queries, keys)
        return function(*arguments) if scores is None else function(scores, *arguments)

    # -- dropout ---------------------------------------------------------------------------------------------

    def kept(self, tile: Tile) -> Tensor:
        """Which weights dropout keeps: a hash of seed, sequence, head, query and key, whatever the tiling."""
        assert self.dropout_seed is not None
        keys = tile.keys if tile.keys.dim() == 1 else tile.keys[:, None, None, :]
        row = _mix(self.dropout_seed.reshape(()).long() + _signed(0x9E3779B97F4A7C15))
        row = _mix(row + tile.indices[:, None, None, None])
        row = _mix(row + self.heads[:, None, None])
        row = _mix(row + tile.queries[:, None])
        bits = _mix(row + keys * _signed(0xD1342543DE82EF95)) >> 32  # signed 32 bits
        return bits >= int(self.problem.dropout_p * 2.0**32) - 2**31


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014) on wrapping int64."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
