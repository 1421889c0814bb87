"""What the assembler made of the Blackwell forward: pair-mode products, and the loops' issue slots.

`tools/count_machine_code.py` counts flash-attn-4 in the same way; docs/kernels/sm100-forward.md has both.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.kernels.machine_code import Code, disassembler, encoded, opcode

pytest.importorskip("cutlass")

from tests.kernels.sm100.calls import built  # noqa: E402
from tests.kernels.sm100.slots import counted, roles  # noqa: E402

from coflash.kernels.sm100.config import choose  # noqa: E402

needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="no nvdisasm")
PROBLEMS = {
    f"d{dim} {mask}": {"head_dim": dim, "head_dim_v": dim, "bounded_right": mask == "causal"}
    for dim in (64, 128, 256)
    for mask in ("full", "causal")
}
# flash-attn-4 4.0.0b36: issue slots of its softmax and correction warps for a block of 128 x 128 scores.
PEER = dict(zip(PROBLEMS, (2102, 2102, 2210, 2096, 2356, 2368), strict=True))


def machine_code(**features) -> tuple[bytes, str]:
    entry = built(choose("sm_100a", dtype="bf16", lse=True, **features))
    return entry.so.with_name("kernel.cubin").read_bytes(), entry.ptx.read_text()


def products(cubin: bytes) -> Counter[bool]:
    """How many tensor-core products there are, by whether two CTAs issue them together.

    An instruction is 16 bytes. Its lowest 9 bits are 0x1ea in a 16-bit tcgen05 product (the 3 above say where its
    operands are), and bit 85 is what the disassembler prints as .2CTA."""
    low, high = encoded(cubin)
    return Counter((high[low & 0x1FF == 0x1EA] >> np.uint64(21) & 1 == 1).tolist())


@pytest.mark.parametrize("dim, ctas", [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_a_pair_issues_every_product_in_pair_mode(dim: int, ctas: int) -> None:
    cubin, ptx = machine_code(head_dim=dim, head_dim_v=dim, ctas=ctas)
    assert products(cubin) == Counter({ctas == 2: ptx.count("tcgen05.mma.cta_group")})


@needs_disassembler
@pytest.mark.parametrize("ctas", [1, 2])
def test_the_disassembler_reads_the_same_products(ctas: int) -> None:
    cubin, _ = machine_code(head_dim=128, head_dim_v=128, ctas=ctas)
    named = Counter(map(opcode, Code.read(cubin).instructions))
    assert products(cubin) == Counter({False: named["UTCHMMA"], True: named["UTCHMMA.2CTA"]})


@needs_disassembler
@pytest.mark.parametrize("problem", PROBLEMS)
def test_no_more_issue_slots_than_flash_attn_4(problem: str) -> None:
    cubin, _ = machine_code(**PROBLEMS[problem])
    assert sum(counted(cubin).slots.values()) <= PEER[problem]


@needs_disassembler
@pytest.mark.parametrize("problem", ["d128 full", "d256 full"])
def test_pairs_wait_for_no_memory_in_the_loops(problem: str) -> None:
    """An arrival that releases to the cluster would be a fence for all of memory, a wait that acquires from it would
    empty the L1 cache: tcgen05 fences order what goes through tensor memory, relaxed barriers do for the rest."""
    cubin, _ = machine_code(**PROBLEMS[problem])
    code = Code.read(cubin)
    softmax, masked, _ = roles(code)
    issuing = [loop.body for loop in code.loops(lambda loop: "UTCHMMA.2CTA" in map(opcode, loop.body))]
    assert len(issuing) == 1
    for instructions in (softmax, masked, *issuing):
        assert not {"MEMBAR", "ERRBAR", "CCTL"} & {opcode(i).split(".")[0] for i in instructions}
