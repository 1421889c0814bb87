"""A chunk of a thread's row, all of it in one piece of inline PTX.

The softmax loop is some 500 instructions of straight code.  Written as one DSL operation each they would take the
compiler most of its time; written by the chunk they take next to none, and the assembler schedules them all the same.
Registers are MLIR values here, without the DSL's wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass.cutlass_dsl import T

from coflash.kernels.parts import exp2, inline
from coflash.kernels.sm100 import instructions as op

MINUS_INFINITY = "0fFF800000"


def load(address: Int32, count: int) -> list[ir.Value]:
    """Start loading `count` columns of this thread's lane of tensor memory; `settle` waits for them."""
    results = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{results}}}, [${count}];"
    return inline.run(text, [("f", T.f32())] * count, [], [address])


def settle(
    chunk: list[ir.Value],
    tops: Sequence[Any] = (),
    first: int = 0,
    high: Int32 | None = None,
    low: Int32 | None = None,
    cap: tuple[Float32, Float32, Float32] | None = None,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Wait for this warp's loads; then cap the scores, hide columns outside [low, high), and raise `tops`.

    `first` is the chunk's first column.  `cap` holds what scores are multiplied by, -2 * softcap and softcap:
    softcap * tanh(x) is computed as softcap - 2 * softcap / (1 + exp(2 x))."""
    count = len(chunk)
    in_out = [("f", T.f32())] * (count + len(tops))
    extra = [x for x in (high, low, *(cap or ())) if x is not None]
    name = {id(x): f"${2 * len(in_out) + i}" for i, x in enumerate(extra)}
    lines = [".reg .pred hidden;", ".reg .b32 columns, bit;", "tcgen05.wait::ld.sync.aligned;"]
    if high is not None:
        # A bit for every hidden column: the assembler turns seven of them into predicates at a time.
        lines += _from("columns", name[id(high)], first)
        if low is not None:
            lines += [
                *_from("bit", name[id(low)], first),
                "not.b32 bit, bit;",
                "or.b32 columns, columns, bit;",
            ]
    for i in range(count):
        if cap is not None:
            scale, minus_twice, softcap = (name[id(x)] for x in cap)
            lines += [
                f"mul.f32 ${i}, ${i}, {scale};",
                f"ex2.approx.ftz.f32 ${i}, ${i};",
                f"add.f32 ${i}, ${i}, 0f3F800000;",
                f"rcp.approx.ftz.f32 ${i}, ${i};",
                f"fma.rn.f32 ${i}, ${i}, {minus_twice}, {softcap};",
            ]
        if high is not None:
            lines += [f"and.b32 bit, columns, {1 << i};", "setp.ne.s32 hidden, bit, 0;"]
            lines.append(f"selp.f32 ${i}, {MINUS_INFINITY}, ${i}, hidden;")
    for i in range(0, count if tops else 0, 2):
        top = count + i // 2 % len(tops)
        lines.append(f"max.f32 ${top}, ${top}, ${i}, ${i + 1};")
    results = inline.run(inline.block(lines), in_out, [*chunk, *tops], extra)
    return results[:count], results[count:]


def factors(scale: Float32, offset: Float32) -> list[Any]:
    """Of `score * scale + offset`: twice in 64 bits for the special-function unit, then those of the polynomial."""
    return [op.twice(scale), op.twice(offset), *exp2.bounded(scale, offset)]


def probabilities(
    chunk: list[ir.Value],
    factors: list[Any],
    sums: list[ir.Value] | None,
    dtype: str,
    share: int,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """exp2(score * scale + offset) as 16-bit pairs, and the sums (two pairs; None: nothing yet) raised by them.

    `factors` are those of the function of this name; `share` of 16 pairs go by polynomial."""
    words, totals = len(chunk) // 2, 2
    results = [("r", T.i32())] * words + [("l", T.i64())] * totals
    tied = sums or []
    at = len(results) + len(tied)
    name = [f"${at + len(chunk) + i}" for i in range(len(factors))]
    lines = [".reg .b64 pair;", exp2.SCRATCH]
    for i in range(words):
        total = f"${words + i % totals}"
        low, high = f"${at + 2 * i}", f"${at + 2 * i + 1}"
        if exp2.by_polynomial(i, share):
            lines += exp2.polynomial("pair", low, high, *name[2:])
        else:
            lines.append(f"mov.b64 pair, {{{low}, {high}}};")
            lines.append(f"fma.rn.f32x2 pair, pair, {name[0]}, {name[1]};")
            lines += exp2.special("pair")
        first = i < totals and not tied
        lines.append(f"mov.b64 {total}, pair;" if first else f"add.rn.f32x2 {total}, {total}, pair;")
        lines.append(f"cvt.rn.{_packed(dtype)}.f32 ${i}, hi, lo;")
    untied = words if tied else words + totals
    out = inline.run(inline.block(lines), results, tied, [*chunk, *factors], tied_from=untied)
    return out[:words], out[words:]


def scaled(chunk: list[ir.Value], factor: Int64) -> list[ir.Value]:
    """Every number times `factor`, which holds it twice."""
    count = len(chunk)
    lines = [".reg .b64 pair;"]
    for i in range(0, count, 2):
        lines.append(f"mov.b64 pair, {{${i}, ${i + 1}}};")
        lines.append(f"mul.rn.f32x2 pair, pair, ${2 * count};")
        lines.append(f"mov.b64 {{${i}, ${i + 1}}}, pair;")
    return inline.run(inline.block(lines), [("f", T.f32())] * count, chunk, [factor])


def rounded(chunk: list[ir.Value], factor: Int64, dtype: str) -> list[ir.Value]:
    """Every number times `factor`, as 16-bit pairs."""
    words = len(chunk) // 2
    lines = [".reg .b64 pair;", ".reg .b32 lo, hi;"]
    for i in range(words):
        lines.append(f"mov.b64 pair, {{${words + 2 * i}, ${words + 2 * i + 1}}};")
        lines.append(f"mul.rn.f32x2 pair, pair, ${words + len(chunk)};")
        lines.append("mov.b64 {lo, hi}, pair;")
        lines.append(f"cvt.rn.{_packed(dtype)}.f32 ${i}, hi, lo;")
    return inline.run(inline.block(lines), [("r", T.i32())] * words, [], [*chunk, factor], early=True)


def store(address: Int32, chunk: list[ir.Value]) -> None:
    """Registers to consecutive columns of this thread's lane of tensor memory."""
    count = len(chunk)
    operands = ", ".join(f"${i + 1}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{operands}}};"
    inline.run(text, [], [], [address, *chunk])


def _from(word: str, bound: str, first: int) -> list[str]:
    """A word whose bits from column `bound - first` on are 1; shifts by 32 and more leave none."""
    return [
        f"sub.s32 {word}, {bound}, {first};",
        f"max.s32 {word}, {word}, 0;",
        f"shl.b32 {word}, -1, {word};",
    ]


def _packed(dtype: str) -> str:
    return {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
