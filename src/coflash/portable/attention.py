"""FlashAttention-4's algorithm in PyTorch operations: forward, backward, and the derivative of the backward.

All three walk over the same tiles (`schedule.py`) and recompute a tile's scores where they need them, so that
memory grows linearly with the sequence.  Query heads that share keys are rows of one product: a block of
queries is `(sequences * nheads_kv, group * queries, head_dim)`, a tile of keys
`(sequences * nheads_kv, keys, head_dim)`.

With s a scaled, transformed and masked score, and L a row's log-sum-exp:

    forward    P = exp(s - L)       O = P V
    backward   dV = P^T dO          dP = dO V^T        ds = P (dP - D)       dQ = ds K     dK = ds^T Q

D is `rowsum(dO * O)`, which equals the row sum of P dP; a gradient dL of the log-sum-exp enters as `D - dL`,
because dL/ds = P.  What softcap, alibi and score_mod do to a score is differentiated by automatic
differentiation, one tile at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coflash.operands import Operands, row_dtype
from coflash.portable.schedule import QueryBlock, Schedule, Tile
from coflash.portable.scores import Scores
from coflash.portable.softmax import LOG2E, Numerics, OnlineSoftmax
from coflash.problem import Problem

__all__ = ["backward", "double_backward", "forward"]


def forward(problem: Problem, operands: Operands, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    call = _Call(problem, operands, numerics)
    q, k, v = operands.q, operands.k, operands.v
    out = q.new_zeros(*q.shape[:-1], problem.head_dim_v)
    lse = call.new_rows(-math.inf)
    for block in call.schedule.query_blocks():
        queries = call.load_rows(q, block)
        softmax = OnlineSoftmax(queries.shape[:2], queries, call.score_scale, call.sink_rows(block), numerics)
        accumulator = queries.new_zeros(*queries.shape[:2], problem.head_dim_v)
        for tile in block.tiles:
            n = call.prefix(tile)
            scores, _, _ = call.tile_scores(queries[:n], call.load_columns(k, tile), tile)
            weights, factor = softmax.update(scores)
            if factor is not None:
                accumulator[:n].mul_(factor)
            accumulator[:n].baddbmm_(call.round(call.drop(weights, tile)), call.load_columns(v, tile))
        accumulator.div_(softmax.divisor())
        call.store_rows(out, block, accumulator)
        call.store_rows(lse[..., None], block, softmax.lse(lse.dtype))
    return out, call.by_head(lse)


def backward(
    problem: Problem, operands: Operands, numerics: Numerics, dout: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, then of alibi_slopes if given and of every captured tensor.

    lse and delta are `(batch, nheads_q, seqlen_q)`, or `(nheads_q, total_q)` for packed queries.
    """
    call = _Call(problem, operands, numerics)
    q, k, v = operands.q, operands.k, operands.v
    dq, dk, dv = call.new_zeros(q.shape), call.new_zeros(k.shape), call.new_zeros(v.shape)
    dparameters = [torch.zeros_like(t) for t in call.parameters]
    for block in call.schedule.query_blocks():
        rows = _Rows(call, block, q, dout, lse, delta)
        dqueries = torch.zeros_like(rows.q)
        for tile in block.tiles:
            n = call.prefix(tile)
            keys, values = call.load_columns(k, tile), call.load_columns(v, tile)
            queries, douts = rows.q[:n], rows.dout[:n]
            weights, dscores, found = call.tile_differentials(
                queries, keys, values, douts, rows.lse[:n], rows.delta[:n], tile
            )
            dqueries[:n].baddbmm_(dscores, keys)
            call.add_columns(dk, tile, torch.bmm(dscores.mT, queries))
            call.add_columns(dv, tile, torch.bmm(weights.mT, douts))
            for total, part in zip(dparameters, found, strict=True):
                total += part
        call.store_rows(dq, block, dqueries)
    scale = operands.softmax_scale
    return dq.mul_(scale).to(q.dtype), dk.mul_(scale).to(k.dtype), dv.to(v.dtype), *dparameters


def double_backward(
    problem: Problem,
    operands: Operands,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    cotangents: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Gradients of `backward`'s results, for q, k, v, dout, lse, delta and its parameters.

    `backward` is a sum over tiles of one function of the tile's rows and columns, so its derivative is a sum
    over tiles too: that function is recomputed under automatic differentiation, one tile at a time.
    """
    call = _Call(problem, operands, Numerics())
    q, k, v = operands.q, operands.k, operands.v
    scale = operands.softmax_scale
    to_dq, to_dk, to_dv, *to_dparameters = cotangents
    results = [call.new_zeros(t.shape) for t in (q, k, v, dout)]
    gq, gk, gv, gdout = results
    glse, gdelta = call.new_rows(0.0), call.new_rows(0.0)
    gparameters = [torch.zeros_like(t) for t in call.parameters]
    for block in call.schedule.query_blocks():
        rows = _Rows(call, block, q, dout, lse, delta, exact=False).all()
        towards_dq = None if to_dq is None else call.load_rows(to_dq, block) * scale
        totals = [torch.zeros_like(t) for t in rows]
        for tile in block.tiles:
            n = call.prefix(tile)
            with torch.enable_grad():
                keys = call.load_columns(k, tile).requires_grad_()
                values = call.load_columns(v, tile).requires_grad_()
                queries, douts, lses, deltas = (t[:n].detach().requires_grad_() for t in rows)
                weights, dscores, found = call.tile_differentials(
                    queries, keys, values, douts, lses, deltas, tile, twice=True
                )
                results, directions = [], []
                if towards_dq is not None:
                    results.append(torch.bmm(dscores, keys))
                    directions.append(towards_dq[:n])
                if to_dk is not None:
                    results.append(torch.bmm(dscores.mT, queries))
                    directions.append(call.load_columns(to_dk, tile) * scale)
                if to_dv is not None:
                    results.append(torch.bmm(weights.mT, douts))
                    directions.append(call.load_columns(to_dv, tile))
                for result, direction in zip(found, to_dparameters, strict=True):
                    if direction is not None and result.requires_grad:
                        results.append(result)
                        directions.append(direction)
                inputs = (queries, douts, lses, deltas, keys, values, *call.differentiable)
                parts = torch.autograd.grad(
                    results, inputs, directions, allow_unused=True, materialize_grads=True
                )
            for total, part in zip(totals, parts[:4], strict=True):
                total[:n] += part
            call.add_columns(gk, tile, parts[4])
            call.add_columns(gv, tile, parts[5])
            for total, part in zip(call.of_differentiable(gparameters), parts[6:], strict=True):
                total += part
        totals[2] /= call.score_scale  # from the scores' units to natural ones
        for target, total in zip((gq, gdout, glse[..., None], gdelta[..., None]), totals, strict=True):
            call.store_rows(target, block, total)
    return (
        gq.to(q.dtype),
        gk.to(k.dtype),
        gv.to(v.dtype),
        gdout.to(dout.dtype),
        call.by_head(glse),
        call.by_head(gdelta),
        *gparameters,
    )


class _Call:
    """One call on the portable path: its tiles, its scores, and the way between tokens and tiles."""

    def __init__(self, problem: Problem, operands: Operands, numerics: Numerics) -> None:
        self.problem = problem
        self.operands = operands
        self.numerics = numerics
        self.device = operands.q.device
        self.dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
        self.row_dtype = row_dtype(operands.q)
        self.schedule = Schedule(problem, operands)
        self.scores = Scores(problem, operands, self.schedule)
        # Without a transform, scores stay what the product gives and their scale joins the exponential.
        scale = operands.softmax_scale
        self.score_scale = 1.0 if self.scores.transforms or scale == 0 else abs(scale)
        alibi = operands.alibi_slopes
        self.parameters = operands.captured if alibi is None else (alibi, *operands.captured)
        self.differentiable = tuple(t for t in self.parameters if t.requires_grad)

    def of_differentiable(self, values: list[Tensor]) -> list[Tensor]:
        """The entries of a list parallel to `parameters` whose parameter requires grad."""
        return [x for x, t in zip(values, self.parameters, strict=True) if t.requires_grad]

    # -- the arithmetic of one tile ------------------------------------------------------------------------

    def tile_scores(
        self, queries: Tensor, keys: Tensor, tile: Tile, graph: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Masked scores, which times `score_scale` are in natural units.

        With `graph` also the scaled scores, and what was made of them, for `pull_back`.
        """
        scale = self.operands.softmax_scale
        raw = transformed = None
        if self.scores.transforms:
            raw = self.per_head(torch.bmm(queries, keys.mT).mul_(scale), tile)
            if graph:
                raw = raw if raw.requires_grad else raw.requires_grad_()
            with torch.set_grad_enabled(graph):
                transformed = self.scores.transform(raw, tile)
            scores = transformed if torch.is_grad_enabled() else transformed.detach()
            scores = scores.clone().reshape(*queries.shape[:2], keys.shape[1])  # to be overwritten
        else:
            empty = queries.new_empty(())
            scores = torch.baddbmm(empty, queries, keys.mT, beta=0, alpha=scale / self.score_scale)
        keep = self.scores.visible(tile)
        if keep is not None:
            self.per_head(scores, tile).masked_fill_(~keep, -math.inf)
        return scores, raw, transformed

    def tile_differentials(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        douts: Tensor,
        lse: Tensor,
        delta: Tensor,
        tile: Tile,
        twice: bool = False,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """A tile's weights, the gradient of its scores, and its part of the gradients of `parameters`.

        Every gradient of the call is a product with the first two.  `twice`: under automatic differentiation.
        """
        scores, raw, transformed = self.tile_scores(queries, keys, tile, graph=True)
        numerics = Numerics() if twice else self.numerics
        exponents = scores.sub_(lse).mul_(self.score_scale * LOG2E)
        weights = numerics.exp2_(exponents)
        dweights = torch.bmm(douts, values.mT)
        dropped = self.drop(weights, tile)
        dscores = self.drop(dweights, tile).sub_(delta).mul_(weights)
        found: tuple[Tensor, ...] = ()
        if raw is not None and transformed is not None:
            dscores, found = self.pull_back(raw, transformed, self.per_head(dscores, tile), twice)
            dscores = dscores.reshape(weights.shape)
        return self.round(dropped), self.round(dscores), found

    def pull_back(
        self, raw: Tensor, transformed: Tensor, gradient: Tensor, twice: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradients of a tile's transformed scores for the raw ones and for `parameters`."""
        wanted = (raw, *self.differentiable)
        if transformed.requires_grad:
            found = torch.autograd.grad(
                transformed, wanted, gradient, create_graph=twice, allow_unused=True, materialize_grads=True
            )
        else:  # score_mod ignores the score
            found = tuple(torch.zeros_like(t) for t in wanted)
        parts = iter(found[1:])
        parameters = tuple(next(parts) if t.requires_grad else torch.zeros_like(t) for t in self.parameters)
        return found[0], parameters

    def drop(self, weights: Tensor, tile: Tile) -> Tensor:
        p = self.problem.dropout_p
        if not p:
            return weights
        kept = self.scores.kept(tile).expand(self.per_head(weights, tile).shape)
        return torch.where(kept.reshape(weights.shape), weights * (1 / (1 - p)), 0.0)

    def round(self, weights: Tensor) -> Tensor:
        """16-bit inputs meet 16-bit weights in the second product, which is summed in float32."""
        return weights if self.problem.dtype == self.dtype else weights.to(self.problem.dtype).to(self.dtype)

    # -- between tokens and tiles --------------------------------------------------------------------------

    def load_rows(self, tensor: Tensor, block: QueryBlock, dtype: torch.dtype | None = None) -> Tensor:
        """A block's tokens of a query-side tensor, as `(sequences * nheads_kv, group * queries, dim)`."""
        tokens = self.schedule.q.load(tensor, block.sequences, block.queries, block.low, block.high)
        count, rows, heads, dim = tokens.shape
        tile = torch.empty(count, heads, rows, dim, dtype=dtype or self.dtype, device=self.device)
        tile.copy_(tokens.transpose(1, 2))
        return tile.view(count * self.problem.nheads_kv, self.problem.group_size * rows, dim)

    def store_rows(self, tensor: Tensor, block: QueryBlock, tile: Tensor) -> None:
        tokens = tile.view(block.count, self.problem.nheads_q, -1, tile.shape[-1]).transpose(1, 2)
        self.schedule.q.store(tensor, block.sequences, block.queries, block.low, tokens)

    def load_columns(self, tensor: Tensor, tile: Tile) -> Tensor:
        """A tile's tokens of a key-side tensor, as `(sequences * nheads_kv, keys, dim)`."""
        tokens = self.schedule.k.load(tensor, tile.sequences, tile.keys, tile.low, tile.high)
        count, columns, heads, dim = tokens.shape
        result = torch.empty(count, heads, columns, dim, dtype=self.dtype, device=self.device)
        result.copy_(tokens.transpose(1, 2))
        return result.view(count * heads, columns, dim)

    def add_columns(self, tensor: Tensor, tile: Tile, part: Tensor) -> None:
        tokens = part.view(tile.count, self.problem.nheads_kv, -1, part.shape[-1]).transpose(1, 2)
        self.schedule.k.add(tensor, tile.sequences, tile.keys, tile.low, tokens)

    def per_head(self, scores: Tensor, tile: Tile) -> Tensor:
        """A tile of scores as `(sequences, nheads_q, queries, keys)`."""
        return scores.view(tile.count, self.problem.nheads_q, -1, scores.shape[-1])

    def prefix(self, tile: Tile) -> int:
        """The tile's share of its block's leading extent: its sequences come first."""
        return tile.count * self.problem.nheads_kv

    def sink_rows(self, block: QueryBlock) -> Tensor | None:
        """The sink of every row of a block."""
        if self.operands.sink is None:
            return None
        sink = self.operands.sink.to(self.row_dtype)
        shape = (block.count, self.problem.nheads_q, block.high - block.low)
        rows = sink[:, None].expand(shape).reshape(block.count * self.problem.nheads_kv, -1, 1)
        return rows

    # -- one number per query and head: tokens first inside, heads first outside ---------------------------

    def new_zeros(self, shape: torch.Size) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def new_rows(self, value: float) -> Tensor:
        return torch.full(self.operands.q.shape[:-1], value, dtype=self.row_dtype, device=self.device)

    @staticmethod
    def by_head(rows: Tensor) -> Tensor:
        """`(batch, seqlen, nheads)` or `(total, nheads)` with the heads before the tokens, and back."""
        return rows.transpose(-1, -2).contiguous()


class _Rows:
    """The query side of a block in the backward.

    `lse` is in the scores' own units and precision.  What rounding it leaves out is a factor close to 1 on a
    row's weights; it multiplies `dout` and `delta` instead, in which all gradients are linear together.
    """

    def __init__(
        self,
        call: _Call,
        block: QueryBlock,
        q: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        exact: bool = True,
    ) -> None:
        self.q = call.load_rows(q, block)
        self.dout = call.load_rows(dout, block)
        wide = call.row_dtype
        delta = call.load_rows(delta.transpose(-1, -2)[..., None], block, wide)
        natural = call.load_rows(lse.transpose(-1, -2)[..., None], block, wide)
        self.lse = (natural / call.score_scale).to(call.dtype)
        if exact and wide != call.dtype:
            factor = torch.exp(self.lse.to(wide) * call.score_scale - natural)
            factor = torch.where(natural.isfinite(), factor, 1.0)
            self.dout.mul_(factor)
            delta = delta * factor
        self.delta = delta.to(call.dtype)
        # Rows that see nothing, and rows past a sequence's end, take no part: their weights become 2**-inf.
        self.lse.masked_fill_(self.lse == -math.inf, math.inf)
        past_end = call.schedule.q.past_end(block.sequences, block.queries)
        if past_end is not None:
            rows = self.lse.view(block.count, call.problem.nheads_q, -1)
            rows.masked_fill_(past_end[:, None, :], math.inf)

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.dout, self.lse, self.delta
