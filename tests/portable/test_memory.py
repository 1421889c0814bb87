"""Memory is linear: no tensor of the size of the scores is ever made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coflash.operands import Operands
from coflash.portable import Numerics, backward, double_backward, forward, schedule
from coflash.problem import Problem


class Largest(TorchDispatchMode):
    """The most elements that any operation's result occupies."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, size)
        return result


@pytest.mark.parametrize("options", ({}, {"causal": True, "softcap": 5.0}, {"window_left": 100}), ids=str)
def test_no_tensor_of_the_scores_size(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TILE_SCORES", 1 << 17)
    tokens, dim = 3000, 8
    q, k, v, dout = (torch.randn(1, tokens, 1, dim) for _ in range(4))
    problem = Problem(
        dtype=torch.float32,
        device_type="cpu",
        head_dim=dim,
        head_dim_v=dim,
        nheads_q=1,
        nheads_kv=1,
        batch=1,
        seqlen_q=tokens,
        seqlen_k=tokens,
        **options,
    )
    operands = Operands(q, k, v, softmax_scale=0.3)
    with Largest() as largest:
        out, lse = forward(problem, operands, Numerics())
        delta = (dout * out).sum(-1).transpose(1, 2).double()
        gradients = backward(problem, operands, Numerics(), dout, lse, delta)
        double_backward(problem, operands, dout, lse, delta, gradients)
    assert largest.elements <= 2 * (1 << 17)  # a tile of scores; their indices may take twice the bytes
    assert largest.elements < tokens * tokens / 30
