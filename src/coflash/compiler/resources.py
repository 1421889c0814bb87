"""What the assembler says a kernel uses: registers, stack, spills, shared memory, barriers.

Two sources are read together: the machine code itself (its ELF sections), which can't be wrong about
registers, stack and static shared memory, and the assembler's log, the only place that counts spills.
"""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Resources:
    """One kernel entry's resources, per thread unless said otherwise."""

    symbol: str
    registers: int  # at launch; a kernel that reallocates registers starts with these
    stack_bytes: int
    spill_stores: int | None  # bytes; None: some of the stack, but the log that says how much isn't at hand
    spill_loads: int | None
    static_shared_bytes: int  # per block; dynamic shared memory is the launch's
    barriers: int | None  # named barriers in use, per block
    threads: int | None  # threads a block must have, where the kernel says so
    losses: (
        tuple[str, ...] | None
    )  # what the assembler says costs speed, serialised wgmma for one; None: no log

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(cubin: bytes, log: str = "") -> tuple[Resources, ...]:
    """Resources of every kernel entry in a cubin, in its own order."""
    log = " ".join(log.split())  # where there are spills the DSL wraps the log for reading
    sections = _sections(cubin)
    symbols = _symbols(sections)
    stack: dict[str, int] = {}
    registers: dict[str, int] = {}
    for attribute, value in _attributes(sections.get(".nv.info", _NONE).data):
        if attribute in (_MIN_STACK_SIZE, _FRAME_SIZE):
            index, size = struct.unpack("<II", value)
            stack[symbols[index]] = max(size, stack.get(symbols[index], 0))
        elif attribute == _REGISTER_COUNT:
            index, count = struct.unpack("<II", value)
            registers[symbols[index]] = count
    found = []
    for name, section in sections.items():
        if not name.startswith(".nv.info."):
            continue
        symbol = name.removeprefix(".nv.info.")
        if ".text." + symbol not in sections:
            continue
        threads = None
        for attribute, value in _attributes(section.data):
            if attribute == _REQUIRED_THREADS:
                x, y, z = struct.unpack("<III", value[:12])
                threads = x * y * z
        frame = stack.get(symbol, 0)
        spills = (0, 0) if frame == 0 else _spills(log, symbol)  # what is spilled is spilled to the stack
        shared = sections.get(".nv.shared." + symbol)
        barriers = re.search(rf"entry function '{re.escape(symbol)}'.*?used (\d+) barriers", log)
        found.append(
            Resources(
                symbol=symbol,
                registers=registers[symbol],
                stack_bytes=frame,
                spill_stores=spills[0] if spills else None,
                spill_loads=spills[1] if spills else None,
                static_shared_bytes=shared.size if shared else 0,
                barriers=int(barriers.group(1)) if barriers else None,
                threads=threads,
                losses=_losses(log, symbol) if log else None,
            )
        )
    if not found:
        raise ValueError("no kernel in this machine code")
    return tuple(found)


def _spills(log: str, symbol: str) -> tuple[int, int] | None:
    match = re.search(
        rf"Function properties for {re.escape(symbol)} .*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
    )
    return (int(match.group(1)), int(match.group(2))) if match else None


def _losses(log: str, symbol: str) -> tuple[str, ...]:
    """The assembler's performance warnings that name a kernel, each once."""
    found = re.findall(r"\(C\d+\) Potential Performance Loss: .*?(?= ptxas |$)", log)
    return tuple(dict.fromkeys(text for text in found if symbol in text))


# Attribute numbers of .nv.info (EIATTR_*), as readelf-like tools print them.
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_REGISTER_COUNT = 0x2F


@dataclass(frozen=True)
class _Section:
    data: bytes
    size: int


_NONE = _Section(b"", 0)


def _sections(elf: bytes) -> dict[str, _Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    sections = {}
    for name, kind, _, _, start, size, _, _, _, _ in headers:
        end = elf.index(b"\0", names_offset + name)
        data = b"" if kind == 8 else elf[start : start + size]  # 8: NOBITS, takes no space in the file
        sections[elf[names_offset + name : end].decode()] = _Section(data, size)
    return sections


def _symbols(sections: dict[str, _Section]) -> list[str]:
    strings = sections[".strtab"].data
    table = sections[".symtab"].data
    names = []
    for at in range(0, len(table), 24):
        (name,) = struct.unpack_from("<I", table, at)
        names.append(strings[name : strings.index(b"\0", name)].decode())
    return names


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """The (attribute, value) pairs of one .nv.info section; short forms carry their value in the header."""
    found, at = [], 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # EIFMT_SVAL: size bytes follow
            found.append((attribute, data[at : at + size]))
            at += size
        else:
            found.append((attribute, struct.pack("<H", size)))
    return found
