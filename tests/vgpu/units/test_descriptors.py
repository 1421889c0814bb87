"""Matrix descriptors: fields, canonical layouts by hand, CuTe-DSL's swizzled layouts, and the instruction
descriptor."""

from __future__ import annotations

import numpy as np
import pytest

from coflash.vgpu.units import descriptors
from coflash.vgpu.units.descriptors import DescriptorError, MatrixDescriptor

from .cute_layouts import needs_dsl, parse, printed, table


def wgmma(start: int, leading: int, stride: int, mode: int, base: int = 0) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | mode << 62


def tcgen05(start: int, leading: int, stride: int, mode: int, extra: int = 0) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | mode << 61 | extra


def test_wgmma_fields() -> None:
    d = descriptors.decode_wgmma(wgmma(0x2A400, 0x4000, 1024, 1, 5))
    assert d == MatrixDescriptor(0x2A400, 0x4000, 1024, 128, 16, 5)
    assert [descriptors.decode_wgmma(wgmma(0, 0, 0, m)).swizzle for m in range(4)] == [0, 128, 64, 32]


def test_tcgen05_fields() -> None:
    modes = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}
    for mode, (swizzle, atom) in modes.items():
        assert descriptors.decode_tcgen05(tcgen05(0x400, 16, 2048, mode)) == MatrixDescriptor(
            0x400, 16, 2048, swizzle, atom, 0
        )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (tcgen05(0, 0, 0, 3), "swizzle mode 3"),
        (tcgen05(0, 0, 0, 2) & ~(1 << 46), "46-48"),
        (tcgen05(0, 0, 0, 2, 1 << 55), "53-60"),
        (tcgen05(0, 0, 0, 2, 1 << 52), "absolute"),
    ],
)
def test_bad_tcgen05_descriptors(raw: int, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        descriptors.decode_tcgen05(raw)


def brute(d: MatrixDescriptor, row: int, k: int, bits: int, k_major: bool) -> int:
    """One element's address from the canonical layout's formula and the swizzle, digit by digit."""
    per = 128 // bits  # T
    span = (d.swizzle or 16) // 16 * per  # elements across a swizzle atom
    size = bits // 8
    if k_major:
        chunk = k // per
        step = d.leading if d.swizzle == 0 else 16
        offset = row % 8 * span * size + row // 8 * d.stride + chunk * step + k % per * size
    elif d.swizzle == 0:
        offset = row % per * size + row // per * d.stride + k % 8 * 16 + k // 8 * d.leading
    else:
        depth = 4 if d.atom == 32 else 8
        offset = row % span * size + row // span * d.leading
        offset += k % depth * span * size + k // depth * d.stride
    address = d.start + offset
    if d.swizzle:
        low = {16: 4, 32: 5}[d.atom]
        count = {(32, 16): 1, (64, 16): 2, (128, 16): 3, (128, 32): 2}[(d.swizzle, d.atom)]
        phase = (address >> 7) - d.base_offset & (1 << count) - 1
        address ^= phase << low
    return address


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(("swizzle", "atom"), [(0, 16), (32, 16), (64, 16), (128, 16), (128, 32)])
def test_offsets(swizzle: int, atom: int, k_major: bool, bits: int) -> None:
    k = 256 // bits
    for start, base in ((0, 0), (0x1440, 0), (0x2060, 3)):
        d = MatrixDescriptor(start, 4096 if swizzle else 128, 1024 if swizzle else 2048, swizzle, atom, base)
        if atom == 32 and k_major:
            with pytest.raises(DescriptorError, match="MN-major"):
                descriptors.operand_offsets(d, 64, k, bits, k_major)
            continue
        got = descriptors.operand_offsets(d, 64, k, bits, k_major)
        assert got.shape == (64, k)
        want = [[brute(d, r, c, bits, k_major) for c in range(k)] for r in range(64)]
        np.testing.assert_array_equal(got, want)
        memory = np.random.default_rng(0).integers(0, 256, 65536, dtype=np.uint8)
        elements = memory.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
        tile = descriptors.load_operand(memory, d, 64, k, bits, k_major)
        np.testing.assert_array_equal(tile, elements[got // (bits // 8)])
        chunks = descriptors.operand_chunks(d, 64, k, bits, k_major)
        assert chunks.shape == ((64, k * bits // 128) if k_major else (k, 64 * bits // 128))
        np.testing.assert_array_equal(np.unique(chunks), np.unique(got & ~15))


def test_first_rows_of_the_128_byte_swizzle() -> None:
    """The manual's figure: in row r of an atom, chunk c lies at place c ^ r."""
    d = MatrixDescriptor(0, 0, 1024, 128, 16, 0)
    chunks = descriptors.operand_chunks(d, 8, 16, 16, True)
    assert chunks[:, 0].tolist() == [r * 128 + (r ^ 0) * 16 for r in range(8)]
    assert chunks[:, 1].tolist() == [r * 128 + (r ^ 1) * 16 for r in range(8)]


def test_sub_byte_elements_are_padded() -> None:
    memory = np.zeros(4096, np.uint8)
    memory[:8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    d = MatrixDescriptor(0, 16 * 8, 256, 0, 16, 0)
    got = descriptors.load_operand(memory, d, 8, 32, 4, True)
    assert got[0, :16].tolist() == list(range(16)) and not got[0, 16:].any()
    memory[:3] = [0b01000001, 0b00100000, 0b00001100]  # 6-bit 1, 1, 2, 3, low bits first
    assert descriptors.load_operand(memory, d, 8, 32, 6, True)[0, :4].tolist() == [1, 1, 2, 3]
    with pytest.raises(DescriptorError, match="K-major"):
        descriptors.operand_chunks(d, 32, 32, 4, False)


def test_outside_memory() -> None:
    with pytest.raises(IndexError):
        descriptors.load_operand(
            np.zeros(1024, np.uint8), MatrixDescriptor(1024, 0, 1024, 128, 16, 0), 8, 16, 16, True
        )
    with pytest.raises(DescriptorError, match="8 x 16-byte"):
        descriptors.operand_chunks(MatrixDescriptor(0, 0, 0, 0, 16, 0), 12, 16, 16, True)


SMEM = """
import cutlass.utils.{helpers} as helpers
from cutlass.utils import LayoutEnum
K, MN = OperandMajorMode.K, OperandMajorMode.MN
kinds = {{}}
for name in ("K_SW32", "K_SW64", "K_SW128", "K_INTER", "MN_SW32", "MN_SW64", "MN_SW128", "MN_INTER"):
    kind = getattr({module}.SmemLayoutAtomKind, name)
    show(name, {module}.make_smem_layout_atom(kind, BFloat16))
"""


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_atoms_against_the_dsl(arch: str) -> None:
    """Every swizzle atom of the DSL, addressed by a descriptor that covers it, for wgmma and tcgen05."""
    module, helpers = (
        ("warpgroup", "hopper_helpers") if arch == "sm_90a" else ("tcgen05", "blackwell_helpers")
    )
    found = printed(arch, SMEM.format(module=module, helpers=helpers))
    for name, text in found.items():
        major, mode = name.split("_")
        shape, _, swizzle = parse(text)
        span = {"SW32": 32, "SW64": 64, "SW128": 128, "INTER": 0}[mode]
        offsets = table(text).astype(np.int64) * 2
        if swizzle and swizzle[0]:
            bits, base, shift = swizzle
            offsets ^= (offsets >> shift) & (((1 << bits) - 1) << base)
        k_major = major == "K"
        rows, k = shape if k_major else (shape[0], shape[1])
        if k_major:
            # An instruction is 16 deep: the atom's further columns are reached by moving the start address.
            for first in range(0, max(k, 16), 16):
                if span == 0:
                    d = MatrixDescriptor(0, 128, 0, 0, 16, 0)
                    got = descriptors.operand_offsets(d, rows, 16, 16, True)[:, :k]
                    np.testing.assert_array_equal(got, offsets)
                else:
                    d = MatrixDescriptor(2 * first, 0, 8 * span, span, 16, 0)
                    got = descriptors.operand_offsets(d, rows, 16, 16, True)
                    np.testing.assert_array_equal(got, offsets[:, first : first + 16])
        else:
            d = MatrixDescriptor(0, 4096, 4096, span, 16, 0)
            got = descriptors.operand_offsets(d, rows, 8, 16, False)
            np.testing.assert_array_equal(got, offsets)


def instruction(
    m: int, n: int, a: int = 1, b: int = 1, d: int = 1, transpose: tuple[int, int] = (0, 0), extra: int = 0
) -> int:
    return (
        d << 4
        | a << 7
        | b << 10
        | transpose[0] << 15
        | transpose[1] << 16
        | n >> 3 << 17
        | m >> 4 << 24
        | extra
    )


def test_instruction_fields() -> None:
    i = descriptors.decode_instruction(instruction(128, 96, transpose=(0, 1), extra=1 << 13), "f16")
    assert (i.m, i.n, i.k, i.a_type, i.b_type, i.d_type) == (128, 96, 16, "bf16", "bf16", "f32")
    assert (i.a_k_major, i.b_k_major, i.negate_a, i.negate_b) == (True, False, True, False)
    assert (i.a_bits, i.b_bits) == (16, 16)
    i = descriptors.decode_instruction(instruction(128, 64, a=0, b=5, d=1), "f8f6f4")
    assert (i.k, i.a_type, i.b_type, i.a_bits, i.b_bits) == (32, "e4m3", "e2m1", 8, 4)
    i = descriptors.decode_instruction(instruction(64, 64, 2, 2), "tf32")
    assert (i.k, i.a_type) == (8, "tf32")
    i = descriptors.decode_instruction(instruction(128, 32, 0, 1, 2, extra=1 << 3), "i8")
    assert (i.k, i.a_type, i.b_type, i.d_type, i.saturate) == (32, "u8", "s8", "s32", True)
    i = descriptors.decode_instruction(instruction(32, 64, extra=2 << 30), "f16", ws=True)
    assert i.max_shift == 16


@pytest.mark.parametrize(
    ("raw", "kind", "group", "ws", "message"),
    [
        (instruction(96, 64), "f16", 1, False, "M 96"),
        (instruction(256, 64), "f16", 1, False, "M 256"),
        (instruction(64, 64), "f16", 2, False, "M 64"),
        (instruction(256, 24), "f16", 2, False, "N 24"),
        (instruction(128, 40, 1, 1, 2), "i8", 1, False, "N 40"),
        (instruction(32, 96), "f16", 1, True, ".ws"),
        (instruction(128, 64, 0, 1), "f16", 1, False, "both"),
        (instruction(128, 64, 1, 1, 0), "f16", 1, False, "bf16 accumulates"),
        (instruction(128, 64, 3, 3), "f16", 1, False, "element types"),
        (instruction(128, 64, d=2), "f16", 1, False, "accumulator type"),
        (instruction(128, 64, extra=1 << 2), "f16", 1, False, "sparsity"),
        (instruction(128, 64, extra=1 << 3), "f16", 1, False, "saturation"),
        (instruction(128, 64, extra=1 << 6), "f16", 1, False, "reserved"),
        (instruction(128, 64, 5, 0, transpose=(1, 0)), "f8f6f4", 1, False, "sub-byte"),
        (instruction(128, 64, extra=1 << 30), "f16", 1, False, "maximum shift"),
        (instruction(128, 64), "mxf4", 1, False, "not modelled"),
    ],
)
def test_bad_instruction_descriptors(raw: int, kind: str, group: int, ws: bool, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        descriptors.decode_instruction(raw, kind, group, ws)
