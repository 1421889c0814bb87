"""Branches without the DSL's rewriting of Python, which costs as much time as tracing does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cutlass import Boolean
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf


class Branch:
    """Code for where a condition holds, and code for elsewhere; what either makes must lie in memory or in
    register tensors."""

    def __init__(self, condition: Boolean, otherwise: bool = True) -> None:
        self._if = scf.IfOp(condition.ir_value(), has_else=otherwise)

    @contextlib.contextmanager
    def then(self) -> Iterator[None]:
        with ir.InsertionPoint(self._if.then_block):
            yield
            scf.yield_([])

    @contextlib.contextmanager
    def otherwise(self) -> Iterator[None]:
        with ir.InsertionPoint(self._if.else_block):
            yield
            scf.yield_([])


def when(condition: Boolean) -> contextlib.AbstractContextManager[None]:
    """Code for where the condition holds."""
    return Branch(condition, otherwise=False).then()
