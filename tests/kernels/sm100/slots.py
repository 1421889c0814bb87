"""Issue slots of the softmax and correction warps, from machine code: the Blackwell forward's or flash-attn-4's.

What a block costs is counted on the shortest way through a loop that does one: no barrier is waited for, nothing is
rescaled or done again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.kernels.machine_code import Code, columns, kinds, opcode

from coflash.compiler import resources

BLOCK = 128  # rows and columns of a block of scores
WARPS = 4  # of a warpgroup: a row a thread
EXPONENTIALS = 48  # a way with as many, that stores P, does a block, or a thread's half of its columns


@dataclass
class Counted:
    """One kernel; slots are for all warps that work on a block of 128 x 128 scores."""

    registers: str
    stack: int
    slots: dict[str, float] = field(default_factory=dict)  # by kind: softmax and correction, unmasked
    masked: str = "-"  # where masked blocks are no loop of their own
    announced: str = ""


def counted(cubin: bytes) -> Counted:
    code = Code.read(cubin)
    (used,) = resources.read(cubin)
    split = {int(i.split()[-1], 16) for i in code.instructions if opcode(i).startswith("USETMAXREG")}
    after = " ".join(map(str, sorted(split, reverse=True)))
    result = Counted(f"{used.registers}: {after}", used.stack_bytes)
    softmax, masked, correction = roles(code)
    warps = WARPS * BLOCK // columns(softmax, "LDTM")
    for name, count in kinds(softmax).items():
        result.slots[name] = warps * count
    if masked:
        result.masked = str(warps * len(masked))
    result.announced = " ".join(f"{at} ({mufu})" for at, mufu in announcements(softmax))
    if correction is not None:
        tiles = sum(opcode(i).startswith("VOTE.") for i in correction)
        if masked:
            result.masked = str(warps * len(masked) + WARPS * len(correction) // tiles)
        for name, count in kinds(correction).items():
            result.slots[name] = result.slots.get(name, 0) + WARPS * count / tiles
    return result


def roles(code: Code) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...] | None]:
    """The shortest passes over a block in the softmax loop: seen whole, and masked; and in the correction loop.

    The second is empty where masked blocks are done in no loop; a correction loop votes and has no exponentials."""
    whole: list[tuple[str, ...]] = []
    masked: list[tuple[str, ...]] = []
    for loop in code.loops(lambda loop: _exponentials(loop.body) and columns(loop.body, "STTM") > 0):
        for usual in loop.passes():
            if _exponentials(usual) and columns(usual, "STTM"):
                (masked if kinds(usual)["masks"] >= EXPONENTIALS else whole).append(usual)
    correction = [
        usual
        for loop in code.loops(lambda loop: _votes(loop.body) and columns(loop.body, "STTM") > 0)
        if not kinds(loop.body)["exponentials"]
        for usual in loop.passes()
        if _votes(usual)
    ]
    return min(whole, key=len), min(masked, key=len, default=()), min(correction, key=len, default=None)


def _exponentials(instructions: tuple[str, ...]) -> bool:
    return kinds(instructions)["exponentials"] >= EXPONENTIALS


def _votes(instructions: tuple[str, ...]) -> bool:
    return any(opcode(i).startswith("VOTE.") for i in instructions)


def announcements(softmax: tuple[str, ...]) -> list[tuple[int, int]]:
    """For each arrival behind a store of P: the slots of the pass before it, and the exponentials among them."""
    found = []
    for at, instruction in enumerate(softmax):
        if opcode(instruction).startswith("SYNCS.ARRIVE") and columns(softmax[:at], "STTM"):
            found.append((at, kinds(softmax[:at])["exponentials"]))
    return found
