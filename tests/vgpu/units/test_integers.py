"""Integer and bit instructions, lane by lane against Python integers and the manual's pseudo-code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coflash.vgpu.units import arith
from coflash.vgpu.units.arith import UnsupportedInstruction

DTYPE = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def draw(bits: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 62, n, dtype=np.uint64) << np.uint64(2) | rng.integers(0, 4, n, dtype=np.uint64)
    x >>= rng.integers(0, 64, n, dtype=np.uint64)
    special = np.array([0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1], np.uint64)
    x[::7] = special[rng.integers(0, 5, x[::7].size)]
    return (x & np.uint64((1 << bits) - 1)).astype(DTYPE[bits])


def number(raw: int, type_: str) -> int:
    bits = int(type_[1:])
    return raw - (1 << bits) if type_[0] == "s" and raw >> (bits - 1) else raw


def run(mnemonic: str, *operands: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return arith.resolve(mnemonic)(*operands)


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else -1,
    "rem": lambda a, b: a - b * truncated(a, b) if b else -1,
}


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("op", list(BINARY))
def test_binary(op: str, type_: str) -> None:
    bits = int(type_[1:])
    a, b = draw(bits, 300, 1), draw(bits, 300, 2)
    got = run(f"{op}.{type_}", a, b)
    want = [
        BINARY[op](number(x, type_), number(y, type_)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(got, np.array([w & ((1 << bits) - 1) for w in want], DTYPE[bits]))


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_products(type_: str) -> None:
    bits = int(type_[1:])
    a, b, c = (draw(bits, 300, s) for s in (3, 4, 5))
    lanes = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    exact = [number(x, type_) * number(y, type_) for x, y, _ in lanes]
    mask = (1 << bits) - 1
    np.testing.assert_array_equal(run(f"mul.hi.{type_}", a, b), [p >> bits & mask for p in exact])
    mad = [(p + z) & mask for p, (_, _, z) in zip(exact, lanes, strict=True)]
    np.testing.assert_array_equal(run(f"mad.lo.{type_}", a, b, c), mad)
    mad = [((p >> bits) + z) & mask for p, (_, _, z) in zip(exact, lanes, strict=True)]
    np.testing.assert_array_equal(run(f"mad.hi.{type_}", a, b, c), mad)
    if bits < 64:
        wide = (1 << 2 * bits) - 1
        np.testing.assert_array_equal(run(f"mul.wide.{type_}", a, b), [p & wide for p in exact])
        d = draw(2 * bits, 300, 6)
        want = [(p + w) & wide for p, w in zip(exact, d.tolist(), strict=True)]
        np.testing.assert_array_equal(run(f"mad.wide.{type_}", a, b, d), want)


@pytest.mark.parametrize("type_", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "s64"])
def test_shifts(type_: str) -> None:
    bits = int(type_[1:])
    a = draw(bits, 200, 7)
    n = np.random.default_rng(8).integers(0, bits + 5, 200).astype(np.uint32)
    n[:2] = [0xFFFFFFFF, bits]
    right = [
        number(x, type_) >> min(s, bits) & ((1 << bits) - 1)
        for x, s in zip(a.tolist(), n.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(run(f"shr.{type_}", a, n), np.array(right, DTYPE[bits]))
    if type_[0] == "b":
        left = [(x << min(s, bits)) & ((1 << bits) - 1) for x, s in zip(a.tolist(), n.tolist(), strict=True)]
        np.testing.assert_array_equal(run(f"shl.{type_}", a, n), np.array(left, DTYPE[bits]))


def test_logic() -> None:
    a, b = draw(32, 100, 9), draw(32, 100, 10)
    np.testing.assert_array_equal(run("and.b32", a, b), a & b)
    np.testing.assert_array_equal(run("xor.b32", a, b), a ^ b)
    np.testing.assert_array_equal(run("not.b32", a), ~a)
    np.testing.assert_array_equal(run("cnot.b32", a), a == 0)
    p = np.array([True, False])
    np.testing.assert_array_equal(run("not.pred", p), ~p)
    np.testing.assert_array_equal(run("or.pred", p, ~p), [True, True])


def test_lop3_every_table() -> None:
    a, b, c = (np.array([v], np.uint32) for v in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    for table in range(256):
        # The canonical operands enumerate the table itself, byte by byte.
        assert run("lop3.b32", a, b, c, np.uint32(table))[0] == table * 0x01010101


def test_funnel() -> None:
    a, b = np.array([0x12345678] * 4, np.uint32), np.array([0x9ABCDEF0] * 4, np.uint32)
    n = np.array([0, 8, 32, 40], np.uint32)
    np.testing.assert_array_equal(
        run("shf.l.wrap.b32", a, b, n), [0x9ABCDEF0, 0xBCDEF012, 0x9ABCDEF0, 0xBCDEF012]
    )
    np.testing.assert_array_equal(
        run("shf.l.clamp.b32", a, b, n), [0x9ABCDEF0, 0xBCDEF012, 0x12345678, 0x12345678]
    )
    np.testing.assert_array_equal(
        run("shf.r.wrap.b32", a, b, n), [0x12345678, 0xF0123456, 0x12345678, 0xF0123456]
    )
    np.testing.assert_array_equal(
        run("shf.r.clamp.b32", a, b, n), [0x12345678, 0xF0123456, 0x9ABCDEF0, 0x9ABCDEF0]
    )


# The manual's tables of prmt modes: bytes d3 d2 d1 d0 taken for selector 0, 1, 2, 3.
PRMT = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", list(PRMT))
def test_prmt_modes(mode: str) -> None:
    a, b = np.array([0x33221100], np.uint32), np.array([0x77665544], np.uint32)
    for selector, taken in enumerate(PRMT[mode]):
        want = int("".join(2 * digit for digit in taken), 16)
        assert run(f"prmt.b32.{mode}", a, b, np.array([selector], np.uint32))[0] == want


def test_prmt_selectors() -> None:
    a, b = np.array([0x80221100], np.uint32), np.array([0x77665544], np.uint32)
    assert run("prmt.b32", a, b, np.array([0x7540], np.uint32))[0] == 0x77554400
    # The top bit of a selector replicates the sign of its byte.
    assert run("prmt.b32", a, b, np.array([0xBF08], np.uint32))[0] == 0xFF000000


def bfe(a: int, pos: int, length: int, type_: str) -> int:
    """The manual's pseudo-code."""
    msb = int(type_[1:]) - 1
    pos, length = pos & 0xFF, length & 0xFF
    sign = 0 if type_[0] == "u" or length == 0 else a >> min(pos + length - 1, msb) & 1
    d = 0
    for i in range(msb + 1):
        d |= (a >> (pos + i) & 1 if i < length and pos + i <= msb else sign) << i
    return d


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_fields(type_: str) -> None:
    bits = int(type_[1:])
    rng = np.random.default_rng(11)
    a, b = draw(bits, 300, 12), draw(bits, 300, 13)
    pos = rng.integers(0, bits + 8, 300).astype(np.uint32)
    length = rng.integers(0, bits + 8, 300).astype(np.uint32)
    want = [bfe(x, p, n, type_) for x, p, n in zip(a.tolist(), pos.tolist(), length.tolist(), strict=True)]
    np.testing.assert_array_equal(run(f"bfe.{type_}", a, pos, length), np.array(want, DTYPE[bits]))
    inserted = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), pos.tolist(), length.tolist(), strict=True):
        f = y
        for i in range(n):
            if p + i < bits:
                f = f & ~(1 << (p + i)) | (x >> i & 1) << (p + i) if i < bits else f & ~(1 << (p + i))
        inserted.append(f)
    np.testing.assert_array_equal(run(f"bfi.b{bits}", a, b, pos, length), np.array(inserted, DTYPE[bits]))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    a = draw(bits, 300, 14)
    values = a.tolist()
    np.testing.assert_array_equal(run(f"popc.b{bits}", a), [x.bit_count() for x in values])
    np.testing.assert_array_equal(run(f"clz.b{bits}", a), [bits - x.bit_length() for x in values])
    np.testing.assert_array_equal(run(f"brev.b{bits}", a), [int(f"{x:0{bits}b}"[::-1], 2) for x in values])
    missing = 0xFFFFFFFF
    found = [x.bit_length() - 1 if x else missing for x in values]
    np.testing.assert_array_equal(run(f"bfind.u{bits}", a), np.array(found, np.uint32))
    shift = [bits - 1 - f if f != missing else missing for f in found]
    np.testing.assert_array_equal(run(f"bfind.shiftamt.u{bits}", a), np.array(shift, np.uint32))
    signed = [(~x & ((1 << bits) - 1) if x >> (bits - 1) else x).bit_length() - 1 for x in values]
    np.testing.assert_array_equal(
        run(f"bfind.s{bits}", a), np.array([s & missing for s in signed], np.uint32)
    )


def test_carry_chain() -> None:
    a, b, c, d = (draw(32, 200, s) for s in (15, 16, 17, 18))
    low, carry = run("add.cc.u32", a, b)
    high = run("addc.u32", c, d, carry)
    total = a.astype(np.uint64) + (c.astype(np.uint64) << np.uint64(32))
    total += b.astype(np.uint64) + (d.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), total)
    low, borrow = run("sub.cc.u32", a, b)
    high = run("subc.u32", c, d, borrow)
    total = a.astype(np.uint64) + (c.astype(np.uint64) << np.uint64(32))
    total -= b.astype(np.uint64) + (d.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), total)
    low, carry = run("mad.lo.cc.u32", a, b, c)
    high = run("madc.hi.u32", a, b, d, carry)
    exact = [
        x * y + z + (w << 32)
        for x, y, z, w in zip(a.tolist(), b.tolist(), c.tolist(), d.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(
        low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), [e & (2**64 - 1) for e in exact]
    )


def test_dot_products() -> None:
    a, b, c = (draw(32, 200, s) for s in (19, 20, 21))

    def parts(x: int, n: int, signed: bool) -> list[int]:
        return [number(x >> i & ((1 << n) - 1), f"{'s' if signed else 'u'}{n}") for i in range(0, 32, n)]

    for a_type in ("u32", "s32"):
        for b_type in ("u32", "s32"):
            four, low, high = [], [], []
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
                eights = parts(y, 8, b_type == "s32")
                halves = parts(x, 16, a_type == "s32")
                four.append(
                    (sum(p * q for p, q in zip(parts(x, 8, a_type == "s32"), eights, strict=True)) + z)
                    % 2**32
                )
                low.append((sum(p * q for p, q in zip(halves, eights[:2], strict=True)) + z) % 2**32)
                high.append((sum(p * q for p, q in zip(halves, eights[2:], strict=True)) + z) % 2**32)
            np.testing.assert_array_equal(run(f"dp4a.{a_type}.{b_type}", a, b, c), four)
            np.testing.assert_array_equal(run(f"dp2a.lo.{a_type}.{b_type}", a, b, c), low)
            np.testing.assert_array_equal(run(f"dp2a.hi.{a_type}.{b_type}", a, b, c), high)


def test_rarer_instructions() -> None:
    u = np.uint32
    np.testing.assert_array_equal(run("sad.u32", u([3]), u([10]), u([1])), [8])
    np.testing.assert_array_equal(run("sad.s32", u([2**32 - 3]), u([10]), u([1])), [14])
    np.testing.assert_array_equal(run("abs.s32", u([2**32 - 3, 2**31])), [3, 2**31])
    np.testing.assert_array_equal(run("neg.s32", u([3])), [2**32 - 3])
    np.testing.assert_array_equal(run("add.sat.s32", u([2**31 - 1]), u([1])), [2**31 - 1])
    np.testing.assert_array_equal(run("max.relu.s32", u([2**32 - 9]), u([2**32 - 3])), [0])
    np.testing.assert_array_equal(run("mul24.lo.s32", u([0xFFFFFF]), u([5])), [2**32 - 5])
    np.testing.assert_array_equal(run("mul24.hi.u32", u([0xFFFFFF]), u([0xFFFFFF])), [0xFFFFFE00])
    np.testing.assert_array_equal(run("mad24.lo.u32", u([0x1000003]), u([5]), u([7])), [22])
    np.testing.assert_array_equal(
        run("szext.clamp.s32", u([0x80, 0x80, 5]), u([8, 9, 40])), [0xFFFFFF80, 0x80, 5]
    )
    np.testing.assert_array_equal(run("szext.wrap.u32", u([0xABCD]), u([40])), [0xCD])
    np.testing.assert_array_equal(
        run("bmsk.clamp.b32", u([4, 30, 0]), u([8, 8, 32])), [0xFF0, 0xC0000000, 0xFFFFFFFF]
    )
    np.testing.assert_array_equal(run("bmsk.wrap.b32", u([36]), u([40])), [0xFF0])
    mask, base = u([0b10110]), u([2])
    assert run("fns.b32", mask, base, u([0]))[0] == 2
    assert run("fns.b32", mask, base, u([2]))[0] == 4
    assert run("fns.b32", mask, base, u([2**32 - 2]))[0] == 1
    assert run("fns.b32", mask, base, u([3]))[0] == 0xFFFFFFFF


def test_16_bit_pairs() -> None:
    a, b = draw(32, 200, 22), draw(32, 200, 23)
    for op, type_ in (("add", "u16"), ("min", "s16"), ("max", "u16")):
        want = run(f"{op}.{type_}", a.view(np.uint16), b.view(np.uint16)).view(np.uint32)
        np.testing.assert_array_equal(run(f"{op}.{type_}x2", a, b), want)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s16"])
def test_comparisons(type_: str) -> None:
    bits = int(type_[1:])
    a, b = draw(bits, 200, 24), draw(bits, 200, 25)
    b[::5] = a[::5]
    pairs = [(number(x, type_), number(y, type_)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    for op, want in (
        ("lt", [x < y for x, y in pairs]),
        ("ge", [x >= y for x, y in pairs]),
        ("eq", [x == y for x, y in pairs]),
    ):
        np.testing.assert_array_equal(run(f"setp.{op}.{type_}", a, b), want)
    if type_[0] == "u":
        np.testing.assert_array_equal(run(f"setp.hi.{type_}", a, b), [x > y for x, y in pairs])


@pytest.mark.parametrize(
    "mnemonic", ["shl.f32", "neg.u32", "mul.s32", "mul.wide.s64", "and.s32", "add.cc.sat.u32", "prmt.b32.xyz"]
)
def test_invalid_forms_are_refused(mnemonic: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=mnemonic.split(".")[0]):
        arith.resolve(mnemonic)
