"""Issue slots of the softmax and correction warps, from machine code: the Blackwell forward's or flash-attn-4's.

What a loop's pass issues is counted on its shortest way from the first instruction to the branch back: no barrier is
waited for, nothing is rescaled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.kernels.machine_code import Code, Loop, columns, kinds, opcode

from coflash.compiler import resources

BLOCK = 128  # rows and columns of a block of scores
WARPS = 4  # of a warpgroup: a row a thread


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
    """The usual passes of the softmax loop for whole blocks, for masked ones, and of the correction loop.

    Where masked blocks are no loop of their own there is no second; a correction loop votes and has no exponentials."""
    passes = [(loop, loop.usual()) for loop in code.loops()]
    softmax = sorted(
        (u for _, u in passes if kinds(u)["exponentials"] >= 32), key=lambda u: kinds(u)["masks"]
    )
    votes = [u for loop, u in passes if _corrects(loop, u)]
    return softmax[0], softmax[-1] if len(softmax) > 1 else (), votes[0] if votes else None


def _corrects(loop: Loop, usual: tuple[str, ...]) -> bool:
    rare = columns(loop.body, "STTM") > columns(usual, "STTM")
    return rare and not kinds(usual)["exponentials"] and any(opcode(i).startswith("VOTE.") for i in usual)


def announcements(softmax: tuple[str, ...]) -> list[tuple[int, int]]:
    """For each arrival behind a store of P: the slots of the pass before it, and the exponentials among them."""
    found = []
    for at, instruction in enumerate(softmax):
        if opcode(instruction).startswith("SYNCS.ARRIVE") and columns(softmax[:at], "STTM"):
            found.append((at, kinds(softmax[:at])["exponentials"]))
    return found
