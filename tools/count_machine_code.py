"""Counts the machine code of the Blackwell forward beside flash-attn-4's, instruction by instruction.

    COFLASH_PEERS=<folder with flash-attn-4> PYTHONPATH=.:src python tools/count_machine_code.py

Needs nvdisasm (a CUDA toolkit's, or Triton's; NVDISASM names it). Both kernels are compiled by the same DSL for the
same problems; `tests/kernels/sm100/slots.py` says what is counted. Without flash-attn-4 only ours is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from tests.kernels.machine_code import KINDS
from tests.kernels.sm100.slots import counted

PROBLEMS = [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]


def ours(dim: int, causal: bool) -> bytes:
    from tests.kernels.sm100 import calls

    from coflash.kernels.sm100.config import choose

    config = choose("sm_100a", dtype="bf16", head_dim=dim, head_dim_v=dim, bounded_right=causal, lse=True)
    return calls.built(config).so.with_name("kernel.cubin").read_bytes()


def theirs(dim: int, causal: bool) -> bytes:
    from tests.vgpu.peers import cases

    case = cases.Case("sm_100a", dim, 512, 512, causal=causal)
    made = []
    cases.run(case, cases.inputs(case), made.append)
    return made[-1].cubin


def cell(values: list[float | int | str]) -> str:
    return " / ".join(f"{v:.0f}" if isinstance(v, float) else str(v) for v in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", action="store_true", help="ours alone")
    args = parser.parse_args()
    folder = os.environ.get("COFLASH_PEERS")
    if folder:
        sys.path.append(folder)
    alone = args.ours or importlib.util.find_spec("flash_attn") is None
    kernels = (ours,) if alone else (ours, theirs)
    table = [[counted(make(*problem)) for make in kernels] for problem in PROBLEMS]
    head = "ours" if alone else "ours / flash-attn-4"
    print(f"| {head} | " + " | ".join(f"d{d} {'causal' if c else 'full'}" for d, c in PROBLEMS) + " |")
    print("|---" * (len(PROBLEMS) + 1) + "|")
    rows = {
        "registers: at launch, after the split": lambda c: c.registers,
        "stack, bytes": lambda c: c.stack,
        "issue slots, softmax and correction": lambda c: float(sum(c.slots.values())),
        **{f"... {name}": lambda c, name=name: float(c.slots.get(name, 0)) for name in (*KINDS, "other")},
        "issue slots, masked block": lambda c: c.masked,
        "P announced at slot (exponentials before)": lambda c: c.announced,
    }
    for name, of in rows.items():
        print(f"| {name} | " + " | ".join(cell([of(c) for c in pair]) for pair in table) + " |")


if __name__ == "__main__":
    main()
