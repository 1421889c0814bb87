"""Arithmetic of the scalar, packed and tensor-core instructions, on raw register values.

Register convention (both for operands and results): a NumPy array over lanes of an unsigned type as wide as the PTX
type: uint16 for 16-bit (and 8-bit) types, uint32 for 32-bit types and packed pairs (f16x2, bf16x2), uint64 for 64-bit
types and f32x2; bool for predicates. Operands may have any shapes that broadcast (an immediate is a NumPy scalar such as
`np.uint32(0x3f800000)`); an operand of a wider register type must be narrowed by the caller.
Callers run inside `np.errstate(all="ignore")`: entering it costs more than an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class UnsupportedInstruction(ValueError):
    """An instruction form that is not modelled, or not valid PTX; the message names the form."""


def resolve(mnemonic: str, dual: bool = False) -> Callable[..., Any]:
    """The function of a computing instruction, by its full name without operands: `resolve("fma.rn.ftz.f32")(a, b, c)`.

    Covers add sub mul mad fma div rem sqrt rcp rsqrt neg abs min max (3-input too) copysign testp sin cos lg2 ex2 tanh; cvt, cvt.pack;
    and or xor not cnot lop3 (immediate passed as the last operand) shl shr shf prmt bfe bfi bfind brev popc clz fns szext
    bmsk sad dp4a dp2a mul24 mad24 (add/sub/mad).cc and addc/subc/madc; set setp selp slct.
    - `mad.lo.cc`, `add.cc`, `sub.cc` return (result, carry); addc, subc, madc take the carry (bool) as their last operand, and
      with `.cc` return (result, carry).
    - setp returns the predicate p; with `dual=True` (the form `p|q`) it returns (p, q). With a boolean operator
      (`setp.lt.and.f32`) the function takes the source predicate as its third operand.
    - selp(a, b, p), slct(a, b, c).
    - cvt from two registers (`cvt.rn.bf16x2.f32 d, a, b`): fn(a, b) puts a in the upper half, as in PTX.
    - min/max with `|p`-less forms only. Packed types work on the packed register.
    Raises UnsupportedInstruction for what it does not know. Cached: call it at decode time or at run time.
    """
    raise UnsupportedInstruction(mnemonic)


def to_float32(raw: NDArray[Any], type_: str) -> NDArray[np.float32]:
    """Exact float32 values of tensor-core elements: raw is unsigned, one element each (uint8 for 8-bit and smaller types).

    type_: f16 bf16 tf32 f32 e4m3 e5m2 e2m3 e3m2 e2m1 ue8m0 s8 u8. A tf32 element is a 32-bit word whose low 13 bits are ignored.
    """
    raise NotImplementedError


def from_float32(values: NDArray[np.float32], type_: str) -> NDArray[Any]:
    """Round to nearest even to f16, bf16 or f32 and return the raw bits (how accumulators are stored)."""
    raise NotImplementedError


def mma(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None, kind: str, d_type: str = "f32") -> NDArray[Any]:
    """D = A Bᵀ + C of the tensor cores. a: (M, K), b: (N, K) values from `to_float32` (float32), c: (M, N) float32 or None for zero;
    returns (M, N) float32, already rounded to f16 where d_type is "f16". kind "i8": a, b, c integer-valued, result int32.
    """
    raise NotImplementedError
