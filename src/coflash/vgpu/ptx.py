"""PTX text to instructions: operands resolved to register numbers, line information attached, blocks connected.

The parser takes what NVVM prints for CuTe-DSL kernels, inline assembly included (scoped registers and labels), and
hand-written PTX. It knows the grammar, not the instruction set: which mnemonics exist is the machine's business.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache


class PtxError(ValueError):
    """Text that is not PTX, or PTX that means nothing (an undeclared register, a missing label). Names the line."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(f"PTX line {line}: {message}" if line else message)
        self.line = line


# ---- Operands ----------------------------------------------------------------------------------------------------

REGISTER_WIDTH = {
    **dict.fromkeys(("pred",), 1),
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
}


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: its width in bits (1 for predicates) and its number among those of that width."""

    width: int
    index: int
    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: the value as Python number; `bits` says how wide a float literal was written (0 for integers)."""

    value: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, parameter, label or special register by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Mem:
    """`[base + offset]`; `extra` holds what follows a comma inside the brackets (tensor coordinates, offsets)."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result nobody wants."""


Operand = Reg | Imm | Sym | Vec | Mem | Pair | Sink


# ---- Program ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceLine:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(slots=True)
class Instruction:
    op: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    text: str
    loc: tuple[int, int] | None = None
    index: int = -1

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    offset: int
    size: int


@dataclass(slots=True)
class Variable:
    """A `.shared`, `.global` or `.const` array. `size` 0 and `extern` for dynamic shared memory."""

    name: str
    space: str
    size: int
    align: int
    extern: bool = False
    data: bytes = b""


@dataclass(slots=True)
class Kernel:
    name: str
    line: int
    parameters: list[Parameter] = field(default_factory=list)
    parameter_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[int, int] = field(default_factory=dict)
    """How many registers of each width the body names."""
    variables: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def reconvergence(self) -> dict[int, int]:
        """For every branch that may diverge, the index of the instruction where its sides meet again.

        That is the start of the branch block's immediate post-dominator; the end of the program where there is none.
        """
        return _reconvergence(self)


@dataclass(slots=True)
class Module:
    version: tuple[int, int]
    target: str
    kernels: dict[str, Kernel]
    files: dict[int, str]
    variables: list[Variable]

    def kernel(self, name: str) -> Kernel:
        found = self.kernels.get(name)
        if found is None:
            known = ", ".join(sorted(self.kernels)) or "none"
            raise PtxError(f"no kernel named {name!r} in this PTX (it has: {known})")
        return found

    def source(self, loc: tuple[int, int] | None) -> SourceLine | None:
        if loc is None or loc[1] == 0 or loc[0] not in self.files:
            return None
        return SourceLine(self.files[loc[0]], loc[1])


# ---- Parser -------------------------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_REGISTER_NAME = re.compile(r"([%A-Za-z_$][\w$%]*?)(\d+)\Z")
_DECIMAL = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?\Z")
_IDENTIFIER = re.compile(r"[%A-Za-z_$][\w$.]*\Z")
_OFFSET = re.compile(r"(.*?)\s*([+-])\s*([+-]?\s*\w+)\Z", re.S)
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_INTEGER_LITERAL = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)")
_VARIABLE = re.compile(
    r"(?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)\.(?P<space>shared|global|const|local)\s+"
    r"(?P<attributes>(?:\.(?:align|attribute|managed)\s*(?:\d+|\([^)]*\))?\s*)*)"
    r"\.(?P<type>[a-z]+\d+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[[^\]]*\]\s*)*)(?:=\s*(?P<init>.*))?\Z",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?P<attributes>(?:\.(?:align|ptr|const|global)\s*\d*\s*)*)\.(?P<type>[a-z]+\d+)\s+"
    r"(?P<more>(?:\.ptr\s+)?(?:\.(?:global|const|shared|local)\s+)?(?:\.align\s+\d+\s+)?)"
    r"(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d+)\])?\Z",
    re.S,
)


@lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """The module in a PTX text. Raises PtxError. Modules are shared between callers: leave them as they are."""
    return _Parser(text).module()


class _Scope:
    __slots__ = ("families", "label_prefix", "names", "vectors")

    def __init__(self, label_prefix: str):
        self.names: dict[str, tuple[int, str]] = {}
        self.families: dict[str, tuple[int, int]] = {}
        self.vectors: dict[str, int] = {}
        self.label_prefix = label_prefix


class _Parser:
    def __init__(self, text: str):
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.pos = 0
        self._line, self._line_pos = 1, 0

    # -- text level

    def line_at(self, pos: int) -> int:
        """The line of a position; positions are asked for in rising order, so the count goes on from the last."""
        if pos < self._line_pos:
            self._line, self._line_pos = 1, 0
        self._line += self.text.count("\n", self._line_pos, pos)
        self._line_pos = pos
        return self._line

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.pos)
        self.pos = match.end() if match else self.pos

    def until(self, stop: str, what: str) -> str:
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise PtxError(f"{what} is never ended by {stop!r}", self.line_at(self.pos))
        taken = self.text[self.pos : end]
        self.pos = end + len(stop)
        return taken

    def balanced(self) -> str:
        """The text of a `{...}` at the current position, braces excluded."""
        start = self.pos
        depth = 0
        for match in re.compile(r"[{}]").finditer(self.text, start):
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                self.pos = match.end()
                return self.text[start + 1 : match.start()]
        raise PtxError("a brace is never closed", self.line_at(start))

    # -- module level

    def module(self) -> Module:
        version: tuple[int, int] | None = None
        target = ""
        module = Module((0, 0), "", {}, {}, [])
        while True:
            self.skip_space()
            if self.pos >= len(self.text):
                break
            line = self.line_at(self.pos)
            rest = self.text[self.pos : self.pos + 400]
            if m := re.match(r"\.version\s+(\d+)\.(\d+)", rest):
                version = int(m.group(1)), int(m.group(2))
                self.pos += m.end()
            elif m := re.match(r"\.target\s+([\w, ]+)", rest):
                target = m.group(1).split(",")[0].strip()
                self.pos += m.end()
            elif m := re.match(r"\.address_size\s+(\d+)", rest):
                if m.group(1) != "64":
                    raise PtxError(f"address size {m.group(1)}: only 64-bit PTX is supported", line)
                self.pos += m.end()
            elif m := re.match(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*', rest):
                module.files[int(m.group(1))] = m.group(2)
                self.pos += m.end()
            elif re.match(r"\.section\b", rest):
                self.pos = self.text.index("{", self.pos)
                self.balanced()
            elif re.match(r"(?:\.(?:visible|weak|extern)\s+)*\.entry\b", rest):
                kernel = self.entry(line)
                module.kernels[kernel.name] = kernel
            elif re.match(r"(?:\.(?:visible|weak|extern)\s+)*\.func\b", rest):
                self.function()
            elif re.match(r"(?:\.\w+\s+)*\.(shared|global|const|local)\b", rest):
                module.variables.append(self.variable(self.until(";", "a variable"), line))
            elif m := re.match(r"\.(pragma|alias)\b", rest):
                self.until(";", m.group())
            else:
                raise PtxError(f"cannot read {rest.splitlines()[0].strip()[:80]!r}", line)
        if version is None or not target:
            raise PtxError("no .version and .target: this is not a PTX module", 1)
        module.version, module.target = version, target
        for kernel in module.kernels.values():
            self.check_labels(kernel)
        return module

    def variable(self, text: str, line: int) -> Variable:
        m = _VARIABLE.match(text.strip())
        if m is None:
            raise PtxError(f"cannot read the variable {text.strip()[:80]!r}", line)
        element = _SIZES[re.sub(r"\D", "", m["type"])]
        dims = re.findall(r"\[([^\]]*)\]", m["dims"] or "")
        count = 1
        for dim in dims:
            count *= int(dim) if dim.strip() else 0
        align = re.search(r"\.align\s+(\d+)", m["attributes"])
        data = b""
        if m["init"]:
            values = [int(v, 0) for v in _INTEGER_LITERAL.findall(m["init"])]
            data = b"".join((v % (1 << 8 * element)).to_bytes(element, "little") for v in values)
        return Variable(
            m["name"], m["space"], count * element, int(align.group(1)) if align else element,
            ".extern" in m["linkage"], data,
        )  # fmt: skip

    def function(self) -> None:
        """Device functions are skipped: a call to one is an instruction the machine does not know, and says so."""
        match = re.compile(r"[;{]").search(self.text, self.pos)
        if match is None:
            raise PtxError("a .func is never ended", self.line_at(self.pos))
        self.pos = match.start()
        if match.group() == "{":
            self.balanced()
        else:
            self.pos += 1

    # -- kernel level

    def entry(self, line: int) -> Kernel:
        head = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$%]+)\s*").match(
            self.text, self.pos
        )
        if head is None:
            raise PtxError("an .entry without a name", line)
        kernel = Kernel(head.group(1), line)
        self.pos = head.end()
        if self.text.startswith("(", self.pos):
            self.pos += 1
            self.parameters(kernel, self.until(")", "the parameter list"), line)
        while True:
            self.skip_space()
            if self.text.startswith("{", self.pos):
                break
            m = re.compile(r"\.(\w+)[ \t]*([\d, \t]*)").match(self.text, self.pos)
            if m is None:
                raise PtxError("expected the body of the kernel", self.line_at(self.pos))
            kernel.directives[m.group(1)] = tuple(int(v) for v in re.findall(r"\d+", m.group(2)))
            self.pos = m.end()
        self.body(kernel)
        return kernel

    def parameters(self, kernel: Kernel, text: str, line: int) -> None:
        offset = 0
        for part in text.split(","):
            if not part.strip():
                continue
            m = _PARAM.match(part.strip())
            if m is None:
                raise PtxError(f"cannot read the parameter {part.strip()[:80]!r}", line)
            element = _SIZES[re.sub(r"\D", "", m["type"])]
            aligned = re.search(r"\.align\s+(\d+)", m["attributes"])
            align = int(aligned.group(1)) if aligned else element
            size = element * int(m["count"] or 1)
            offset = -(-offset // align) * align
            kernel.parameters.append(Parameter(m["name"], offset, size))
            offset += size
        kernel.parameter_bytes = offset

    def body(self, kernel: Kernel) -> None:
        text = self.text
        scopes: list[_Scope] = []
        unique = 0
        loc: tuple[int, int] | None = None
        numbers: dict[tuple[int, str], Reg] = {}
        while True:
            self.skip_space()
            if self.pos >= len(text):
                raise PtxError(f"the body of {kernel.name} is never closed", kernel.line)
            start = self.pos
            char = text[start]
            if char == "{":
                scopes = [*scopes, _Scope(f"{unique}:" if scopes else "")]
                unique += 1
                self.pos += 1
            elif char == "}":
                scopes = scopes[:-1]
                self.pos += 1
                if not scopes:
                    break
            elif char == ";":
                self.pos += 1
            elif char == ".":
                if text.startswith((".loc\t", ".loc "), start):
                    end = text.find("\n", start)
                    fields = text[start : end if end >= 0 else len(text)].split()
                    loc = (int(fields[1]), int(fields[2]))
                    self.pos = end if end >= 0 else len(text)
                elif text.startswith(".reg", start):
                    self.declare(self.until(";", "a register declaration"), scopes[-1], start)
                elif re.match(r"\.(shared|const|global|local)\b", text[start : start + 12]):
                    line = self.line_at(start)
                    kernel.variables.append(self.variable(self.until(";", "a variable"), line))
                elif text.startswith(".pragma", start):
                    self.until(";", "a pragma")
                else:
                    raise PtxError(
                        f"unknown directive {text[start : start + 60].split()[0]}", self.line_at(start)
                    )
            elif m := _LABEL.match(text, start):
                name = scopes[-1].label_prefix + m.group(1)
                if name in kernel.labels:
                    raise PtxError(f"label {m.group(1)} is defined twice", self.line_at(start))
                kernel.labels[name] = len(kernel.instructions)
                self.pos = m.end()
            else:
                line = self.line_at(start)
                statement = self.until(";", "an instruction").strip()
                instruction = self.instruction(statement, line, loc, scopes, numbers, kernel)
                instruction.index = len(kernel.instructions)
                kernel.instructions.append(instruction)
        kernel.registers = {}
        for reg in numbers.values():
            kernel.registers[reg.width] = kernel.registers.get(reg.width, 0) + 1

    def declare(self, text: str, scope: _Scope, pos: int) -> None:
        m = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)\Z", text.strip(), re.S)
        if m is None or m.group(2) not in REGISTER_WIDTH:
            raise PtxError(f"cannot read the declaration {text.strip()!r}", self.line_at(pos))
        width = REGISTER_WIDTH[m.group(2)]
        for name in m.group(3).split(","):
            name = name.strip()
            if m.group(1):
                scope.vectors[name] = int(m.group(1))
                for part in "xyzw"[: int(m.group(1))]:
                    scope.names[f"{name}.{part}"] = (width, f"{scope.label_prefix}{name}.{part}")
                continue
            if family := re.match(r"([%\w$]+)<(\d+)>\Z", name):
                scope.families[family.group(1)] = (width, int(family.group(2)))
            else:
                scope.names[name] = (width, f"{scope.label_prefix}{name}")

    def instruction(
        self, statement: str, line: int, loc: tuple[int, int] | None, scopes: list[_Scope],
        numbers: dict[tuple[int, str], Reg], kernel: Kernel,
    ) -> Instruction:  # fmt: skip
        guard = None
        rest = statement
        if rest.startswith("@"):
            m = re.match(r"@\s*(!?)\s*([%\w$]+)\s*", rest)
            if m is None:
                raise PtxError(f"cannot read the guard of {statement!r}", line)
            found = self.register(m.group(2), scopes, numbers)
            if found is None or found.width != 1:
                raise PtxError(f"guard {m.group(2)} is not a declared predicate", line)
            guard = Reg(1, found.index, found.name, bool(m.group(1)))
            rest = rest[m.end() :]
        m = re.match(r"([a-z_][\w.:]*)\s*", rest)
        if m is None:
            raise PtxError(f"cannot read {statement[:80]!r}", line)
        op = m.group(1)
        branch = op.split(".")[0] in ("bra", "call")
        operands = []
        for piece in split_operands(rest[m.end() :]):
            operands.append(self.operand(piece, line, scopes, numbers, kernel, branch))
        return Instruction(op, tuple(operands), guard, line, " ".join(statement.split()), loc)

    def register(self, name: str, scopes: list[_Scope], numbers: dict[tuple[int, str], Reg]) -> Reg | None:
        width, full = 0, name
        for scope in reversed(scopes):
            if name in scope.names:
                width, full = scope.names[name]
                break
            if scope.families and (m := _REGISTER_NAME.match(name)):
                family = scope.families.get(m.group(1))
                if family and int(m.group(2)) < family[1]:
                    width, full = family[0], scope.label_prefix + name
                    break
        if not width:
            return None
        key = (width, full)
        found = numbers.get(key)
        if found is None:
            index = (
                sum(1 for w, _ in numbers if w == width) if len(numbers) < 64 else self._next(numbers, width)
            )
            found = numbers[key] = Reg(width, index, name)
        return found

    def _next(self, numbers: dict[tuple[int, str], Reg], width: int) -> int:
        counts = getattr(self, "_counts", None)
        if counts is None or counts[0] is not numbers or sum(counts[1].values()) != len(numbers):
            totals: dict[int, int] = {}
            for w, _ in numbers:
                totals[w] = totals.get(w, 0) + 1
            counts = self._counts = (numbers, totals)
        index = counts[1].get(width, 0)
        counts[1][width] = index + 1
        return index

    def operand(
        self, piece: str, line: int, scopes: list[_Scope], numbers: dict[tuple[int, str], Reg], kernel: Kernel,
        branch: bool = False,
    ) -> Operand:  # fmt: skip
        def again(inner: str) -> Operand:
            return self.operand(inner, line, scopes, numbers, kernel)

        piece = piece.strip()
        if not piece:
            raise PtxError("an operand is missing", line)
        first = piece[0]
        if first == "{":
            return Vec(tuple(again(item) for item in split_operands(piece[1:-1])))
        if first == "[":
            if piece[-1] != "]":
                raise PtxError(f"cannot read the address {piece!r}", line)
            inner = split_operands(piece[1:-1])
            base, offset = split_offset(inner[0], line)
            return Mem(again(base), offset, tuple(again(item) for item in inner[1:]))
        if "|" in piece:
            a, b = piece.split("|", 1)
            return Pair(again(a), again(b))
        if first == "!":
            reg = again(piece[1:])
            if not isinstance(reg, Reg):
                raise PtxError(f"cannot negate {piece[1:]!r}", line)
            return Reg(reg.width, reg.index, reg.name, not reg.negated)
        if piece == "_":
            return Sink()
        number = literal(piece)
        if number is not None:
            return number
        if branch:
            for scope in reversed(scopes):
                # Labels may be defined later: the scope that encloses the branch decides; resolved in check_labels.
                return Sym(scope.label_prefix + piece)
        register = self.register(piece, scopes, numbers)
        if register is not None:
            return register
        for scope in reversed(scopes):
            if piece in scope.vectors:
                return Vec(tuple(again(f"{piece}.{part}") for part in "xyzw"[: scope.vectors[piece]]))
        base, offset = split_offset(piece, line)
        if _IDENTIFIER.match(base):
            if re.match(r"%(?:r|rd|rs|f|fd|p|h|hh)\d+\Z", base):
                raise PtxError(f"register {base} is not declared", line)
            return Sym(base, offset)
        raise PtxError(f"cannot read the operand {piece!r}", line)

    @staticmethod
    def check_labels(kernel: Kernel) -> None:
        for instruction in kernel.instructions:
            if instruction.op.split(".")[0] != "bra" or not instruction.operands:
                continue
            target = instruction.operands[0]
            if not isinstance(target, Sym):
                raise PtxError(f"{instruction.text!r} does not name a label", instruction.line)
            if target.name not in kernel.labels:
                outer = target.name.split(":", 1)[-1]
                if outer not in kernel.labels:
                    raise PtxError(f"label {outer} is not defined", instruction.line)
                instruction.operands = (Sym(outer), *instruction.operands[1:])


def split_operands(text: str) -> list[str]:
    """The pieces between top-level commas."""
    pieces: list[str] = []
    depth = start = 0
    if not text.strip():
        return pieces
    if "{" not in text and "[" not in text and "(" not in text:
        return text.split(",")
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    pieces.append(text[start:])
    return pieces


def split_offset(text: str, line: int) -> tuple[str, int]:
    text = text.strip()
    m = _OFFSET.match(text)
    if m is None or not m.group(1):
        return text, 0
    value = literal(m.group(3).replace(" ", ""))
    if value is None:
        raise PtxError(f"cannot read the offset in {text!r}", line)
    return m.group(1), -value.value if m.group(2) == "-" else value.value


def literal(text: str) -> Imm | None:
    """An integer or floating-point literal; floats come back as their bits."""
    if _DECIMAL.match(text):
        digits = text.rstrip("uU")
        sign = -1 if digits.startswith("-") else 1
        digits = digits.lstrip("+-")
        if len(digits) > 1 and digits.isdigit() and digits[0] == "0":
            return Imm(sign * int(digits, 8))
        return Imm(sign * int(digits, 0))
    if len(text) == 10 and text[:2] in ("0f", "0F"):
        return Imm(int(text[2:], 16), 32)
    if len(text) == 18 and text[:2] in ("0d", "0D"):
        return Imm(int(text[2:], 16), 64)
    if re.match(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?\Z", text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


# ---- Control flow -------------------------------------------------------------------------------------------------


def leaders(kernel: Kernel) -> list[int]:
    """Where basic blocks start."""
    starts = {0, *kernel.labels.values()}
    for i, instruction in enumerate(kernel.instructions):
        if instruction.op.split(".")[0] in ("bra", "ret", "exit", "trap"):
            starts.add(i + 1)
    return sorted(s for s in starts if s < len(kernel.instructions))


def _reconvergence(kernel: Kernel) -> dict[int, int]:
    starts = leaders(kernel)
    count = len(starts)
    block_of = {start: b for b, start in enumerate(starts)}
    end = count  # the virtual exit block
    successors: list[list[int]] = []
    for b, start in enumerate(starts):
        last = (starts[b + 1] if b + 1 < count else len(kernel.instructions)) - 1
        instruction = kernel.instructions[last] if last >= start else None
        follow: list[int] = []
        name = instruction.op.split(".")[0] if instruction else ""
        if instruction and name == "bra":
            target = instruction.operands[0]
            assert isinstance(target, Sym)
            follow.append(block_of.get(kernel.labels[target.name], end))
            if instruction.guard is not None:
                follow.append(b + 1 if b + 1 < count else end)
        elif instruction and name in ("ret", "exit", "trap"):
            follow.append(end)
            if instruction.guard is not None:
                follow.append(b + 1 if b + 1 < count else end)
        else:
            follow.append(b + 1 if b + 1 < count else end)
        successors.append(follow)
    # Post-dominator sets as bit masks, from the end backwards until nothing changes.
    every = (1 << (count + 1)) - 1
    dominators = [every] * count + [1 << end]
    changed = True
    while changed:
        changed = False
        for b in range(count - 1, -1, -1):
            mask = every
            for s in successors[b]:
                mask &= dominators[s]
            mask |= 1 << b
            if mask != dominators[b]:
                dominators[b] = mask
                changed = True
    meet: dict[int, int] = {}
    sizes = [mask.bit_count() for mask in dominators]
    for b in range(count):
        if len(successors[b]) < 2:
            continue
        last = (starts[b + 1] if b + 1 < count else len(kernel.instructions)) - 1
        mask = dominators[b] & ~(1 << b)
        best, most = end, -1
        while mask:  # the nearest post-dominator is the one that itself has the most
            low = mask & -mask
            candidate = low.bit_length() - 1
            if sizes[candidate] > most and candidate != end:
                best, most = candidate, sizes[candidate]
            mask ^= low
        meet[last] = starts[best] if best != end else len(kernel.instructions)
    return meet
