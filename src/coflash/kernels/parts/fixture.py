"""Objects that dynamic loops leave alone."""

from __future__ import annotations

from typing import Any

from cutlass import Numeric, cute
from cutlass._mlir.dialects import llvm


class Fixture:
    """Base of helper objects whose parts are all fixed before a loop, its registers being tensors.

    The DSL carries every object whose methods a dynamic loop calls through the loop as values.  Such an object has
    none to carry: what changes lives in register tensors, which the loop reaches from outside."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list):
        return self


class Registers(Fixture):
    """A few numbers that loops carry without being told to.

    So does a register tensor of the DSL; here an access is one operation in place of five."""

    def __init__(self, kind: type[Numeric], count: int) -> None:
        tensor = cute.make_rmem_tensor((count,), kind)
        self._kind = kind
        first = tensor.iterator.llvm_ptr
        flags = llvm.GEPNoWrapFlags.none
        self._places = [first] + [
            llvm.getelementptr(first.type, first, [], [i], kind.mlir_type, flags) for i in range(1, count)
        ]

    def __getitem__(self, i: int) -> Any:
        return self._kind(llvm.load(self._kind.mlir_type, self._places[i]))

    def __setitem__(self, i: int, value: Any) -> None:
        llvm.store(self._kind(value).ir_value(), self._places[i])


class View(Fixture):
    """A tensor that a loop writes through and has no need to carry."""

    def __init__(self, tensor: cute.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, at: Any) -> Any:
        return self._tensor[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._tensor[at] = value
