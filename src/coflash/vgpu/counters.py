"""How much work of which unit a launch did, per warp role.

Register arithmetic is counted by how often each step ran on each warp, times what the step contains; asynchronous
work (tensor cores, copies) by the instruction that issued it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .decode import Program
    from .ptx import Instruction

UNITS = {
    "instructions": "warp instructions issued",
    "exp2": "exponentials and other special functions (ex2, lg2, rcp, rsqrt, sin, cos, tanh), one a thread",
    "fma": "float32 multiplies, adds and multiply-adds, one a thread (a packed pair counts two)",
    "alu": "integer, logic, compare, select, min/max and conversion operations, one a thread",
    "move": "register moves, which the assembler mostly removes",
    "tensor_flops": "multiplies and adds of matrix instructions",
    "shared_read_bytes": "shared memory read by threads and matrix operands",
    "shared_write_bytes": "shared memory written by threads and copies",
    "tensor_read_bytes": "tensor memory read by tcgen05.ld, and as matrix operand",
    "tensor_write_bytes": "tensor memory written by tcgen05.st and tcgen05.cp",
    "global_read_bytes": "global memory read, by threads and copies (before any cache)",
    "global_write_bytes": "global memory written or reduced into",
    "barriers": "waits and arrivals at barriers of any kind",
}
_SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "tanh", "sqrt", "div"}
_FLOAT = {"add", "sub", "mul", "fma", "mad"}


def unit_of(i: Instruction) -> tuple[str, int]:
    """(unit, operations per thread) of a computing instruction."""
    parts = i.op.split(".")
    head, last = parts[0], parts[-1]
    if head in _SPECIAL:
        return "exp2", 2 if last in ("f16x2", "bf16x2") else 1
    if head in _FLOAT and last in ("f32", "f32x2", "f64", "f16x2", "bf16x2", "f16", "bf16"):
        return "fma", 2 if last.endswith("x2") else 1
    if head in ("mov", "cvta"):
        return "move", 1
    return "alu", 1


class Counters:
    def __init__(self, program: Program):
        self.program = program
        launch = program.launch
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.warps = -(-threads // 32)
        self.hits = np.zeros((len(program.steps) + 1, self.warps), np.int64)
        self.amounts: list[dict[str, float]] = [{} for _ in range(self.warps)]

    def add(self, warp: Any, unit: str, amount: float) -> None:
        table = self.amounts[warp.index]
        table[unit] = table.get(unit, 0) + amount

    def lengths(self) -> np.ndarray:
        return np.array([last - first for first, last, _ in self.program.spans] + [0, 0], np.int64)

    def instructions(self) -> int:
        return int((self.hits * self.lengths()[:, None]).sum())

    def totals(self) -> dict[str, dict[str, float]]:
        """Per role and in total."""
        program = self.program
        per_warp: list[dict[str, float]] = [dict(table) for table in self.amounts]
        issued = (self.hits * self.lengths()[:, None]).sum(0)
        for s, (first, last, pure) in enumerate(program.spans):
            if not pure or not self.hits[s].any():
                continue
            static: dict[str, int] = {}
            for i in program.kernel.instructions[first:last]:
                unit, amount = unit_of(i)
                static[unit] = static.get(unit, 0) + amount
            for w in np.flatnonzero(self.hits[s]).tolist():
                for unit, amount in static.items():
                    per_warp[w][unit] = per_warp[w].get(unit, 0) + 32 * amount * int(self.hits[s, w])
        for w in range(self.warps):
            per_warp[w]["instructions"] = int(issued[w])
        # Warps that executed the same steps play the same role.
        roles: dict[bytes, list[int]] = {}
        for w in range(self.warps):
            roles.setdefault((self.hits[:, w] > 0).tobytes(), []).append(w)
        result: dict[str, dict[str, float]] = {}
        total: dict[str, float] = {}
        for members in roles.values():
            table: dict[str, float] = {}
            for w in members:
                for unit, sum_ in per_warp[w].items():
                    table[unit] = table.get(unit, 0) + sum_
                    total[unit] = total.get(unit, 0) + sum_
            name = f"warp {members[0]}" if len(members) == 1 else f"warps {_ranges(members)}"
            result[name] = table
        result["total"] = total
        return result


def _ranges(numbers: list[int]) -> str:
    pieces: list[list[int]] = []
    for n in numbers:
        if pieces and n == pieces[-1][1] + 1:
            pieces[-1][1] = n
        else:
            pieces.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pieces)
