"""Integer and bit instructions on raw registers: from the parsed form of a name to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .form import Form
from .formats import U1, U2, U4, U8, Array, UnsupportedInstruction

UNSIGNED: dict[int, np.dtype[Any]] = {8: U1, 16: U2, 32: U4, 64: U8}
SIGNED: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.int8),
    16: np.dtype(np.int16),
    32: np.dtype(np.int32),
    64: np.dtype(np.int64),
}

Function = Callable[..., Any]


def width(type_: str) -> int:
    return int(type_[1:])


def is_integer(type_: str) -> bool:
    return type_[0] in "sub" and type_[1:].isdigit() and int(type_[1:]) in UNSIGNED


def values(raw: Array, type_: str) -> Array:
    """The register as numbers of its PTX type."""
    return raw.view(SIGNED[width(type_)]) if type_[0] == "s" else raw


def _limits(type_: str) -> tuple[int, int]:
    info = np.iinfo(SIGNED[width(type_)] if type_[0] == "s" else UNSIGNED[width(type_)])
    return int(info.min), int(info.max)


def _wide(a: Array, type_: str) -> Array:
    """Sign- or zero-extend to twice the width, raw."""
    n = width(type_)
    if type_[0] == "s":
        return a.view(SIGNED[n]).astype(SIGNED[2 * n]).view(UNSIGNED[2 * n])
    return a.astype(UNSIGNED[2 * n])


def _high64_unsigned(a: Array, b: Array) -> Array:
    low, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = a & low, a >> s, b & low, b >> s
    middle = (al * bl >> s) + (ah * bl & low) + (al * bh & low)
    return ah * bh + (ah * bl >> s) + (al * bh >> s) + (middle >> s)


def _high(type_: str) -> Function:
    n = width(type_)
    if n < 64:
        shift = UNSIGNED[2 * n].type(n)
        return lambda a, b: (_wide(a, type_) * _wide(b, type_) >> shift).astype(UNSIGNED[n])
    if type_[0] == "u":
        return _high64_unsigned
    zero = np.uint64(0)

    def signed(a: Array, b: Array) -> Array:
        h = _high64_unsigned(a, b)
        return h - np.where(a.view(np.int64) < 0, b, zero) - np.where(b.view(np.int64) < 0, a, zero)

    return signed


def _product(part: str, type_: str) -> Function:
    if part == "lo":
        return np.multiply
    if part == "wide":
        if width(type_) > 32:
            raise UnsupportedInstruction(f"mul.wide.{type_}")
        return lambda a, b: _wide(a, type_) * _wide(b, type_)
    return _high(type_)


def _saturating(type_: str, sign: int) -> Function:
    low, high = _limits(type_)

    def run(a: Array, b: Array) -> Array:
        s = values(a, type_).astype(np.int64) + sign * values(b, type_).astype(np.int64)
        return np.clip(s, low, high).astype(SIGNED[width(type_)]).view(UNSIGNED[width(type_)])

    return run


def _add(form: Form) -> Function:
    type_ = form.type()
    sign = 1 if form.op == "add" else -1
    if form.take("sat"):
        if type_ != "s32":
            form.fail()
        return _saturating(type_, sign)
    if form.take("cc"):
        if type_ not in _LONG:
            form.fail()
        return _with_carry(form.op, type_, carry_in=False, carry_out=True)
    return np.add if sign > 0 else np.subtract


def _with_carry(op: str, type_: str, carry_in: bool, carry_out: bool) -> Function:
    """add/sub on the condition code register; for sub the flag is the borrow."""
    unsigned = UNSIGNED[width(type_)]

    def run(a: Array, b: Array, carry: Array | None = None) -> Any:
        c = unsigned.type(0) if carry is None else np.asarray(carry).astype(unsigned)
        if op == "add":
            s = a + b
            r = s + c
            out = (s < a) | (r < s)
        else:
            s = a - b
            r = s - c
            out = (a < b) | (s < c)
        return (r, out) if carry_out else r

    return run


def _addc(form: Form) -> Function:
    return _with_carry(form.op[:3], form.type(), carry_in=True, carry_out=form.take("cc"))


def _mul(form: Form) -> Function:
    type_ = form.type()
    return _product(form.one_of("lo", "hi", "wide"), type_)


def _mad(form: Form) -> Function:
    type_ = form.type()
    part = form.one_of("lo", "hi", "wide")
    product = _product(part, type_)
    if form.take("sat"):
        if (part, type_) != ("hi", "s32"):
            form.fail()
        add = _saturating(type_, 1)
        return lambda a, b, c: add(product(a, b), c)
    if form.op == "madc" or form.take("cc"):
        if type_ not in _LONG or part == "wide":
            form.fail()
        out = form.take("cc") if form.op == "madc" else True
        carry = _with_carry("add", type_, form.op == "madc", out)
        return lambda a, b, c, *flag: carry(product(a, b), c, *flag)
    return lambda a, b, c: product(a, b) + c


def _mul24(form: Form) -> Function:
    type_ = form.type()
    part = form.one_of("lo", "hi")
    signed = type_ == "s32"

    def product(a: Array, b: Array) -> Array:
        if signed:
            x, y = ((v.view(np.int32) << 8 >> 8).astype(np.int64) for v in (a, b))
        else:
            x, y = ((v & np.uint32(0xFFFFFF)).astype(np.int64) for v in (a, b))
        p = x * y
        return (p if part == "lo" else p >> 16).astype(U8).astype(U4)

    return product if form.op == "mul24" else lambda a, b, c: product(a, b) + c


def _quotient(form: Form) -> Function:
    """Division truncates towards zero. The manual leaves division by zero unspecified: all ones, as seen on an
    H200 (div.s32, rem.u32)."""
    type_ = form.type()
    n, signed = width(type_), type_[0] == "s"
    remainder = form.op == "rem"
    unsigned = UNSIGNED[n]
    ones = unsigned.type(2**n - 1)

    def run(a: Array, b: Array) -> Array:
        zero = b == 0
        if not signed:
            d = np.where(zero, unsigned.type(1), b)
            return np.where(zero, ones, a % d if remainder else a // d)
        x, y = a.view(SIGNED[n]), b.view(SIGNED[n])
        mx, my = np.abs(x).view(unsigned), np.abs(y).view(unsigned)
        d = np.where(zero, unsigned.type(1), my)
        if remainder:
            r = mx % d
            return np.where(zero, ones, np.where(x < 0, np.negative(r), r))
        q = mx // d
        return np.where(zero, ones, np.where((x < 0) != (y < 0), np.negative(q), q))

    return run


def _minmax(form: Form) -> Function:
    type_ = form.type()
    relu = form.take("relu")
    op = np.minimum if form.op == "min" else np.maximum
    n = width(type_)

    def run(*operands: Array) -> Array:
        r = op(values(operands[0], type_), values(operands[1], type_))
        for more in operands[2:]:
            r = op(r, values(more, type_))
        if relu:
            r = np.maximum(r, 0)
        return r.view(UNSIGNED[n])

    if relu and type_ != "s32" and not (form.packed and type_ == "s16"):
        form.fail()
    return run


def _abs(form: Form) -> Function:
    n = width(form.type())
    return lambda a: np.abs(a.view(SIGNED[n])).view(UNSIGNED[n])


def _neg(form: Form) -> Function:
    form.type()
    return np.negative


def _sad(form: Form) -> Function:
    type_ = form.type()

    def run(a: Array, b: Array, c: Array) -> Array:
        return np.where(values(a, type_) < values(b, type_), b - a, a - b) + c

    return run


def _shift(form: Form) -> Function:
    """Shift amounts are 32-bit and clamp at the width; shr of a signed type fills with the sign."""
    type_ = form.type()
    n = width(type_)
    left, signed = form.op == "shl", type_[0] == "s"
    unsigned = UNSIGNED[n]
    most = np.array([n - 1], U4)

    def run(a: Array, b: Array) -> Array:
        if signed and not left:
            return (a.view(SIGNED[n]) >> np.minimum(b, most).astype(SIGNED[n])).view(unsigned)
        # NumPy defines a shift by the width or more as 0 in either direction, which is what PTX says.
        amount = np.minimum(b, U4.type(n)).astype(unsigned)
        return a << amount if left else a >> amount

    return run


def _funnel(form: Form) -> Function:
    form.type("b32")
    direction = form.one_of("l", "r")
    mode = form.one_of("wrap", "clamp")

    def run(a: Array, b: Array, c: Array) -> Array:
        n = (c & U4.type(31) if mode == "wrap" else np.minimum(c, U4.type(32))).astype(U8)
        pair = b.astype(U8) << np.uint64(32) | a
        if direction == "l":
            return ((pair << n) >> np.uint64(32)).astype(U4)
        return (pair >> n).astype(U4)

    return run


def _prmt(form: Form) -> Function:
    form.type("b32")
    mode = form.maybe("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    byte = np.arange(4)

    def selectors(c: Array) -> Array:
        c = np.asarray(c)[..., None]
        if mode is None:
            return (c >> (4 * byte).astype(U4)) & U4.type(15)
        s = c.astype(np.int64) & 3
        if mode == "f4e":
            return s + byte
        if mode == "b4e":
            return (s - byte) & 7
        if mode == "rc8":
            return s + 0 * byte
        if mode == "ecl":
            return np.maximum(byte, s)
        if mode == "ecr":
            return np.minimum(byte, s)
        return (s & 1) * 2 + (byte & 1)

    def run(a: Array, b: Array, c: Array) -> Array:
        pair = (np.asarray(b).astype(U8) << np.uint64(32) | a)[..., None]
        s = selectors(c)
        x = (pair >> ((s & 7) * 8).astype(U8)) & np.uint64(0xFF)
        if mode is None:  # bit 3 of a selector replicates the byte's sign
            x = np.where(s & 8, np.where(x & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), x)
        return (x << (8 * byte).astype(U8)).sum(-1, dtype=U8).astype(U4)

    return run


def _lop3(form: Form) -> Function:
    """lop3.b32 d, a, b, c, table: the table is an immediate, bit (4a + 2b + c) of it the result.
    lop3.and/or.b32 d|p is not modelled."""
    form.type("b32")
    common = {
        0x80: lambda a, b, c: a & b & c,
        0xFE: lambda a, b, c: a | b | c,
        0x96: lambda a, b, c: a ^ b ^ c,
        0xC0: lambda a, b, c: a & b,
        0xFC: lambda a, b, c: a | b,
        0x3C: lambda a, b, c: a ^ b,
        0xF8: lambda a, b, c: a | b & c,
        0xEA: lambda a, b, c: a & b | c,
        0xE2: lambda a, b, c: (a & b) | (c & ~b),
        0xCA: lambda a, b, c: (a & b) | (~a & c),
    }

    def run(a: Array, b: Array, c: Array, table: Array | int) -> Array:
        t = int(np.asarray(table).flat[0])
        if t in common:
            return common[t](a, b, c)
        r = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), U4)
        for i in range(8):
            if t >> i & 1:
                r = r | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return r

    return run


def _place(operand: Array, n: int) -> Array:
    """A position or length of bfe and bfi. The manual takes 8 bits of it; an H200 does so for 32-bit fields, and
    takes all of it for 64-bit ones (the two agree up to 255)."""
    return (operand & U4.type(255) if n == 32 else operand).astype(np.int64)


def _bfe(form: Form) -> Function:
    """A signed field that is empty or wholly above the register reads as the sign bit of the field's top."""
    type_ = form.type()
    n, signed = width(type_), type_[0] == "s"
    unsigned = UNSIGNED[n]

    def run(a: Array, b: Array, c: Array) -> Array:
        pos, length = _place(b, n), _place(c, n)
        shifted = a >> np.minimum(pos, n).astype(unsigned)
        mask = _low_mask(length, n)
        field = shifted & mask
        if signed:
            top = np.minimum(pos + length - 1, n - 1)
            sign = (a >> np.maximum(top, 0).astype(unsigned)) & unsigned.type(1)
            in_range = np.minimum(np.maximum(n - pos, 0), length)
            field = field | np.where((sign != 0) & (length != 0), ~_low_mask(in_range, n), unsigned.type(0))
        return np.where(length == 0, unsigned.type(0), field)

    return run


def _low_mask(length: Array, n: int) -> Array:
    """length ones, in n bits; length >= n gives all ones."""
    unsigned = UNSIGNED[n]
    keep = np.clip(length, 0, n).astype(unsigned)
    return ~(unsigned.type(2**n - 1) << keep)


def _bfi(form: Form) -> Function:
    n = width(form.type())
    unsigned = UNSIGNED[n]

    def run(a: Array, b: Array, c: Array, d: Array) -> Array:
        pos = _place(c, n)
        mask = _low_mask(_place(d, n), n) << np.minimum(pos, n).astype(unsigned)
        return (b & ~mask) | ((a << np.minimum(pos, n).astype(unsigned)) & mask)

    return run


def _bit_length(a: Array, n: int) -> Array:
    """Index of the highest set bit plus one, exactly (float64 alone would round 64-bit values up)."""
    high = (a >> np.uint64(32)).astype(F8_) if n == 64 else np.zeros(np.shape(a))
    low = (a & a.dtype.type(0xFFFFFFFF)).astype(F8_) if n == 64 else a.astype(F8_)
    return np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1]).astype(U4)


F8_ = np.dtype(np.float64)


def _bfind(form: Form) -> Function:
    type_ = form.type()
    n, signed = width(type_), type_[0] == "s"
    amount = form.take("shiftamt")

    def run(a: Array) -> Array:
        x = np.where(a.view(SIGNED[n]) < 0, ~a, a) if signed else a
        r = _bit_length(x, n) - U4.type(1)  # no bit: wraps to 0xffffffff, as defined
        return np.where(r == U4.type(0xFFFFFFFF), r, U4.type(n - 1) - r) if amount else r

    return run


def _clz(form: Form) -> Function:
    n = width(form.type())
    return lambda a: U4.type(n) - _bit_length(a, n)


def _popc(form: Form) -> Function:
    form.type()
    return lambda a: np.bitwise_count(a).astype(U4)


def _brev(form: Form) -> Function:
    n = width(form.type())
    steps = [
        (1, 0x5555555555555555),
        (2, 0x3333333333333333),
        (4, 0x0F0F0F0F0F0F0F0F),
        (8, 0x00FF00FF00FF00FF),
    ]
    steps += [(16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)]
    unsigned = UNSIGNED[n]
    used = [(unsigned.type(s), unsigned.type(m & (2**n - 1))) for s, m in steps if s < n]

    def run(a: Array) -> Array:
        for s, m in used:
            a = ((a >> s) & m) | ((a & m) << s)
        return a

    return run


def _fns(form: Form) -> Function:
    """Position of the n-th set bit from `base`: n > 0 upwards, n < 0 downwards, 0 the base itself if set."""
    form.type("b32")

    def one(mask: int, base: int, offset: int) -> int:
        if base > 31:
            return 0xFFFFFFFF
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        bits = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [p for p in bits if mask >> p & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    def run(mask: Array, base: Array, offset: Array) -> Array:
        m, b, o = np.broadcast_arrays(mask, base, np.asarray(offset).view(np.int32))
        return np.array(
            [one(int(x), int(y), int(z)) for x, y, z in zip(m.flat, b.flat, o.flat, strict=True)], U4
        ).reshape(m.shape)

    return run


def _szext(form: Form) -> Function:
    type_ = form.type()
    clamp = form.one_of("clamp", "wrap") == "clamp"

    def run(a: Array, b: Array) -> Array:
        n = (np.minimum(b, U4.type(32)) if clamp else b & U4.type(31)).astype(np.int64)
        field = a & _low_mask(n, 32)
        if type_[0] == "s":
            sign = (a >> np.maximum(n - 1, 0).astype(U4)) & U4.type(1)
            field = np.where((n > 0) & (sign != 0), field | ~_low_mask(n, 32), field)
        return field

    return run


def _bmsk(form: Form) -> Function:
    form.type("b32")
    clamp = form.one_of("clamp", "wrap") == "clamp"

    def run(a: Array, b: Array) -> Array:
        if clamp:
            pos, length = np.minimum(a, U4.type(32)), np.minimum(b, U4.type(32))
        else:
            pos, length = a & U4.type(31), b & U4.type(31)
        return _low_mask(length.astype(np.int64), 32) << pos

    return run


def _dot(form: Form) -> Function:
    """dp4a: four byte products; dp2a.lo/.hi: two 16-bit by byte products. The sum wraps."""
    a_type, b_type = form.type(), form.type()
    half = form.one_of("lo", "hi") if form.op == "dp2a" else ""

    def lanes(x: Array, type_: str, n: int) -> Array:
        k = np.arange(32 // n) * n
        field = (np.asarray(x)[..., None] >> k.astype(U4)).astype(UNSIGNED[n])
        return values(field, type_[0] + str(n)).astype(np.int64)

    def run(a: Array, b: Array, c: Array) -> Array:
        x = lanes(a, a_type, 8 if form.op == "dp4a" else 16)
        y = lanes(b, b_type, 8)
        if half:
            y = y[..., :2] if half == "lo" else y[..., 2:]
        return ((x * y).sum(-1).astype(U8) + c).astype(U4)

    return run


def _logical(form: Form) -> Function:
    form.type()
    table: dict[str, Function] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
    }
    return table[form.op]


def _cnot(form: Form) -> Function:
    n = width(form.type())
    return lambda a: (a == 0).astype(UNSIGNED[n])


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(op: str, type_: str) -> Function:
    """a op b as a predicate; lo ls hi hs are for unsigned types."""
    signless = op in ("lo", "ls", "hi", "hs")
    if op not in _COMPARE or (type_[0] == "b" and op not in ("eq", "ne")) or (signless and type_[0] != "u"):
        raise UnsupportedInstruction(f"comparison .{op}.{type_}")
    compare = _COMPARE[op]
    if type_[0] == "s" and op in ("lt", "le", "gt", "ge"):
        signed = SIGNED[width(type_)]
        return lambda a, b: compare(a.view(signed), b.view(signed))
    return compare


_ALL = frozenset("u16 s16 u32 s32 u64 s64".split())
_LONG = frozenset("u32 s32 u64 s64".split())
_BITS = frozenset("b16 b32 b64".split())
TYPES: dict[str, frozenset[str]] = {
    **dict.fromkeys("add sub mul mad div rem min max sad".split(), _ALL),
    **dict.fromkeys("addc subc madc bfe bfind".split(), _LONG),
    **dict.fromkeys("abs neg".split(), frozenset("s16 s32 s64".split())),
    **dict.fromkeys("and or xor not".split(), _BITS | {"pred"}),
    **dict.fromkeys("cnot shl".split(), _BITS),
    "shr": _BITS | _ALL,
    **dict.fromkeys("shf prmt lop3 fns bmsk".split(), frozenset(["b32"])),
    **dict.fromkeys("bfi brev clz popc".split(), frozenset(["b32", "b64"])),
    **dict.fromkeys("szext mul24 mad24 dp4a dp2a".split(), frozenset(["u32", "s32"])),
}
"""The first types that each instruction takes."""


def build(form: Form) -> Function:
    if form.op not in BUILDERS or form.types[0] not in TYPES[form.op]:
        form.fail()
    return BUILDERS[form.op](form)


BUILDERS: dict[str, Callable[[Form], Function]] = {
    "add": _add,
    "sub": _add,
    "addc": _addc,
    "subc": _addc,
    "mul": _mul,
    "mad": _mad,
    "madc": _mad,
    "mul24": _mul24,
    "mad24": _mul24,
    "div": _quotient,
    "rem": _quotient,
    "min": _minmax,
    "max": _minmax,
    "abs": _abs,
    "neg": _neg,
    "sad": _sad,
    "and": _logical,
    "or": _logical,
    "xor": _logical,
    "not": _logical,
    "cnot": _cnot,
    "lop3": _lop3,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "prmt": _prmt,
    "bfe": _bfe,
    "bfi": _bfi,
    "bfind": _bfind,
    "clz": _clz,
    "popc": _popc,
    "brev": _brev,
    "fns": _fns,
    "szext": _szext,
    "bmsk": _bmsk,
    "dp4a": _dot,
    "dp2a": _dot,
}
