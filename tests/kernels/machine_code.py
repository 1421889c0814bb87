"""The assembler's result, read by NVIDIA's disassembler: instructions, loops, and what a loop's usual pass issues."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coflash.compiler import resources

#: First words of instructions -> kind. What is in none of them is "other".
KINDS = {
    "exponentials": "MUFU",
    "packed multiply-adds": "FFMA2 FADD2 FMUL2",
    "single multiply-adds": "FFMA FADD FMUL",
    "maxima, clamps": "FMNMX FMNMX3",
    "conversions": "F2FP",
    "masks": "FSEL ISETP R2P",
    "integer": "LEA IMAD IADD3 VIADD VIADDMNMX SHF LOP3",
    "moves": "MOV IMAD.MOV IMAD.U32 HFMA2 R2UR UMOV NOP",
    "tensor memory": "LDTM STTM FENCE",
    "barriers": "SYNCS BAR MEMBAR ERRBAR CGAERRBAR CCTL ELECT VOTE VOTEU WARPSYNC",
}
MOST_PASSES = 4096
_KIND = {word: kind for kind, words in KINDS.items() for word in words.split()}


def disassembler() -> str | None:
    """nvdisasm: $NVDISASM, on PATH, of a CUDA toolkit, or the one that Triton brings along."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    for name in (os.environ.get("NVDISASM"), "nvdisasm", *(str(folder / "nvdisasm") for folder in folders)):
        if name and (found := shutil.which(name)):
            return found
    return None


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in their order; labels are positions in it."""

    instructions: tuple[str, ...]
    labels: dict[str, int]

    @classmethod
    def read(cls, cubin: bytes) -> Code:
        tool = disassembler()
        if tool is None:
            raise FileNotFoundError("no nvdisasm: not on PATH, in CUDA_HOME, in Triton; set NVDISASM")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout
        instructions, labels = [], {}
        for line in text.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                instructions.append(instruction[1])
        return cls(tuple(instructions), labels)

    def target(self, at: int) -> int | None:
        """Where the branch at this position goes; None for what is no branch."""
        found = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", self.instructions[at])
        return self.labels[found[1]] if found else None

    def conditional(self, at: int) -> bool:
        return bool(re.match(r"@|BRA\.U ", self.instructions[at]))

    def loops(self, wanted: Callable[[Loop], bool] = lambda loop: True) -> list[Loop]:
        """The innermost of the loops that are wanted. A loop ends in a conditional branch back; the other backward
        branches return from the code behind the kernel's end that repeats a failed wait."""
        found = [
            loop
            for at in range(len(self.instructions))
            if (first := self.target(at)) is not None and first <= at and self.conditional(at)
            if wanted(loop := Loop(self, first, at))
        ]
        return [
            loop
            for loop in found
            if not any(
                other != loop and loop.first <= other.first and other.last <= loop.last for other in found
            )
        ]


@dataclass(frozen=True)
class Loop:
    """A loop from its first instruction to the branch back."""

    code: Code
    first: int
    last: int

    @property
    def body(self) -> tuple[str, ...]:
        return self.code.instructions[self.first : self.last + 1]

    def passes(self) -> list[tuple[str, ...]]:
        """Every way from the first instruction to the branch back that takes no other branch back, the shortest first.

        A wait that fails leaves the loop's body, so on each way barriers are not waited for."""
        found = []
        open_ways: list[tuple[int, list[str]]] = [(self.first, [])]
        while open_ways:
            at, way = open_ways.pop()
            if len(found) + len(open_ways) > MOST_PASSES:
                raise ValueError(f"a loop of {len(self.body)} instructions has too many branches")
            while at < self.last:
                target, instruction = self.code.target(at), self.code.instructions[at]
                way.append(instruction)
                if target is None:
                    at += 1
                    continue
                inside = at < target <= self.last
                if self.code.conditional(at):
                    if inside:
                        open_ways.append((target, list(way)))
                    at += 1
                elif inside:
                    at = target
                else:
                    break
            else:
                found.append((*way, self.code.instructions[self.last]))
        return sorted(found, key=len)


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0]


def kind(instruction: str) -> str:
    words = opcode(instruction).split(".")
    return _KIND.get(".".join(words[:2])) or _KIND.get(words[0], "other")


def kinds(instructions: tuple[str, ...]) -> Counter[str]:
    return Counter(map(kind, instructions))


def columns(instructions: tuple[str, ...], word: str) -> int:
    """Columns of tensor memory that instructions of this name move (LDTM, STTM)."""
    found = (re.match(rf"{word}\.x(\d+)$", opcode(i)) for i in instructions)
    return sum(int(match[1]) for match in found if match)


def encoded(cubin: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The instructions of the one kernel in it, 16 bytes each, as their low and their high 64 bits."""
    ((_, text),) = [(n, s) for n, s in resources._sections(cubin).items() if n.startswith(".text.")]
    low, high = np.frombuffer(text.data, "<u8").reshape(-1, 2).T
    return low, high
