"""The matrix products of a warpgroup: all instructions of one product in one piece of inline PTX.

The DSL has an operation for each instruction, and each takes and gives all registers of the accumulator: thousands of
values that every pass visits, a third of the time to compile.  Here a product takes and gives them once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, cute
from cutlass._mlir import ir
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.tcgen05 import smem_descriptor_to_int
from cutlass.cutlass_dsl import T, dsl_user_op

from coflash.kernels.parts import inline, vectors

KINDS = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}
#: Up to so many steps, the compiler may work out all descriptors beforehand, part of them before a loop; of more it
#: would, too, and they do not fit the 63 uniform registers.
STEPS_AT_ONCE = 8


def make_mma(dtype: Any, shape: tuple[int, int], b_major: Any, a_source: Any) -> cute.TiledMma:
    """A product of `shape` (64, columns), summed up in float32."""
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), shape, a_source
    )


@dsl_user_op
def multiply(
    mma: cute.TiledMma,
    out: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    fresh: bool,
    steps: Iterable[int] | None = None,
    in_place: bool = False,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Issue out (+)= a b, of all steps of 16 or of those given; `fresh` starts from zero.

    `out` is in registers, `b` in shared memory, `a` in either: partitions of `mma`, of one stage.  With `in_place` a
    fresh product, too, is said to read `out`: the assembler then keeps what is made of it in the same registers."""
    steps = list(range(cute.size(a, mode=[2])) if steps is None else steps)
    columns = mma.op.shape_mnk[1]
    count = columns // 2  # accumulator registers of a thread
    tied = [] if fresh and not in_place else vectors.load(out).elements()
    operands: list[ir.Value] = []
    lines = [
        ".reg .pred no, yes;",
        ".reg .b64 a_at, b_at;",
        "setp.ne.b32 no, 0, 0;",
        "setp.eq.b32 yes, 0, 0;",
    ]
    first: dict[str, str] = {}

    def name(operand: ir.Value) -> str:
        operands.append(operand)
        return f"${count + len(tied) + len(operands) - 1}"

    def descriptor(operand: cute.Tensor, register: str, step: int) -> str:
        if len(steps) <= STEPS_AT_ONCE:
            return name(_descriptor(operand[None, None, step]))
        if register not in first:
            first[register] = name(_descriptor(operand))
        offset = cute.crd2idx((0, 0, step), operand.layout)  # in 16 bytes, as descriptors count
        lines.append(f"add.s64 {register}, {first[register]}, {offset};")
        return register

    kind = KINDS[mma.op.a_dtype]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    accumulator = _list(f"${i}" for i in range(count))
    transposed = int(mma.op.b_major_mode == OperandMajorMode.MN)
    in_registers = mma.op.a_src == warpgroup.OperandSource.RMEM
    words = vectors.load(cute.recast_tensor(a, Int32)) if in_registers else None
    for step in steps:
        if words is not None:
            left, flags = _list(name(words[4 * step + i]) for i in range(4)), f"1, 1, {transposed}"
        else:
            left, flags = descriptor(a, "a_at", step), f"1, 1, 0, {transposed}"
        right = descriptor(b, "b_at", step)
        onto = "no" if fresh and step == steps[0] else "yes"
        lines.append(f"{instruction} {accumulator}, {left}, {right}, {onto}, {flags};")
    results = [("f", T.f32())] * count
    after = inline.run(inline.block(lines), results, tied, operands, early=not tied, loc=loc, ip=ip)
    vectors.store(out, vectors.gather(after))


def _descriptor(operand: cute.Tensor) -> ir.Value:
    """Of a tensor's first step."""
    return smem_descriptor_to_int(operand.iterator).ir_value()


def _list(names: Iterable[str]) -> str:
    return "{" + ", ".join(names) + "}"
