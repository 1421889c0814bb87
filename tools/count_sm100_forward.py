"""Counts the work of the Blackwell forward beside flash-attn-4's, on the virtual GPU, per warp role and key block.

    COFLASH_PEERS=<folder with flash-attn-4> PYTHONPATH=.:src python tools/count_sm100_forward.py

Both kernels run the same call at two key lengths; the difference, divided by the blocks of 128 x 128 scores that the
longer one has more, is what a block costs.  What is left of the shorter call is what a work item costs once.
Prints one Markdown table for each head dimension and mask; nothing here is a measurement of time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import defaultdict

UNITS = {
    "issue": "issue slots",
    "exp2": "exponentials",
    "fma": "FMA",
    "alu": "ALU",
    "tensor_read_bytes": "tensor memory read, B",
    "tensor_write_bytes": "tensor memory written, B",
    "shared_read_bytes": "shared memory read, B",
    "shared_write_bytes": "shared memory written, B",
    "barriers": "barrier operations",
}
#: warps -> role, in both kernels
ROLES = {
    "softmax": range(0, 8),
    "correction, epilogue": range(8, 12),
    "MMA": (12,),
    "load, others": (13, 14, 15),
}


def by_role(counters: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The report's counters per range of warps, gathered into roles. A thread's operation counts as 1/32."""
    roles: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, units in counters.items():
        group = re.match(r"warps? (\d+)", name)
        if group is None:
            continue
        role = next(role for role, warps in ROLES.items() if int(group[1]) in warps)
        for unit, amount in units.items():
            roles[role][unit] += amount
        roles[role]["issue"] += units.get("instructions", 0) - units.get("move", 0) / 32
    return roles


def theirs(dim: int, causal: bool, seqlen_q: int, seqlen_k: int) -> dict[str, dict[str, float]]:
    from tests.vgpu.peers import cases

    from coflash.vgpu import Machine

    case = cases.Case("sm_100a", dim, seqlen_q, seqlen_k, causal=causal)
    reports = []

    def on_call(call) -> None:
        reports.extend(Machine("sm_100a", checks=[]).run(launch) for launch in call.launches())

    cases.run(case, cases.inputs(case), on_call)
    return by_role(reports[-1].counters)


def ours(dim: int, causal: bool, seqlen_q: int, seqlen_k: int) -> dict[str, dict[str, float]]:
    from tests.kernels.sm100 import calls

    from coflash.vgpu import Machine

    case = calls.Case(
        (seqlen_q,),
        (seqlen_k,),
        1,
        1,
        window_right=0 if causal else None,
        options={"head_dim": dim, "head_dim_v": dim},
    )
    config = case.config()
    _, (launch,) = calls.prepare(case, config, blocks=148)
    return by_role(Machine("sm_100a", checks=[]).run(launch).counters)


def table(dim: int, causal: bool) -> None:
    seqlen_q, short, long = 512, 512, 1024
    blocks = (long - short) // 128 * (seqlen_q // 128)
    counted = {}
    for name, run in (("ours", ours), ("flash-attn-4", theirs)):
        few, many = run(dim, causal, seqlen_q, short), run(dim, causal, seqlen_q, long)
        counted[name] = {
            role: {u: (many[role][u] - few[role][u]) / blocks for u in UNITS if many[role][u]}
            for role in ROLES
        }
    print(f"\nd{dim} {'causal' if causal else 'full'}: per block of 128 x 128 scores, in warp instructions\n")
    print("| role | unit | ours | flash-attn-4 |\n|---|---|---|---|")
    for role in ROLES:
        for unit, words in UNITS.items():
            pair = [counted[name][role].get(unit, 0.0) for name in ("ours", "flash-attn-4")]
            if any(abs(x) > 0.05 for x in pair):
                scale = 1 / 32 if unit in ("exp2", "fma", "alu") else 1
                print(f"| {role} | {words} | {pair[0] * scale:.1f} | {pair[1] * scale:.1f} |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, action="append", help="head dimension (64, 128, 256)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for dim in args.dim or (64, 128, 256):
        for causal in (False, True):
            table(dim, causal)


if __name__ == "__main__":
    main()
