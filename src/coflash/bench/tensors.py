"""The tensors of a shape: random normal, never zeros, which draw less power and so run faster than data
does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coflash.bench.shapes import Shape


@dataclass
class Tensors:
    """(batch, seqlen, heads, dim), or (tokens, heads, dim) for packed sequences."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


def make(shape: Shape, device: torch.device, *, grad: bool, seed: int = 0) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator).to(shape.torch_dtype)

    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    if shape.lengths:
        rows_q = rows_k = (sum(shape.lengths),)
    else:
        rows_q, rows_k = (shape.batch, shape.seqlen_q), (shape.batch, shape.seqlen_k)
    q = normal(*rows_q, shape.heads, shape.head_dim).requires_grad_(grad)
    k = normal(*rows_k, shape.heads_kv, shape.head_dim).requires_grad_(grad)
    v = normal(*rows_k, shape.heads_kv, shape.head_dim_v).requires_grad_(grad)
    dout = normal(*rows_q, shape.heads, shape.head_dim_v)
    sink = normal(shape.heads) if shape.sink else None
    cu_seqlens = torch.tensor(shape.cu_seqlens, dtype=torch.int32, device=device) if shape.lengths else None
    return Tensors(shape, q, k, v, dout, sink, cu_seqlens)
