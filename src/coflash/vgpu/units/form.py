"""The static form of an instruction: its name taken apart into operation, modifiers and types."""

from __future__ import annotations

from typing import Any, NoReturn

from .formats import UnsupportedInstruction

TYPES = frozenset(
    """pred b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64 tf32 f16x2 bf16x2 f32x2 u16x2
    s16x2 e4m3x2 e5m2x2 e2m3x2 e3m2x2 e2m1x2 ue8m0x2 e4m3x4 e5m2x4 e2m3x4 e3m2x4 e2m1x4 s2f6x2""".split()
)


class Form:
    """Builders take the modifiers and types they understand; whatever is left over makes the form
    unsupported."""

    def __init__(self, mnemonic: str, packed: bool = False) -> None:
        self.mnemonic = mnemonic
        self.op, *rest = mnemonic.split(".")
        self.types = [t for t in rest if t in TYPES]
        self.modifiers = [m for m in rest if m not in TYPES]
        self._next = 0
        self.packed = packed  # one half of a packed instruction

    def fail(self, why: str = "") -> NoReturn:
        raise UnsupportedInstruction(f"{self.mnemonic}: {why or 'this form is not modelled'}")

    def take(self, modifier: str) -> bool:
        """Whether the modifier is there; it counts as understood."""
        if modifier in self.modifiers:
            self.modifiers.remove(modifier)
            return True
        return False

    def maybe(self, *choices: str) -> str | None:
        for choice in choices:
            if self.take(choice):
                return choice
        return None

    def one_of(self, *choices: str) -> str:
        found = self.maybe(*choices)
        if found is None:
            self.fail("needs one of ." + ", .".join(choices))
        return found

    def type(self, expected: str | None = None) -> str:
        """The next type."""
        if self._next >= len(self.types):
            self.fail("a type is missing")
        t = self.types[self._next]
        self._next += 1
        if expected is not None and t != expected:
            self.fail(f"type must be .{expected}")
        return t

    def finished(self, function: Any) -> Any:
        if self.modifiers or self._next != len(self.types):
            left = self.modifiers + self.types[self._next :]
            self.fail("not understood: ." + ", .".join(left))
        return function
