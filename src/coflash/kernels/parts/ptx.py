"""Single instructions that the DSL has no word for, and bit-level views of a register."""

from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dsl_user_op
def times_zero_plus(word: Int32, to: Int32, *, loc=None, ip=None) -> Int32:
    """`word * 0 + to` of two bfloat16: NaN from the first infinity or NaN on."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(word).ir_value(loc=loc, ip=ip), Int32(to).ir_value(loc=loc, ip=ip)],
            "{.reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $2;}",
            "=r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def load_matrices(address: Int32, *, loc=None, ip=None) -> list[Int32]:
    """Four 8 x 8 matrices of 16 bits from shared memory, whose rows lie where lanes 0..31 say."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4)]


def choose(condition: Boolean, yes, no):
    """`yes` where the condition holds, else `no`, of the type of `yes`; no branch."""
    kind = type(yes)
    return kind(arith.select(condition.ir_value(), yes.ir_value(), kind(no).ir_value()))


def least(a: Int32, b: Int32) -> Int32:
    return Int32(arith.minsi(Int32(a).ir_value(), Int32(b).ir_value()))


def most(a: Int32, b: Int32) -> Int32:
    return Int32(arith.maxsi(Int32(a).ir_value(), Int32(b).ir_value()))


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def log2(x: Float32) -> Float32:
    return cute.math.log2(x, fastmath=True)


def exchange(value, lane_mask: int):
    """What the lane whose number differs in `lane_mask` holds."""
    return cute.arch.shuffle_sync_bfly(value, offset=lane_mask)


def quad_max(x: Float32) -> Float32:
    """Largest of the four lanes that share a row of an accumulator."""
    for mask in (1, 2):
        x = cute.arch.fmax(x, exchange(x, mask))
    return x


def quad_sum(x: Float32) -> Float32:
    for mask in (1, 2):
        x = x + exchange(x, mask)
    return x


def kept(x: Float32) -> Float32:
    """The same number, in a register: the compiler does not see how to work it out again where it is used."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [x.ir_value()],
            "mov.b32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def store_16_bytes(address: Int64, words, *, loc=None, ip=None) -> None:
    """Four registers to 16 aligned bytes of global memory."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip)] + [Int32(word).ir_value(loc=loc, ip=ip) for word in words],
        "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def zero_16_shared_bytes(pointer: cute.Pointer, *, loc=None, ip=None) -> None:
    """16 aligned bytes of shared memory to zero."""
    llvm.inline_asm(
        None,
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "st.shared.v4.b32 [$0], {0, 0, 0, 0};",
        "r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


__all__ = [
    "LN_2",
    "LOG2_E",
    "choose",
    "exchange",
    "exp2",
    "kept",
    "least",
    "log2",
    "most",
    "quad_max",
    "quad_sum",
    "store_16_bytes",
    "zero_16_shared_bytes",
]
