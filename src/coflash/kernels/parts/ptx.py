"""Single instructions that the DSL has no word for, and bit-level views of a register."""

from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import T, dsl_user_op

from coflash.kernels.parts.inline import ptx, run

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dsl_user_op
def times_zero_plus(word: Int32, to: Int32, *, loc=None, ip=None) -> Int32:
    """`word * 0 + to` of two bfloat16: NaN from the first infinity or NaN on."""
    text = "{.reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $2;}"
    return Int32(ptx(T.i32(), text, "=r,r,r", word, to, pure=True, loc=loc, ip=ip))


@dsl_user_op
def load_matrices(address: Int32, *, loc=None, ip=None) -> list[Int32]:
    """Four 8 x 8 matrices of 16 bits from shared memory, whose rows lie where lanes 0..31 say."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return [Int32(word) for word in run(text, [("r", T.i32())] * 4, [], [address], loc=loc, ip=ip)]


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


@dsl_user_op
def adjacent(low: Float32, high: Float32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The same two numbers, in an aligned pair of registers (NaN may come back as another NaN, and a zero with it).

    Minus zero is added to both as one float64, which changes no other number.  The assembler could see a constant
    minus zero, and drop it; the block's y, always 0, it has to read."""
    text = (
        "{.reg .f64 both, nothing; .reg .b32 zero; mov.u32 zero, %ctaid.y; mov.b64 nothing, {zero, 0x80000000};"
        " mov.b64 both, {$2, $3}; add.rn.f64 both, both, nothing; mov.b64 {$0, $1}, both;}"
    )
    a, b = run(text, [("f", T.f32())] * 2, [], [low, high], loc=loc, ip=ip)
    return Float32(a), Float32(b)


@dsl_user_op
def store_16_bytes(address: Int64, words, *, loc=None, ip=None) -> None:
    """Four registers to 16 aligned bytes of global memory."""
    ptx(None, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", address, *words, loc=loc, ip=ip)


@dsl_user_op
def zero_16_shared_bytes(pointer: cute.Pointer, *, loc=None, ip=None) -> None:
    """16 aligned bytes of shared memory to zero."""
    ptx(None, "st.shared.v4.b32 [$0], {0, 0, 0, 0};", "r", pointer.toint(loc=loc, ip=ip), loc=loc, ip=ip)
