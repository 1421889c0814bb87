"""Faults applied mechanically to PTX text, each with the causes that a right report may name.

A cause is the name of a check (see coflash.vgpu.CHECKS), "deadlock", or "answer" where the faulty program
is a legal program that computes something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

ORDER = frozenset({"races", "uninitialised"})
"""Two accesses in no order: seen as a race, or as a read that came before the write."""
PHASES = ORDER | {"deadlock", "barriers"}
"""A barrier that completes at the wrong time, or never."""


@dataclass(frozen=True)
class Mutation:
    kind: str
    line: int  # of the original
    change: str
    ptx: str
    causes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.kind} at line {self.line}: {self.change}"


def _lines(ptx: str, pattern: str) -> Iterator[tuple[int, str]]:
    for i, line in enumerate(ptx.splitlines()):
        if re.search(pattern, line):
            yield i, line


def _replaced(ptx: str, i: int, new: Iterable[str]) -> str:
    lines = ptx.splitlines()
    lines[i : i + 1] = new
    return "\n".join(lines) + "\n"


def _edit(
    kind: str, ptx: str, pattern: str, causes: frozenset[str] | set[str], edit: Callable[[str], str | None]
) -> Iterator[Mutation]:
    """One mutation for each line that matches and that `edit` changes."""
    for i, line in _lines(ptx, pattern):
        new = edit(line)
        if new is not None and new != line:
            change = f"{line.strip()[:70]} -> {new.strip()[:70] or 'nothing'}"
            yield Mutation(kind, i + 1, change, _replaced(ptx, i, [new]), frozenset(causes))


def _drop(kind: str, ptx: str, pattern: str, causes: frozenset[str] | set[str]) -> Iterator[Mutation]:
    return _edit(kind, ptx, pattern, causes, lambda line: "")


def _substitute(pattern: str, new: str | Callable[[re.Match], str]) -> Callable[[str], str]:
    return lambda line: re.sub(pattern, new, line, count=1)


# ---- Families -------------------------------------------------------------------------------------------


def dropped_fences(ptx: str) -> Iterator[Mutation]:
    yield from _drop("drop a proxy fence", ptx, r"^\s*fence\.proxy\.async", {"races"})
    yield from _drop("drop a barrier-init fence", ptx, r"^\s*fence\.mbarrier_init", {"races", "barriers"})
    yield from _drop("drop a wgmma fence", ptx, r"^\s*wgmma\.fence", {"pending_registers", "races"})
    yield from _drop("drop a tcgen05 fence", ptx, r"^\s*tcgen05\.fence", {"tensor_fence"})


def dropped_waits(ptx: str) -> Iterator[Mutation]:
    yield from _drop("drop a wgmma wait", ptx, r"^\s*wgmma\.wait_group", {"pending_registers", *ORDER})
    yield from _drop("drop a bulk wait", ptx, r"^\s*cp\.async\.bulk\.wait_group", {"exit", "races"})
    yield from _drop("drop a tensor load wait", ptx, r"^\s*tcgen05\.wait::ld", {"tensor_load_wait", *ORDER})
    yield from _drop("drop a tensor store wait", ptx, r"^\s*tcgen05\.wait::st", ORDER)
    yield from _edit(
        "drop a barrier wait",
        ptx,
        r"^\s*mbarrier\.try_wait",
        PHASES | {"exit", "tensor_memory"},
        _substitute(r"mbarrier\.try_wait[\w.:]*\s+(%\w+).*", r"setp.eq.u32 \1, 0, 0;"),
    )


def dropped_commits(ptx: str) -> Iterator[Mutation]:
    yield from _drop("drop a wgmma commit", ptx, r"^\s*wgmma\.commit", {"pending_registers", *ORDER})
    yield from _drop("drop a bulk commit", ptx, r"^\s*cp\.async\.bulk\.commit", {"exit", "races"})
    yield from _drop("drop a tcgen05 commit", ptx, r"^\s*tcgen05\.commit", {"deadlock"})


def dropped_arrivals(ptx: str) -> Iterator[Mutation]:
    yield from _drop("drop an arrival", ptx, r"^\s*mbarrier\.arrive(?!\.expect)", {"deadlock"})
    yield from _drop(
        "drop an expecting arrival", ptx, r"^\s*mbarrier\.arrive\.expect_tx", {"deadlock", "barriers"}
    )
    yield from _drop("drop an initialisation", ptx, r"^\s*mbarrier\.init", {"barriers", "deadlock"})
    yield from _drop("drop a copy in", ptx, r"^\s*cp\.async\.bulk\.tensor.*complete_tx", {"deadlock"})
    yield from _drop("drop a copy out", ptx, r"^\s*cp\.async\.bulk\.tensor.*bulk_group", {"answer"})
    yield from _drop(
        "drop a CTA barrier", ptx, r"^\s*(bar|barrier)\.sync", PHASES | {"tensor_memory", "bounds"}
    )
    yield from _drop("drop a cluster arrival", ptx, r"^\s*barrier\.cluster\.arrive", {"deadlock", "barriers"})
    yield from _drop("drop a cluster wait", ptx, r"^\s*barrier\.cluster\.wait", PHASES | {"exit", "bounds"})


def wrong_numbers(ptx: str) -> Iterator[Mutation]:
    def parity(line: str) -> str | None:
        """Immediate parities flip; for one in a register see `wrong_parities`."""
        return re.sub(r", ([01]);", lambda m: f", {1 - int(m[1])};", line, count=1)

    yield from _edit(
        "wrong parity", ptx, r"mbarrier\.try_wait.*, [01];", PHASES | {"exit", "tensor_memory"}, parity
    )
    for change, text in ((1, "one more"), (-1, "one less")):

        def count(line: str, change: int = change) -> str | None:
            old = int(re.search(r", (\d+);", line)[1])
            return None if old + change < 1 else line.replace(f", {old};", f", {old + change};")

        causes = {"deadlock"} if change > 0 else PHASES
        yield from _edit(f"arrival count {text}", ptx, r"mbarrier\.init", causes, count)
    for change in (16, -16):
        yield from _edit(
            f"transaction count {change:+}",
            ptx,
            r"arrive\.expect_tx",
            {"deadlock", "barriers", *ORDER},
            _substitute(r", (\d+);", lambda m, change=change: f", {int(m[1]) + change};"),
        )


def wrong_parities(ptx: str) -> Iterator[Mutation]:
    for i, line in _lines(ptx, r"mbarrier\.try_wait.*, %\w+;"):
        register = re.search(r", (%\w+);", line)[1]
        flipped = [f"  {{ .reg .b32 %flip; xor.b32 %flip, {register}, 1;"]
        flipped.append(line.replace(f", {register};", ", %flip; }"))
        yield Mutation("wrong parity", i + 1, line.strip()[:70], _replaced(ptx, i, flipped), PHASES)


def swapped_barriers(ptx: str) -> Iterator[Mutation]:
    """Exchange the barriers of two waits, or of two signals, that name different ones."""
    for kind, pattern in (("waits", r"mbarrier\.try_wait"), ("commits", r"tcgen05\.commit")):
        found = list(_lines(ptx, pattern))
        for (i, first), (j, second) in zip(found, found[1:], strict=False):
            one, two = (re.search(r"\[(%\w+)\]", line)[1] for line in (first, second))
            if one == two or j - i < 6:  # the same barrier, or one wait right after the other: no fault
                continue
            text = _replaced(ptx, i, [first.replace(one, two)])
            text = _replaced(text, j, [second.replace(two, one)])
            change = f"{one} and {two} (line {j + 1})"
            yield Mutation(f"swap the barriers of two {kind}", i + 1, change, text, PHASES | {"answer"})


def wrong_stages(ptx: str) -> Iterator[Mutation]:
    """An address computed for the other stage of the ring, or the ring's place beside its own."""
    for i, line in _lines(ptx, r"shl\.b32 (%\w+), %stage, (\d+);"):
        target, shift = re.search(r"shl\.b32 (%\w+), %stage, (\d+);", line).groups()
        new = [f"  xor.b32 {target}, %stage, 1;", f"  shl.b32 {target}, {target}, {shift};"]
        what = "barriers" if shift == "3" else "tiles"
        yield Mutation(
            f"off by one stage ({what})", i + 1, line.strip(), _replaced(ptx, i, new), PHASES | {"answer"}
        )


def wrong_descriptors(ptx: str) -> Iterator[Mutation]:
    causes = {"descriptors", "answer", "bounds", *ORDER}
    for bit, what in (
        (62, "swizzle bits"),
        (63, "swizzle bits"),
        (37, "descriptor stride"),
        (38, "descriptor stride"),
    ):

        def flip(line: str, bit: int = bit) -> str:
            return re.sub(r"0x[0-9A-Fa-f]{16}", lambda m: f"0x{int(m[0], 16) ^ 1 << bit:016X}", line)

        yield from _edit(f"wrong {what}", ptx, r"mov\.b64 %fixed", causes, flip)
    for bit, what in ((4, "accumulator type"), (10, "operand type"), (17, "N"), (27, "M")):

        def field(line: str, bit: int = bit) -> str:
            return re.sub(r"0x[0-9A-Fa-f]+", lambda m: f"0x{int(m[0], 16) ^ 1 << bit:x}", line)

        yield from _edit(
            f"wrong {what} in the instruction descriptor",
            ptx,
            r"mov\.u32 %idesc",
            causes | {"tensor_memory"},
            field,
        )


def wrong_tensor_memory(ptx: str) -> Iterator[Mutation]:
    causes = {"answer", "tensor_memory", *ORDER}
    for shift in (8, 32):
        yield from _edit(
            f"tensor memory column {shift} further",
            ptx,
            r"tcgen05\.(ld|st).*\[%tmem_row\+\d+\]",
            causes,
            _substitute(r"\[%tmem_row\+(\d+)\]", lambda m, s=shift: f"[%tmem_row+{int(m[1]) + s}]"),
        )
    yield from _edit(
        "product's tensor memory further",
        ptx,
        r"add\.u32 %tmem_[po], %tmem, \d+;",
        causes,
        _substitute(r", (\d+);", lambda m: f", {int(m[1]) + 32};"),
    )
    yield from _drop("no deallocation", ptx, r"tcgen05\.dealloc", {"tensor_memory"})
    yield from _edit(
        "half the deallocation", ptx, r"tcgen05\.dealloc", {"tensor_memory"}, _substitute(r"256", "128")
    )
    yield from _edit(
        "half the allocation",
        ptx,
        r"tcgen05\.alloc",
        {"tensor_memory"},
        _substitute(r", 256;", ", 128;"),
    )
    for i, _ in _lines(ptx, r"^\s*barrier\.sync 0;"):
        lines = ptx.splitlines()
        end = next((j for j in range(i, len(lines)) if "tcgen05.dealloc" in lines[j]), None)
        if end is None:
            continue
        # The block that gives tensor memory back, before the barrier that waits for its last reader.
        moved = [line for line in lines[i + 1 : end + 1]]
        guard = "".join(re.findall(r"bra (\w+);", " ".join(moved)))
        moved = [line.replace(f"bra {guard};", "bra kept;") for line in moved] + ["kept:", lines[i]]
        text = "\n".join(lines[:i] + moved + lines[end + 1 :]) + "\n"
        yield Mutation("early deallocation", i + 1, "before the last barrier", text, frozenset(causes))


def wrong_spaces(ptx: str) -> Iterator[Mutation]:
    """The address of a parameter used as a generic one: an H200 stops with a misaligned address."""
    yield from _drop("parameter address not made generic", ptx, r"^\s*cvta\.param", {"bounds"})


def overlapping_memory(ptx: str) -> Iterator[Mutation]:
    """A tile of shared memory placed over part of its neighbour."""
    causes = {"answer", "deadlock", "barriers", "exit", *ORDER}
    yield from _edit(
        "shared memory overlap",
        ptx,
        r"add\.u32 %[ab], %(smem|a|b), \d+;",
        causes,
        _substitute(r", (\d+);", lambda m: f", {int(m[1]) - 4096};"),
    )


def wrong_cluster(ptx: str) -> Iterator[Mutation]:
    yield from _edit("multicast to one CTA", ptx, r"mov\.b16 %both, 3", {"deadlock"}, _substitute("3", "1"))
    yield from _edit(
        "remote arrival at itself",
        ptx,
        r"mapa\.",
        PHASES,
        _substitute(r"%peer;", "%rank;"),
    )
    yield from _edit(
        "multicast slice of the other CTA",
        ptx,
        r"shl\.b32 %y, %rank, 12",
        {"answer", *ORDER},
        _substitute("12", "11"),
    )


FAMILIES: tuple[Callable[[str], Iterator[Mutation]], ...] = (
    dropped_fences,
    dropped_waits,
    dropped_commits,
    dropped_arrivals,
    wrong_numbers,
    wrong_parities,
    swapped_barriers,
    wrong_stages,
    wrong_descriptors,
    wrong_tensor_memory,
    wrong_spaces,
    overlapping_memory,
    wrong_cluster,
)


def mutations(ptx: str) -> list[Mutation]:
    return [mutation for family in FAMILIES for mutation in family(ptx)]
