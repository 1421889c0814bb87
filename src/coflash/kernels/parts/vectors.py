"""Arithmetic on all of a thread's registers at once.

Written element by element, the softmax of one block is a thousand operations, each of which Python builds and every
pass of the compiler visits.  On vectors it is twenty; the machine code is the same.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, math, nvvm, vector
from cutlass.cutlass_dsl import T

from coflash.kernels.parts import inline


class Vector:
    """Registers of one type, in order; `+`, `-`, `*` take another vector or one number for all."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value
        self.type = ir.VectorType(value.type)

    @property
    def size(self) -> int:
        return self.type.shape[0]

    def __add__(self, other: Vector | Float32) -> Vector:
        return Vector(arith.addf(self.value, self._match(other)))

    def __sub__(self, other: Vector | Float32) -> Vector:
        return Vector(arith.subf(self.value, self._match(other)))

    def __mul__(self, other: Vector | Float32) -> Vector:
        return Vector(arith.mulf(self.value, self._match(other)))

    def _match(self, other: Any) -> ir.Value:
        return other.value if isinstance(other, Vector) else vector.broadcast(self.type, _scalar(other))

    def take(self, places: list[int]) -> Vector:
        """The elements at these places."""
        return Vector(vector.shuffle(self.value, self.value, places))

    def bits_as(self, element: ir.Type) -> Vector:
        size = self.size * self.type.element_type.width // element.width
        return Vector(vector.bitcast(ir.VectorType.get([size], element), self.value))

    def __getitem__(self, place: int) -> ir.Value:
        return vector.extract(self.value, [], [place])

    def elements(self) -> list[ir.Value]:
        return [self[place] for place in range(self.size)]


def _scalar(x: Any) -> ir.Value:
    return x.ir_value() if hasattr(x, "ir_value") else Float32(x).ir_value()


# ---- to and from registers ----


def load(tensor: cute.Tensor) -> Vector:
    return Vector(tensor.load().ir_value())


def store(tensor: cute.Tensor, values: Vector) -> None:
    tensor.store(cute.TensorSSA(values.value, tensor.shape, tensor.element_type))


def gather(numbers: list[ir.Value]) -> Vector:
    """Numbers of one type, in order."""
    return Vector(vector.from_elements(ir.VectorType.get([len(numbers)], numbers[0].type), numbers))


# ---- a thread's two rows of an accumulator ----


def rows(values: Vector) -> list[Vector]:
    """Of registers in the order `4 i + 2 half + column`, those of each half."""
    return [values.take([i for i in range(values.size) if i // 2 % 2 == half]) for half in range(2)]


def join(halves: list[Vector]) -> Vector:
    """The two rows back in the order of the registers."""
    size = halves[0].size
    places = [i // 4 * 2 + i % 2 + i // 2 % 2 * size for i in range(2 * size)]
    return Vector(vector.shuffle(halves[0].value, halves[1].value, places))


def by_row(numbers: list[Float32], size: int) -> Vector:
    """A number for each of the two rows, once for each register of the row."""
    return gather([x.ir_value() for x in numbers]).take([i // 2 % 2 for i in range(size)])


# ---- element by element ----


def exp2(x: Vector) -> Vector:
    return Vector(math.exp2(x.value, fastmath=arith.FastMathFlags.fast))


def outside(columns: list[int], low: Int32 | None, high: Int32) -> ir.Value:
    """Which columns lie outside [low, high)."""
    kind = ir.VectorType.get([len(columns)], T.i32())
    number = [ir.IntegerAttr.get(T.i32(), column) for column in columns]
    at = arith.constant(kind, ir.DenseElementsAttr.get(number, kind))
    hidden = arith.cmpi(arith.CmpIPredicate.sge, at, vector.broadcast(kind, high.ir_value()))
    if low is not None:
        before = arith.cmpi(arith.CmpIPredicate.slt, at, vector.broadcast(kind, low.ir_value()))
        hidden = arith.ori(hidden, before)
    return hidden


def choose(condition: ir.Value, yes: Float32, no: Vector) -> Vector:
    return Vector(arith.select(condition, no._match(yes), no.value))


def pack(x: Vector, dtype: type[cutlass.Numeric]) -> list[Int32]:
    """Pairs of float32 rounded to `dtype`, each pair in one 32-bit register.

    As instructions of their own, which the compiler leaves where they are.  It would move a conversion of its own
    past the branch that follows, away from the exponentials it should stand between."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    text = f"cvt.rn.{kind}.f32 $0, $1, $2;"
    pairs = ((x[i + 1], x[i]) for i in range(0, x.size, 2))
    return [Int32(inline.ptx(T.i32(), text, "=r,f,f", *pair, pure=True)) for pair in pairs]


def words(registers: list[Int32]) -> Vector:
    return gather([word.ir_value() for word in registers])


def unpack_bf16(words: Vector) -> tuple[Vector, Vector]:
    """The low and the high bfloat16 of each register as float32, exactly."""
    bits = words.type

    def every(number: int) -> ir.Value:
        return arith.constant(bits, ir.DenseElementsAttr.get_splat(bits, ir.IntegerAttr.get(T.i32(), number)))

    low = Vector(arith.shli(words.value, every(16)))
    high = Vector(arith.andi(words.value, every(-65536)))
    return low.bits_as(T.f32()), high.bits_as(T.f32())


# ---- over all elements ----


def total(x: Vector) -> Float32:
    """The sum, added up in order."""
    zero = Float32(0.0).ir_value()
    return Float32(vector.reduction(T.f32(), vector.CombiningKind.ADD, x.value, acc=zero))


def row_sums(x: Vector) -> list[Float32]:
    """Of both rows, added up in the order of the registers."""
    sums = [Float32(0.0).ir_value()] * 2
    for i in range(x.size):
        sums[i // 2 % 2] = arith.addf(sums[i // 2 % 2], x[i])
    return [Float32(row) for row in sums]


def largest(x: Vector) -> Float32:
    """The largest, in two chains; NaN counts for nothing."""
    chains = [x[0], x[1]]
    for i in range(2, x.size):
        chains[i % 2] = nvvm.fmax(chains[i % 2], x[i])
    return Float32(nvvm.fmax(*chains))
