"""Straight-line register arithmetic, compiled: one Python function per run of computing instructions.

A register is a row over the threads of a CTA; a convoy sees the rows' slice of its own threads, through dictionaries
that make a view at first use. Each PTX instruction becomes one statement on those views, with `out=` where NumPy has
the very operation, otherwise through `units.arith`. Every run is compiled twice at need: for convoys that own all
lanes of their slice, and for those that must not touch some of them (`where=`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from .ptx import Imm, Instruction, Mem, Operand, Pair, PtxError, Reg, Sink, Sym, Vec
from .units import arith
from .units.formats import canonical_nan

# The dictionaries of row views, by the name generated code uses for them.
ROW_KINDS: dict[str, tuple[int, Any]] = {
    "P": (1, np.bool_),
    "H": (16, np.uint16),
    "J": (16, np.int16),
    "W": (32, np.uint32),
    "I": (32, np.int32),
    "F": (32, np.float32),
    "D": (64, np.uint64),
    "L": (64, np.int64),
    "G": (64, np.float64),
    "X": (64, np.float32),  # two per thread
}
RAW = {1: "P", 16: "H", 32: "W", 64: "D"}
_VIEW = {
    "u16": "H", "b16": "H", "s16": "J", "u32": "W", "b32": "W", "s32": "I", "f32": "F",
    "u64": "D", "b64": "D", "s64": "L", "f64": "G", "f32x2": "X", "pred": "P",
}  # fmt: skip
_DTYPE = {kind: dtype for kind, (_, dtype) in ROW_KINDS.items()}

# Instructions that are exactly one NumPy ufunc on one kind of row.
_UFUNC: dict[str, tuple[str, str]] = {
    "and.pred": ("logical_and", "P"),
    "or.pred": ("logical_or", "P"),
    "xor.pred": ("logical_xor", "P"),
    "not.pred": ("logical_not", "P"),
}
for _t, _k in (("u32", "W"), ("s32", "W"), ("u64", "D"), ("s64", "D"), ("u16", "H"), ("s16", "H")):
    _UFUNC[f"add.{_t}"] = ("add", _k)
    _UFUNC[f"sub.{_t}"] = ("subtract", _k)
    _UFUNC[f"mul.lo.{_t}"] = ("multiply", _k)
    for _op, _f in (("max", "maximum"), ("min", "minimum")):
        _UFUNC[f"{_op}.{_t}"] = (_f, _VIEW[_t])
for _t, _k in (("b16", "H"), ("b32", "W"), ("b64", "D")):
    _UFUNC[f"and.{_t}"] = ("bitwise_and", _k)
    _UFUNC[f"or.{_t}"] = ("bitwise_or", _k)
    _UFUNC[f"xor.{_t}"] = ("bitwise_xor", _k)
    _UFUNC[f"not.{_t}"] = ("invert", _k)
for _t, _k in (("f32", "F"), ("f64", "G"), ("f32x2", "X")):
    for _op, _f in (("add", "add"), ("sub", "subtract"), ("mul", "multiply")):
        _UFUNC[f"{_op}.rn.{_t}"] = (_f, _k)
        if _t != "f32x2":
            _UFUNC[f"{_op}.{_t}"] = (_f, _k)
_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_UNORDERED_SAFE = ("eq", "lt", "le", "gt", "ge")
_NEGATED_COMPARE = {"neu": "equal"}

COMPUTE = frozenset(
    "add sub mul mad fma div rem sqrt rcp rsqrt neg abs min max copysign testp sin cos lg2 ex2 tanh cvt and or xor not"
    " cnot lop3 shl shr shf prmt bfe bfi bfind brev popc clz fns szext bmsk sad dp4a dp2a mul24 mad24 addc subc madc"
    " set setp selp slct mov cvta createpolicy".split()
)


class Namespace:
    """Names for the constants and functions that a generated function uses."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"np": np, "copyto": np.copyto, "canonical_nan": canonical_nan}
        for name in {f for f, _ in _UFUNC.values()} | set(_COMPARE.values()) | {"left_shift", "right_shift"}:
            self.values[name] = getattr(np, name)
        self._known: dict[Any, str] = {}

    def add(self, value: Any, key: Any = None) -> str:
        key = key if key is not None else (type(value), id(value))
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"k{len(self._known)}"
            self.values[name] = value
        return name

    def constant(self, value: int, kind: str) -> str:
        dtype = _DTYPE[kind]
        if kind == "P":
            return self.add(np.bool_(value), ("P", bool(value)))
        bits = np.dtype(dtype).itemsize * 8
        raw = int(value) & ((1 << bits) - 1)
        return self.add(np.array(raw, f"u{bits // 8}").view(dtype)[()], (kind, raw))


def is_compute(instruction: Instruction) -> bool:
    return instruction.op.split(".", 1)[0] in COMPUTE


class Translator:
    """Turns computing instructions into statements."""

    def __init__(self, symbol_expression: Callable[[Sym, Instruction], str], namespace: Namespace):
        self.symbol_expression = symbol_expression
        self.names = namespace
        self.parameter_window = 0

    # -- operands

    def read(self, operand: Operand, kind: str, instruction: Instruction) -> str:
        """An expression for an operand as an array (or scalar) of the kind's type."""
        if isinstance(operand, Reg):
            width, dtype = ROW_KINDS[kind]
            if operand.width == 1:
                return f"~P[{operand.index}]" if operand.negated else f"P[{operand.index}]"
            if operand.width == width:
                return f"{kind}[{operand.index}]"
            if operand.width > width:
                view = self.names.add(dtype, dtype)
                return f"{RAW[operand.width]}[{operand.index}].astype({RAW_NAME[width]}).view({view})"
            raise PtxError(
                f"{operand.name} has {operand.width} bits, the instruction takes {width}: {instruction.text}",
                instruction.line,
            )
        if isinstance(operand, Imm):
            value = operand.value
            if operand.bits == 64 and ROW_KINDS[kind][0] == 32:
                value = int(np.array(np.float32(np.array(value, np.uint64).view(np.float64))).view(np.uint32))
            elif operand.bits == 0 and kind in ("F", "G") and value:
                raise PtxError(
                    f"an integer literal where a float is expected: {instruction.text}", instruction.line
                )
            if kind == "X":
                raise PtxError(f"a literal cannot be a packed pair: {instruction.text}", instruction.line)
            return self.names.constant(value, kind)
        if isinstance(operand, Sym):
            return self.symbol_expression(operand, instruction)
        raise PtxError(f"cannot use {operand!r} as a value: {instruction.text}", instruction.line)

    @staticmethod
    def raw_kind(type_: str) -> str:
        if type_ == "pred":
            return "P"
        if type_ in (
            "f16x2",
            "bf16x2",
            "e4m3x4",
            "e5m2x4",
            "e2m1x8",
            "u8x4",
            "s8x4",
            "tf32",
            "u16x2",
            "s16x2",
        ):
            return "W"
        if type_ in ("f32x2",):
            return "D"
        if type_ in (
            "bf16",
            "f16",
            "e4m3x2",
            "e5m2x2",
            "e2m3x2",
            "e3m2x2",
            "ue8m0x2",
            "b8",
            "u8",
            "s8",
            "e2m1x4",
        ):
            return "H"
        if type_ == "e2m1x2":
            return "H"
        bits = re.sub(r"\D", "", type_)
        return RAW[max(int(bits or 32), 16)]

    # -- instructions

    def translate(self, i: Instruction, where: str | None) -> list[str]:
        """The statements for one instruction; `where` names a boolean array that limits what is written."""
        lines: list[str] = []
        if i.guard is not None:
            sign = "~" if i.guard.negated else ""
            guard = f"{sign}P[{i.guard.index}]"
            lines.append(f"g = {guard}" if where is None else f"g = {guard} & {where}")
            where = "g"
        head = i.op.split(".", 1)[0]
        out: list[str] | None
        if head == "mov":
            out = self.mov(i, where)
        elif head == "cvta":
            out = self.cvta(i, where)
        elif head == "createpolicy":
            out = self.store(i.operands[0], self.names.constant(0, "D"), where, i)
        elif head == "setp" or head == "set":
            out = self.setp(i, where) if head == "setp" else self.generic(i, where)
        elif head == "selp":
            out = self.selp(i, where)
        elif i.op in _UFUNC:
            out = self.ufunc(i, where)
        elif head in ("shl", "shr") and isinstance(i.operands[2], Imm):
            out = self.shift(i, where)
        elif head == "cvt":
            out = self.cvt(i, where)
        else:
            out = self.generic(i, where)
        return lines + out

    def arity(self, i: Instruction, count: int) -> None:
        if len(i.operands) != count:
            raise PtxError(f"{i.op} takes {count} operands, not {len(i.operands)}: {i.text}", i.line)

    def store(
        self, target: Operand, expression: str, where: str | None, i: Instruction, cast: str = ""
    ) -> list[str]:
        if isinstance(target, Sink):
            return []
        if not isinstance(target, Reg):
            raise PtxError(f"cannot write to {target!r}: {i.text}", i.line)
        row = f"{RAW[target.width]}[{target.index}]"
        tail = f", where={where}" if where else ""
        return [f"copyto({row}, {expression}{cast}{tail})"]

    def ufunc(self, i: Instruction, where: str | None) -> list[str]:
        name, kind = _UFUNC[i.op]
        target, *sources = i.operands
        self.arity(i, 2 if name in ("invert", "logical_not") else 3)
        width = ROW_KINDS[kind][0]
        if not isinstance(target, Reg) or target.width != width:
            raise PtxError(f"the destination of {i.op} must be a {width}-bit register: {i.text}", i.line)
        arguments = ", ".join(self.read(s, kind, i) for s in sources)
        if where and kind == "X":
            where = f"np.repeat({where}, 2)"
        tail = f", where={where}" if where else ""
        row = f"{kind}[{target.index}]"
        lines = [f"{name}({arguments}, out={row}{tail})"]
        if kind in ("F", "X"):
            lines.append(f"canonical_nan({row}{', ' + where if where else ''})")
        return lines

    def shift(self, i: Instruction, where: str | None) -> list[str]:
        self.arity(i, 3)
        target, source, amount = i.operands
        type_ = i.parts[-1]
        assert isinstance(amount, Imm)
        bits = int(type_[1:])
        kind = _VIEW[type_]
        if not isinstance(target, Reg) or target.width != bits or not 0 <= amount.value < bits:
            return self.generic(i, where)
        name = "left_shift" if i.parts[0] == "shl" else "right_shift"
        tail = f", where={where}" if where else ""
        count = self.names.constant(amount.value, kind)
        return [f"{name}({self.read(source, kind, i)}, {count}, out={kind}[{target.index}]{tail})"]

    def mov(self, i: Instruction, where: str | None) -> list[str]:
        self.arity(i, 2)
        target, source = i.operands
        tail = f", where={where}" if where else ""
        if isinstance(target, Vec) and isinstance(source, Reg):
            part = source.width // len(target.items)
            lines = []
            for n, item in enumerate(target.items):
                if isinstance(item, Sink):
                    continue
                if not isinstance(item, Reg) or item.width != part:
                    raise PtxError(f"the pieces of {i.text} are not {part} bits wide", i.line)
                lines.append(
                    f"copyto({RAW[part]}[{item.index}], S{source.width}_{part}_{n}[{source.index}]{tail})"
                )
            return lines
        if isinstance(source, Vec) and isinstance(target, Reg):
            part = target.width // len(source.items)
            if part not in (16, 32, 64):
                if part == 8:
                    return self.mov_bytes(i, target, source, where)
                raise PtxError(
                    f"cannot pack {len(source.items)} pieces into {target.width} bits: {i.text}", i.line
                )
            return [
                f"copyto(S{target.width}_{part}_{n}[{target.index}], {self.read(item, RAW[part], i)}{tail})"
                for n, item in enumerate(source.items)
            ]
        if not isinstance(target, Reg):
            raise PtxError(f"cannot read {i.text}", i.line)
        if target.width == 128:
            if not isinstance(source, Reg) or source.width != 128:
                raise PtxError(f"cannot read {i.text}", i.line)
            halves = (f"S128_64_{n}" for n in range(2))
            return [f"copyto({half}[{target.index}], {half}[{source.index}]{tail})" for half in halves]
        return self.store(target, self.read(source, RAW[target.width], i), where, i)

    def mov_bytes(self, i: Instruction, target: Reg, source: Vec, where: str | None) -> list[str]:
        terms = [
            f"(({self.read(item, 'H', i)} & 255).astype(np.uint32) << np.uint32({8 * n}))"
            for n, item in enumerate(source.items)
        ]
        cast = f".astype({RAW_NAME[target.width]})"
        return self.store(target, "(" + " | ".join(terms) + ")", where, i, cast)

    def cvta(self, i: Instruction, where: str | None) -> list[str]:
        self.arity(i, 2)
        parts = i.parts
        to = "to" in parts
        space = parts[2] if to else parts[1]
        window = {
            "global": 0,
            "param": self.parameter_window,
            "const": 0,
            "shared": SHARED_WINDOW,
            "local": LOCAL_WINDOW,
        }.get(space.split("::")[0])
        if window is None:
            raise PtxError(f"cvta of state space {space} is not supported: {i.text}", i.line)
        expression = self.read(i.operands[1], "D", i)
        if window:
            constant = self.names.constant(window, "D")
            expression = f"({expression} {'-' if to else '+'} {constant})"
        return self.store(i.operands[0], expression, where, i)

    def setp(self, i: Instruction, where: str | None) -> list[str]:
        parts = i.parts
        target = i.operands[0]
        type_, compare = parts[-1], parts[1]
        simple = len(parts) == 3 and isinstance(target, Reg) and compare in _COMPARE and type_ in _VIEW
        if simple and (type_[0] != "f" or compare in _UNORDERED_SAFE) and type_ != "f32x2":
            self.arity(i, 3)
            kind = _VIEW[type_]
            a, b = (self.read(o, kind, i) for o in i.operands[1:])
            tail = f", where={where}" if where else ""
            assert isinstance(target, Reg)
            return [f"{_COMPARE[compare]}({a}, {b}, out=P[{target.index}]{tail})"]
        kind = self.raw_kind(type_)
        operands = list(i.operands[1:])
        third = operands[2:]
        arguments = [self.read(o, kind, i) for o in operands[:2]] + [self.read(o, "P", i) for o in third]
        dual = isinstance(target, Pair)
        function = self.resolve(i, dual)
        call = f"{function}({', '.join(arguments)})"
        if isinstance(target, Pair):
            return [
                f"t = {call}",
                *self.store(target.first, "t[0]", where, i),
                *self.store(target.second, "t[1]", where, i),
            ]
        return self.store(target, call, where, i)

    def selp(self, i: Instruction, where: str | None) -> list[str]:
        self.arity(i, 4)
        kind = self.raw_kind(i.parts[-1])
        a, b = (self.read(o, kind, i) for o in i.operands[1:3])
        p = self.read(i.operands[3], "P", i)
        return self.store(i.operands[0], f"np.where({p}, {a}, {b})", where, i)

    def cvt(self, i: Instruction, where: str | None) -> list[str]:
        parts = i.parts
        types = [p for p in parts[1:] if _is_type(p)]
        if len(types) < 2 and "pack" not in parts:
            raise PtxError(f"cvt needs two types: {i.text}", i.line)
        target, *sources = i.operands
        if "pack" in parts:
            return self.generic(i, where)
        to, from_ = types[0], types[-1]
        kind = self.raw_kind(from_)
        arguments = ", ".join(self.read(s, kind, i) for s in sources)
        cast = ""
        if isinstance(target, Reg):
            natural = ROW_KINDS[self.raw_kind(to)][0]
            if target.width > natural and to[0] in "su":
                cast = f".view({'np.int' if to[0] == 's' else 'np.uint'}{natural})"
                cast += f".astype({RAW_NAME[target.width]})"
            elif target.width > natural:
                cast = f".astype({RAW_NAME[target.width]})"
            elif target.width < natural:
                raise PtxError(f"the destination of {i.op} is too narrow: {i.text}", i.line)
        return self.store(target, f"{self.resolve(i)}({arguments})", where, i, cast)

    def resolve(self, i: Instruction, dual: bool = False) -> str:
        try:
            function = arith.resolve(i.op, dual=True) if dual else arith.resolve(i.op)
        except arith.UnsupportedInstruction as error:
            raise PtxError(f"unknown instruction {i.text!r} ({error})", i.line) from None
        counts = arith.operand_counts(i.op)
        given = len(i.operands) - 1 + (i.parts[0] in ("addc", "subc", "madc"))
        if given not in counts:
            raise PtxError(
                f"{i.op} takes {' or '.join(map(str, counts))} operands, not {given}: {i.text}", i.line
            )
        return self.names.add(function, ("f", i.op, dual))

    def generic(self, i: Instruction, where: str | None) -> list[str]:
        parts = i.parts
        head = parts[0]
        target, *sources = i.operands
        type_ = next((p for p in reversed(parts) if _is_type(p)), "")
        if not type_:
            raise PtxError(f"{i.op} has no type: {i.text}", i.line)
        kind = self.raw_kind(type_)
        arguments = []
        for n, source in enumerate(sources):
            k = kind
            if isinstance(source, Reg) and source.width == 1:
                k = "P"
            elif (
                (head in ("shl", "shr") and n == 1)
                or (head in ("bfe",) and n >= 1)
                or (head == "bfi" and n >= 2)
            ):
                k = "W"
            elif head in ("shf", "prmt", "lop3") or (head in ("dp4a", "dp2a")):
                k = "W"
            elif head in ("mad", "madc") and "wide" in parts and n == 2:
                k = {"H": "W", "W": "D"}[kind]
            elif head == "slct" and n == 2:
                k = self.raw_kind(parts[-1])
            elif head == "slct":
                k = self.raw_kind(parts[-2])
            elif head == "sad" and n == 2:
                k = kind
            elif isinstance(source, Reg) and kind == "W" and source.width == 64 and head == "fma":
                k = "D"
            if (
                len(parts) > 2
                and parts[-1] in ("f16", "bf16")
                and head in ("add", "sub", "fma")
                and _is_type(parts[-2])
            ):
                # Mixed precision: the wide operand is the addend.
                k = "W" if (n == len(sources) - 1 and head != "sub") or (head == "sub" and n == 1) else "H"
            arguments.append(self.read(source, k, i))
        carry_in = head in ("addc", "subc", "madc")
        if carry_in:
            arguments.append("P[-1]")
        call = f"{self.resolve(i)}({', '.join(arguments)})"
        if "cc" in parts:
            return [
                f"t = {call}",
                *self.store(target, "t[0]", where, i),
                f"copyto(P[-1], t[1]{f', where={where}' if where else ''})",
            ]
        return self.store(target, call, where, i)


RAW_NAME = {16: "np.uint16", 32: "np.uint32", 64: "np.uint64"}
SHARED_WINDOW = 1 << 58
LOCAL_WINDOW = 1 << 57

_TYPE = re.compile(
    r"(?:[busf](?:8|16|32|64|128)(?:x[248])?|bf16(?:x2)?|f16x2|tf32|e[0-9]m[0-9](?:x[248])?|ue8m0(?:x2)?|pred)\Z"
)


def _is_type(part: str) -> bool:
    return bool(_TYPE.match(part))


def registers_of(operand: Operand) -> list[Reg]:
    """Every register an operand names."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in registers_of(item)]
    if isinstance(operand, Pair):
        return registers_of(operand.first) + registers_of(operand.second)
    if isinstance(operand, Mem):
        return registers_of(operand.base) + [r for item in operand.extra for r in registers_of(item)]
    return []


@lru_cache(maxsize=16384)
def _code(source: str) -> CodeType:
    """Compiled once per process: the same kernel runs many times, under other schedules or with one line changed."""
    return compile(source, "<a run of PTX arithmetic>", "exec")


def compile_run(lines: list[str], namespace: Namespace, masked: bool) -> Callable[[Any], None]:
    """A function of a convoy that runs the statements."""
    body = "\n    ".join(lines) if lines else "pass"
    used = sorted(set(re.findall(r"\b(S\d+_\d+_\d|[PHJWIFDLGX])\[", body)))
    prologue = "R = c.rows\n    " + "".join(f"{k} = R.{k}\n    " for k in used)
    if masked:
        prologue += "M = c.mask\n    "
    scope = namespace.values
    exec(_code(f"def run(c):\n    {prologue}{body}\n"), scope)  # the source is ours, made of parsed operands
    return scope.pop("run")
