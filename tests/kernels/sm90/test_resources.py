"""The machine code of the kernels that planning chooses, by the assembler's own report: no GPU needed."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.kernels.machine_code import encoded

pytest.importorskip("cutlass")

from coflash.compiler import compile_to  # noqa: E402
from coflash.kernels.sm90.config import ForwardConfig  # noqa: E402
from coflash.planning.choices import SM90_FORWARD  # noqa: E402

ROWS = [
    pytest.param(row, masked)
    for row in SM90_FORWARD
    for masked in ((False, True) if row.masked is None else (row.masked,))
]


def check(config: ForwardConfig, folder: Path) -> None:
    compiled = compile_to(folder, "sm90.forward", config, "sm_90a")
    (entry,) = compiled.resources
    assert (entry.stack_bytes, entry.spill_stores, entry.spill_loads) == (0, 0, 0)
    assert entry.registers == config.entry_registers, "the split counts on what a block holds at launch"
    ptx = compiled.ptx.read_text()
    load, compute = config.registers
    assert f"setmaxnreg.dec.sync.aligned.u32 {load};" in _squeezed(ptx)
    assert f"setmaxnreg.inc.sync.aligned.u32 {compute};" in _squeezed(ptx)
    # S = Q K^T: the first block, each of the loops, and the narrow exact way; O += P V: the same and the last block.
    loops = 1 + config.bounded_right + config.bounded_left
    exact = int(config.softmax == "held")
    expected: Counter[int] = Counter()
    expected[config.tile_n] += (1 + loops) * (config.tile_d // 16)
    expected[config.exact_n] += exact * (config.tile_d // 16)
    expected[config.tile_d_v] += (loops + 1) * (config.tile_n // 16) + exact * (config.exact_n // 16)
    found = Counter(int(n) for n in re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", ptx))
    assert found == +expected
    assert all(line.startswith("multiply(") for line in _issuing_lines(ptx))
    if config.softmax == "held" and not config.softcap:
        check_operands(compiled.cubin.read_bytes())


def check_operands(cubin: bytes) -> None:
    """A score becomes an exponent by score * scale - reference. References of a thread's two rows must lie in
    adjacent registers, which two banks hold: else the operand cache serves scale alone.

    An instruction is 16 bytes. 0x223 in the lowest 12 bits multiplies and adds registers, 0xC23 with the second
    factor in a uniform register; the third operand is in bits 64 to 71, bit 75 negates it, bits 122 to 124 say which
    operands are kept for the next instruction."""
    low, high = encoded(cubin)
    kind = low & 0xFFF
    chosen = ((kind == 0x223) | (kind == 0xC23)) & (high >> np.uint64(11) & 1 == 1)
    high, uniform = high[chosen], kind[chosen] == 0xC23
    subtracted = Counter((high & 0xFF).tolist())
    (one, times), (other, as_often) = subtracted.most_common(2)
    assert times == as_often and one ^ other == 1, subtracted
    kept = sum((high >> np.uint64(58 + operand)) & 1 for operand in range(3))
    assert (kept + uniform >= 2).mean() > 0.3  # all but those of blocks with masks, whose order is another


def _issuing_lines(ptx: str) -> Iterator[str]:
    """The source lines that matrix instructions are said to be from."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    line = ""
    for statement in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", statement):
            line = linecache.getline(files[place[1]], int(place[2])).strip()
        elif "wgmma.mma_async" in statement:
            yield line


def _squeezed(ptx: str) -> str:
    return re.sub(r"\s+", " ", ptx)


def _config(row, masked: bool) -> ForwardConfig:
    return ForwardConfig(
        dtype="bf16",
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        bounded_right=masked,
        lse=True,
        **row.fields,
    )


def test_head_dim_128_causal(tmp_path: Path) -> None:
    row = next(row for row in SM90_FORWARD if row.head_dim == 128 and row.masked in (None, True))
    check(_config(row, True), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row, masked", ROWS)
def test_every_choice(row, masked: bool, tmp_path: Path) -> None:
    check(_config(row, masked), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        {"packed_q": True, "packed_k": True, "bounded_right": True},
        {"bounded_left": True, "bounded_right": True, "sink": True},
        {"softcap": True},
        {"seqused_q": True, "seqused_k": True},
        {"pack_heads": 8, "bounded_right": True},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("row", SM90_FORWARD)
def test_every_choice_with_features(row, features: dict, tmp_path: Path) -> None:
    fields = {**row.fields, **features}
    if "softcap" in features:
        fields.pop("v_ahead", None)  # as planning does
    check(
        ForwardConfig(dtype="bf16", head_dim=row.head_dim, head_dim_v=row.head_dim_v, lse=True, **fields),
        tmp_path,
    )
