"""`Operands`: the tensors of one attention call, named as every room names them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LENGTHS", "BlockTables", "Operands", "row_dtype"]


class BlockTables(NamedTuple):
    """The tables of PyTorch's BlockMask: which key blocks a query block sees in part, and which in full.

    `indices[b, h, i, :num[b, h, i]]` are the key blocks of query block i; b and h broadcast.
    """

    num: Tensor
    indices: Tensor
    full_num: Tensor | None
    full_indices: Tensor | None


class Operands(NamedTuple):
    """One call's tensors and its softmax scale.  The first six fields are those that can have a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    captured: tuple[Tensor, ...] = ()  # what score_mod captures and wants a gradient for
    softmax_scale: float = 1.0
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    dropout_seed: Tensor | None = None
    block_tables: BlockTables | None = None


LENGTHS = Operands._fields[7:11]  # where sequences lie: cu_seqlens and seqused


def row_dtype(q: Tensor) -> torch.dtype:
    """Dtype of what is kept for each row between forward and backward: its log-sum-exp, and D.

    The backward recomputes weights as exp(s - lse), so that the rounding of lse is an error of a whole row
    of weights.  For float32 inputs that of a float32 lse would be larger than the product's own error, so it
    stays in float64; callers see float32.
    """
    if q.dtype in (torch.float16, torch.bfloat16) or q.device.type == "mps":
        return torch.float32
    return torch.float64
