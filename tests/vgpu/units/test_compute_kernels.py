"""Computing instructions inside kernels: the code the machine makes of them gives what `arith` gives."""

from __future__ import annotations

import re

import numpy as np
import pytest

from coflash.vgpu.launch import Buffer, Launch
from coflash.vgpu.machine import Machine
from coflash.vgpu.ptx import PtxError
from coflash.vgpu.units import arith

from .exact import samples
from .on_hardware import Watch

REGISTER = {16: "h", 32: "r", 64: "d"}

# Mnemonic, widths of the operands (1 is a predicate), width of the result.
FORMS = """
add.f32 32 32 : 32 | sub.f32 32 32 : 32 | mul.f32 32 32 : 32 | fma.rn.f32 32 32 32 : 32
add.rm.ftz.f32 32 32 : 32 | div.rn.f32 32 32 : 32 | sqrt.rn.f32 32 : 32 | max.f32 32 32 : 32
max.f32 32 32 32 : 32 | min.NaN.f32 32 32 : 32 | neg.f32 32 : 32 | abs.f32 32 : 32 | copysign.f32 32 32 : 32
ex2.approx.ftz.f32 32 : 32 | lg2.approx.f32 32 : 32 | rcp.approx.ftz.f32 32 : 32 | tanh.approx.f32 32 : 32
rsqrt.approx.f32 32 : 32 | add.f64 64 64 : 64 | fma.rn.f64 64 64 64 : 64 | add.rn.f32x2 64 64 : 64
sub.rn.f32x2 64 64 : 64 | mul.rn.f32x2 64 64 : 64 | fma.rn.f32x2 64 64 64 : 64 | add.rm.f32x2 64 64 : 64
add.f16 16 16 : 16 | fma.rn.bf16 16 16 16 : 16 | add.rn.bf16x2 32 32 : 32 | fma.rn.f16x2 32 32 32 : 32
max.bf16x2 32 32 : 32 | add.f32.bf16 16 32 : 32 | fma.rn.f32.f16 16 16 32 : 32
ex2.approx.ftz.bf16x2 32 : 32 | tanh.approx.f16 16 : 16 | cvt.rn.bf16x2.f32 32 32 : 32
cvt.rn.f16x2.f32 32 32 : 32 | cvt.rn.bf16.f32 32 : 16 | cvt.f32.bf16 16 : 32 | cvt.rn.f16.f32 32 : 16
cvt.f32.f16 16 : 32 | cvt.rzi.s32.f32 32 : 32 | cvt.rn.f32.s32 32 : 32 | cvt.f64.f32 32 : 64
cvt.rn.f32.f64 64 : 32 | cvt.rn.satfinite.e4m3x2.f32 32 32 : 16 | cvt.rn.f16x2.e4m3x2 16 : 32
cvt.rn.f32.u64 64 : 32 | cvt.rna.tf32.f32 32 : 32 | cvt.u64.u32 32 : 64 | cvt.s64.s32 32 : 64
cvt.u32.u64 64 : 32 | cvt.u32.u16 16 : 32 | cvt.s32.s16 16 : 32 | cvt.u16.u32 32 : 16 | add.s32 32 32 : 32
sub.s64 64 64 : 64 | mul.lo.s32 32 32 : 32 | mul.hi.u32 32 32 : 32 | mul.hi.s64 64 64 : 64
mul.wide.u32 32 32 : 64 | mul.wide.s16 16 16 : 32 | mad.lo.s32 32 32 32 : 32 | mad.wide.u32 32 32 64 : 64
mad.hi.s32 32 32 32 : 32 | div.s32 32 32 : 32 | rem.u32 32 32 : 32 | min.s32 32 32 : 32 | max.u64 64 64 : 64
abs.s32 32 : 32 | neg.s32 32 : 32 | sad.s32 32 32 32 : 32 | and.b32 32 32 : 32 | or.b64 64 64 : 64
xor.b16 16 16 : 16 | not.b32 32 : 32 | shl.b32 32 32 : 32 | shl.b64 64 32 : 64 | shr.u32 32 32 : 32
shr.s32 32 32 : 32 | shr.s16 16 32 : 16 | shf.l.wrap.b32 32 32 32 : 32 | prmt.b32 32 32 32 : 32
bfe.u32 32 32 32 : 32 | bfe.s64 64 32 32 : 64 | bfi.b32 32 32 32 32 : 32 | bfind.u32 32 : 32
clz.b64 64 : 32 | popc.b32 32 : 32 | popc.b64 64 : 32 | brev.b32 32 : 32 | dp4a.s32.u32 32 32 32 : 32
selp.b32 32 32 1 : 32 | selp.f32 32 32 1 : 32 | slct.f32.s32 32 32 32 : 32 | set.lt.u32.f32 32 32 : 32
setp.lt.f32 32 32 : 1 | setp.neu.f32 32 32 : 1 | setp.geu.f32 32 32 : 1 | setp.eq.s32 32 32 : 1
setp.hi.u32 32 32 : 1 | setp.lt.s64 64 64 : 1 | setp.gt.and.s32 32 32 1 : 1 | setp.ne.xor.b32 32 32 1 : 1
setp.nan.f32 32 32 : 1 | setp.lt.f16 16 16 : 1 | and.pred 1 1 : 1 | not.pred 1 : 1 | xor.pred 1 1 : 1
lop3.b32 32 32 32 #0x6a : 32 | testp.normal.f32 32 : 1 | add.rz.f32 32 32 : 32 | add.rm.f32 32 32 : 32
add.rp.f32 32 32 : 32 | add.rn.f64 64 64 : 64 | add.rz.f64 64 64 : 64 | add.rm.f64 64 64 : 64
add.rp.f64 64 64 : 64 | add.rn.ftz.f32 32 32 : 32 | add.rn.sat.f32 32 32 : 32 | sub.rz.f32 32 32 : 32
sub.rm.f32 32 32 : 32 | sub.rp.f32 32 32 : 32 | sub.rn.f64 64 64 : 64 | sub.rz.f64 64 64 : 64
sub.rm.f64 64 64 : 64 | sub.rp.f64 64 64 : 64 | sub.rn.ftz.f32 32 32 : 32 | sub.rn.sat.f32 32 32 : 32
mul.rz.f32 32 32 : 32 | mul.rm.f32 32 32 : 32 | mul.rp.f32 32 32 : 32 | mul.rn.f64 64 64 : 64
mul.rz.f64 64 64 : 64 | mul.rm.f64 64 64 : 64 | mul.rp.f64 64 64 : 64 | mul.rn.ftz.f32 32 32 : 32
mul.rn.sat.f32 32 32 : 32 | fma.rz.f32 32 32 32 : 32 | fma.rm.f32 32 32 32 : 32 | fma.rp.f32 32 32 32 : 32
fma.rz.f64 64 64 64 : 64 | fma.rm.f64 64 64 64 : 64 | fma.rp.f64 64 64 64 : 64
fma.rn.ftz.f32 32 32 32 : 32 | fma.rn.sat.f32 32 32 32 : 32 | div.rz.f32 32 32 : 32 | div.rm.f32 32 32 : 32
div.rp.f32 32 32 : 32 | div.rn.f64 64 64 : 64 | div.rz.f64 64 64 : 64 | div.rm.f64 64 64 : 64
div.rp.f64 64 64 : 64 | sqrt.rz.f32 32 : 32 | rcp.rz.f32 32 : 32 | sqrt.rz.f64 64 : 64 | sqrt.rm.f32 32 : 32
rcp.rm.f32 32 : 32 | sqrt.rm.f64 64 : 64 | sqrt.rp.f32 32 : 32 | rcp.rp.f32 32 : 32 | sqrt.rp.f64 64 : 64
div.rn.ftz.f32 32 32 : 32 | rcp.rn.ftz.f32 32 : 32 | div.full.f32 32 32 : 32 | add.rn.f16 16 16 : 16
sub.rn.f16 16 16 : 16 | mul.rn.f16 16 16 : 16 | fma.rn.f16 16 16 16 : 16 | fma.rn.relu.f16 16 16 16 : 16
max.f16 16 16 : 16 | min.NaN.f16 16 16 : 16 | neg.f16 16 : 16 | abs.f16 16 : 16 | add.rn.bf16 16 16 : 16
sub.rn.bf16 16 16 : 16 | mul.rn.bf16 16 16 : 16 | fma.rn.relu.bf16 16 16 16 : 16 | max.bf16 16 16 : 16
min.NaN.bf16 16 16 : 16 | neg.bf16 16 : 16 | abs.bf16 16 : 16 | add.rn.f16x2 32 32 : 32
sub.rn.f16x2 32 32 : 32 | mul.rn.f16x2 32 32 : 32 | fma.rn.relu.f16x2 32 32 32 : 32 | max.f16x2 32 32 : 32
min.NaN.f16x2 32 32 : 32 | neg.f16x2 32 : 32 | abs.f16x2 32 : 32 | sub.rn.bf16x2 32 32 : 32
mul.rn.bf16x2 32 32 : 32 | fma.rn.bf16x2 32 32 32 : 32 | fma.rn.relu.bf16x2 32 32 32 : 32
min.NaN.bf16x2 32 32 : 32 | neg.bf16x2 32 : 32 | abs.bf16x2 32 : 32 | add.rn.sat.f16 16 16 : 16
mul.rn.ftz.f16 16 16 : 16 | fma.rn.ftz.f16 16 16 16 : 16 | min.f32 32 32 : 32 | max.ftz.f32 32 32 : 32
max.NaN.f32 32 32 : 32 | max.xorsign.abs.f32 32 32 : 32 | min.NaN.xorsign.abs.f32 32 32 : 32
min.f64 64 64 : 64 | max.f64 64 64 : 64 | cvt.rni.s32.f32 32 : 32 | cvt.rni.u64.f32 32 : 64
cvt.rni.s64.f64 64 : 64 | cvt.rni.s16.f16 16 : 16 | cvt.rni.u32.f64 64 : 32 | cvt.rni.f32.f32 32 : 32
cvt.rni.s32.bf16 16 : 32 | cvt.rzi.u64.f32 32 : 64 | cvt.rzi.s64.f64 64 : 64 | cvt.rzi.s16.f16 16 : 16
cvt.rzi.u32.f64 64 : 32 | cvt.rzi.f32.f32 32 : 32 | cvt.rzi.s32.bf16 16 : 32 | cvt.rmi.s32.f32 32 : 32
cvt.rmi.u64.f32 32 : 64 | cvt.rmi.s64.f64 64 : 64 | cvt.rmi.s16.f16 16 : 16 | cvt.rmi.u32.f64 64 : 32
cvt.rmi.f32.f32 32 : 32 | cvt.rmi.s32.bf16 16 : 32 | cvt.rpi.s32.f32 32 : 32 | cvt.rpi.u64.f32 32 : 64
cvt.rpi.s64.f64 64 : 64 | cvt.rpi.s16.f16 16 : 16 | cvt.rpi.u32.f64 64 : 32 | cvt.rpi.f32.f32 32 : 32
cvt.rpi.s32.bf16 16 : 32 | cvt.rn.f32.s64 64 : 32 | cvt.rn.f16.s32 32 : 16 | cvt.rn.f16.u64 64 : 16
cvt.rn.f16.f64 64 : 16 | cvt.rn.bf16.s32 32 : 16 | cvt.rz.f32.s32 32 : 32 | cvt.rz.f32.u64 64 : 32
cvt.rz.f32.s64 64 : 32 | cvt.rz.f16.s32 32 : 16 | cvt.rz.f16.u64 64 : 16 | cvt.rz.f32.f64 64 : 32
cvt.rz.f16.f64 64 : 16 | cvt.rz.f16.f32 32 : 16 | cvt.rz.bf16.s32 32 : 16 | cvt.rm.f32.s32 32 : 32
cvt.rm.f32.u64 64 : 32 | cvt.rm.f32.s64 64 : 32 | cvt.rm.f16.s32 32 : 16 | cvt.rm.f16.u64 64 : 16
cvt.rm.f32.f64 64 : 32 | cvt.rm.f16.f64 64 : 16 | cvt.rm.f16.f32 32 : 16 | cvt.rm.bf16.s32 32 : 16
cvt.rp.f32.s32 32 : 32 | cvt.rp.f32.u64 64 : 32 | cvt.rp.f32.s64 64 : 32 | cvt.rp.f16.s32 32 : 16
cvt.rp.f16.u64 64 : 16 | cvt.rp.f32.f64 64 : 32 | cvt.rp.f16.f64 64 : 16 | cvt.rp.f16.f32 32 : 16
cvt.rp.bf16.s32 32 : 16 | cvt.rz.bf16.f32 32 : 16 | cvt.rz.bf16x2.f32 32 32 : 32
cvt.rz.f16x2.f32 32 32 : 32 | cvt.rn.relu.bf16x2.f32 32 32 : 32 | cvt.rn.relu.f16.f32 32 : 16
cvt.sat.f32.f32 32 : 32 | cvt.ftz.f32.f32 32 : 32 | cvt.rn.satfinite.e5m2x2.f32 32 32 : 16
cvt.rn.satfinite.relu.e4m3x2.f32 32 32 : 16 | cvt.rn.satfinite.e4m3x2.f16x2 32 : 16
cvt.rn.satfinite.e5m2x2.f16x2 32 : 16 | cvt.rn.f16x2.e5m2x2 16 : 32 | cvt.rn.relu.f16x2.e4m3x2 16 : 32
cvt.rn.bf16.f16 16 : 16 | cvt.rn.f16.bf16 16 : 16 | cvt.f64.f16 16 : 64 | cvt.sat.u8.s32 32 : 16
cvt.sat.s16.s32 32 : 16 | cvt.sat.u32.s64 64 : 32 | cvt.sat.s32.u32 32 : 32 | cvt.s16.s8 16 : 16
cvt.u32.u8 32 : 32 | cvt.s32.s8 32 : 32 | cvt.pack.sat.s16.s32 32 32 : 32
cvt.pack.sat.u8.s32.b32 32 32 32 : 32 | cvt.pack.sat.s8.s32.b32 32 32 32 : 32
cvt.pack.sat.u16.s32 32 32 : 32 | mul24.lo.s32 32 32 : 32 | mul24.hi.u32 32 32 : 32
mad24.hi.s32 32 32 32 : 32 | dp2a.lo.s32.s32 32 32 32 : 32 | dp2a.hi.u32.s32 32 32 32 : 32
shf.r.clamp.b32 32 32 32 : 32 | shf.r.wrap.b32 32 32 32 : 32 | shf.l.clamp.b32 32 32 32 : 32
bmsk.clamp.b32 32 32 : 32 | bmsk.wrap.b32 32 32 : 32 | szext.clamp.s32 32 32 : 32
szext.wrap.u32 32 32 : 32 | fns.b32 32 32 32 : 32 | bfe.s32 32 32 32 : 32 | bfe.u64 64 32 32 : 64
bfi.b64 64 64 32 32 : 64 | bfind.shiftamt.u32 32 : 32 | bfind.s32 32 : 32 | bfind.u64 64 : 32
brev.b64 64 : 64 | clz.b32 32 : 32 | sad.u32 32 32 32 : 32 | abs.s64 64 : 64 | neg.s16 16 : 16
mul.hi.u64 64 64 : 64 | mul.hi.s16 16 16 : 16 | mad.lo.u16 16 16 16 : 16 | mad.wide.s16 16 16 32 : 32
mad.hi.sat.s32 32 32 32 : 32 | add.sat.s32 32 32 : 32 | sub.sat.s32 32 32 : 32 | add.u16x2 32 32 : 32
max.s16x2 32 32 : 32 | min.relu.s16x2 32 32 : 32 | max.relu.s32 32 32 : 32 | cnot.b32 32 : 32
shl.b16 16 32 : 16 | shr.u64 64 32 : 64 | shr.s64 64 32 : 64 | slct.f32.f32 32 32 32 : 32
slct.ftz.u32.f32 32 32 32 : 32 | set.gt.and.u32.s32 32 32 1 : 32 | set.leu.f32.f32 32 32 : 32
testp.subnormal.f32 32 : 1 | testp.finite.f64 64 : 1 | setp.equ.ftz.f32 32 32 : 1 | setp.num.f64 64 64 : 1
setp.gtu.bf16 16 16 : 1 | setp.ls.u64 64 64 : 1 | copysign.f64 64 64 : 64 | prmt.b32.f4e 32 32 32 : 32
prmt.b32.b4e 32 32 32 : 32 | prmt.b32.rc8 32 32 32 : 32 | prmt.b32.ecl 32 32 32 : 32
prmt.b32.ecr 32 32 32 : 32 | prmt.b32.rc16 32 32 32 : 32
"""


def forms() -> list[tuple[str, list[str], int]]:
    out = []
    for entry in FORMS.replace("\n", "|").split("|"):
        if entry.strip():
            left, right = entry.split(":")
            name, *operands = left.split()
            out.append((name, operands, int(right)))
    return out


def test_operand_counts() -> None:
    for name, operands, _ in forms():
        assert len(operands) in arith.operand_counts(name), name


@pytest.mark.parametrize(
    "code", ["add.f32 %r1, %r2;", "ex2.approx.f32 %r1, %r2, %r3;", "bfi.b32 %r1, %r2, %r3, %r4;"]
)
def test_missing_operands_are_an_error(code: str) -> None:
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry test()\n"
    source = head + "{\n.reg .b32 %r<9>;\n" + code + "\nret;\n}\n"
    with pytest.raises(PtxError, match="operands"):
        Machine(arch="sm_90a").run(Launch(source, "test", (1, 1, 1), (32, 1, 1), b""))


def operand_values(name: str, width: int, n: int, seed: int) -> np.ndarray:
    if width == 1:
        return np.random.default_rng(seed).integers(0, 2, n).astype(bool)
    fmt = {16: "bf16" if "bf16" in name else "f16", 32: "f32", 64: "f64"}[width]
    if "x2" in name and width > 16:
        fmt = {64: "f32", 32: "bf16" if "bf16" in name else "f16"}[width] if ".f32" != name[-4:] else "f32"
        raw = samples(fmt, n * (width // (32 if fmt == "f32" else 16)), seed)
        return raw.view({32: np.uint32, 64: np.uint64}[width])
    return samples(fmt, n, seed)


# What Hopper does not have.
BLACKWELL = re.compile(r".*f32x2|(max|min)\.f32 32 32 32|(add|sub|fma)\.(rn\.)?f32\.(bf16|f16)")
# Bits that the manual leaves to the hardware, or models within a bound only.
UNSPECIFIED = re.compile(r".*\.(approx|full)")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("guarded", [False, True], ids=["all", "guarded"])
def test_instructions(guarded: bool, arch: str) -> None:
    """All forms in one kernel of 128 threads; a guard leaves the destination of half of the threads alone."""
    n = 128
    buffers: list[Buffer] = []
    code: list[str] = []
    checks = []
    rng = np.random.default_rng(4)
    on = rng.integers(0, 2, n).astype(bool) if guarded else np.ones(n, bool)
    flags = on.astype(np.uint32)
    buffers.append(Buffer.of(flags, "flags"))
    code += ["ld.param.b64 %d20, [table];", "ld.global.b64 %d21, [%d20];", "mul.wide.u32 %d22, %r0, 4;"]
    code += ["add.s64 %d21, %d21, %d22;", "ld.global.b32 %r1, [%d21];", "setp.ne.b32 %p7, %r1, 0;"]
    for index, (name, operands, result) in enumerate(forms()):
        if arch == "sm_90a" and BLACKWELL.match(" ".join([name, *operands])):
            continue
        given, registers = [], []
        for k, what in enumerate(operands):
            if what[0] == "#":
                registers.append(what[1:])
                given.append(np.uint32(int(what[1:], 16)))
                continue
            width = int(what)
            values = operand_values(name, width, n, 100 * index + k)
            given.append(values)
            stored = values.astype(np.uint16) if width == 1 else values
            buffers.append(Buffer.of(stored, f"{name} {k}"))
            size = stored.itemsize
            slot = len(buffers) - 1
            code += [f"ld.global.b64 %d21, [%d20+{8 * slot}];", f"mul.wide.u32 %d22, %r0, {size};"]
            code += ["add.s64 %d21, %d21, %d22;"]
            kind = {1: "h", 16: "h", 32: "r", 64: "d"}[width]
            code.append(f"ld.global.b{8 * size} %{kind}{10 + k}, [%d21];")
            if width == 1:
                code.append(f"setp.ne.b16 %p{k}, %h{10 + k}, 0;")
                registers.append(f"%p{k}")
            else:
                registers.append(f"%{kind}{10 + k}")
        with np.errstate(all="ignore"):
            want = np.broadcast_to(arith.resolve(name)(*given), (n,))
        kind = {1: "p", 16: "h", 32: "r", 64: "d"}[result]
        code.append("setp.ne.b32 %p9, 0, 0;" if result == 1 else f"mov.b{result} %{kind}9, 0;")
        guard = "@%p7 " if guarded else ""
        code.append(f"{guard}{name} %{kind}9, {', '.join(registers)};")
        got = np.zeros(n, {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}[result])
        buffers.append(Buffer.of(got, f"{name} result"))
        code += [f"ld.global.b64 %d21, [%d20+{8 * (len(buffers) - 1)}];"]
        code += [f"mul.wide.u32 %d22, %r0, {got.itemsize};", "add.s64 %d21, %d21, %d22;"]
        if result == 1:
            code.append("selp.b32 %r9, 1, 0, %p9;")
            kind = "r"
        code.append(f"st.global.b{8 * got.itemsize} [%d21], %{kind}9;")
        checks.append((name, given, np.where(on, want, np.zeros(1, want.dtype)), got))
    table = np.array([b.address for b in buffers], np.uint64)
    buffers.append(Buffer.of(table, "table"))
    source = f"""
.version 9.0
.target {arch}
.address_size 64
.visible .entry test(.param .u64 table)
{{
.reg .pred %p<16>;
.reg .b16 %h<32>;
.reg .b32 %r<32>;
.reg .b64 %d<32>;
mov.u32 %r0, %tid.x;
{chr(10).join(code)}
ret;
}}
"""
    params = buffers[-1].address.to_bytes(8, "little")
    launch = Launch(source, "test", (1, 1, 1), (n, 1, 1), params, buffers=buffers)
    watch = Watch(launch)
    report = Machine(arch=arch).run(launch)
    assert not report.findings, "\n\n".join(map(str, report.findings))
    # The assembler drops the guard of a testp, and makes a guarded neg of one that keeps a NaN's payload.
    varies = re.compile(r"testp|neg\.f32|abs\.f32")
    unknown = [b.name for b in buffers if UNSPECIFIED.match(b.name) or guarded and varies.match(b.name)]
    watch.finished(skip=unknown)
    wrong = []
    for name, given, want, got in checks:
        bad = np.flatnonzero(got != want)
        if bad.size:
            lane = bad[0]
            operands = [hex(int(np.broadcast_to(g, (n,))[lane])) for g in given]
            wrong.append(
                f"{name} {operands}: got {int(got[lane]):#x}, want {int(want[lane]):#x} ({bad.size} lanes)"
            )
    assert not wrong, "\n".join(wrong)
