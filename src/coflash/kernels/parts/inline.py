"""Inline PTX: one instruction, or many."""

from __future__ import annotations

from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def ptx(
    result: Any,
    text: str,
    constraints: str,
    *operands: Any,
    pure: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """One piece of inline PTX. `pure` lets the compiler move it, merge it and drop it."""
    return llvm.inline_asm(
        result,
        [value(operand) for operand in operands],
        " ".join(
            text.split()
        ),  # of further lines the compiler would say that they are from further source lines
        constraints,
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def run(
    text: str,
    results: list[tuple[str, ir.Type]],
    tied: list[Any],
    operands: list[Any],
    tied_from: int = 0,
    early: bool = False,
    *,
    loc: Any = None,
    ip: Any = None,
) -> list[ir.Value]:
    """Inline PTX with several results, each a register class and a type.

    In the text `$0` and on are the results, then `tied`, then `operands`; `tied` share the registers of the results
    from `tied_from` on."""
    kinds = {T.f32(): "f", T.i32(): "r", T.i64(): "l"}
    values = [value(x) for x in (*tied, *operands)]
    # A result that is written while operands are still to be read must not share their registers.
    constraints = [
        f"=&{kind}" if early or i < tied_from else f"={kind}" for i, (kind, _) in enumerate(results)
    ]
    constraints += [str(tied_from + i) for i in range(len(tied))]
    constraints += [kinds[x.type] for x in values[len(tied) :]]
    types = [type_ for _, type_ in results]
    joined = llvm.StructType.get_literal(types) if types else None
    out = ptx(joined, text, ",".join(constraints), *values, loc=loc, ip=ip)
    return [llvm.extractvalue(type_, out, [i], loc=loc, ip=ip) for i, type_ in enumerate(types)]


def block(lines: list[str]) -> str:
    """Instructions with registers of their own."""
    return "{\n" + "\n".join(lines) + "\n}"


def value(register: Any) -> ir.Value:
    """The MLIR value of a register, with or without the DSL's wrapper."""
    return register if isinstance(register, ir.Value) else register.ir_value()
