"""What the Blackwell forward's softmax does to accuracy, on scores made to hurt: references, and the polynomial.

    python tools/held_reference.py

For each kind of row, in bfloat16: mean error of the output against float64, as a multiple of the classic softmax's
(reference = the row's maximum, exponentials exact to float32), and the largest error as a multiple of plain PyTorch's
in bfloat16.  The error rule allows 1.25 and 2.  "again": the share of a warp's blocks that the held reference sends
back to be done online.  Rows are done as the kernel does them: blocks of 128 keys, a warp of 32 rows deciding together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from coflash.exp2 import COEFFICIENTS

ROWS, DIM_V, BLOCK, WARP = 256, 128, 128, 32
TOLERANCE, HEAVY, SUM_MOST = 8.0, 2.0, 2.0**26  # of kernels/sm100/softmax.py
DEGREE_2 = (1.00172475, 0.65763604, 0.33718973)  # minimax, 1.7e-3
LN_2 = math.log(2.0)


def kinds(keys: int) -> Iterator[tuple[str, Tensor]]:
    """Scores in natural units, `(ROWS, keys)`."""
    noise = torch.randn(ROWS, keys)
    ramp = torch.arange(keys)[None] / BLOCK * LN_2  # log2 units a block
    late = torch.arange(keys)[None] >= BLOCK
    yield "random", noise
    yield "random, twice as wide", 2 * noise
    yield "random, 4 times as wide", 4 * noise
    yield "random, 8 times as wide", 8 * noise
    yield "rising by 1 a block", ramp + 0.2 * noise
    yield "rising by 4 a block", 4 * ramp + 0.2 * noise
    yield "rising by 20 a block", 20 * ramp + 0.2 * noise
    yield "falling by 4 a block", 4 * ramp.flip(1) + 0.2 * noise
    yield "a late lead of 7.9", torch.where(late, 7.9 * LN_2, 0.0) + 0.2 * noise
    yield "all equal but the first block", torch.where(late, 0.45 * LN_2, 0.0).expand(ROWS, keys)
    yield "all equal", torch.zeros(ROWS, keys)


def exponentials(x: Tensor, share: int, coefficients: tuple[float, ...]) -> Tensor:
    """2**x, `share` of 16 pairs of columns by polynomial."""
    whole = torch.floor(x)
    value = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * (x - whole) + coefficient
    pairs = torch.arange(16)
    taken = ((pairs + 1) * share // 16 > pairs * share // 16).repeat(BLOCK // 32).repeat_interleave(2)
    return torch.where(taken, torch.ldexp(value, whole), torch.exp2(x))


def attention(
    scores: Tensor, v: Tensor, held: bool, share: int = 0, coefficients: tuple[float, ...] = COEFFICIENTS[3]
) -> tuple[Tensor, float]:
    """The output in bfloat16, and the share of blocks done again."""
    x = (scores * (1 / LN_2)).float()
    reference = torch.full((ROWS,), -math.inf)
    total, out, again = torch.zeros(ROWS), torch.zeros(ROWS, DIM_V), 0.0
    for first in range(0, x.shape[1], BLOCK):
        block = x[:, first : first + BLOCK]
        p = exponentials(block - reference[:, None], share, coefficients)
        online = torch.ones(ROWS, dtype=torch.bool)
        if held and first:
            fits = p.sum(1) <= (HEAVY * total).clamp(max=SUM_MOST)
            online = ~by_warp(fits, torch.all)
            again += online.float().mean().item() * BLOCK / x.shape[1]
        top = block.amax(1)
        moves = by_warp(top - reference > TOLERANCE, torch.any) & online
        after = torch.where(moves, torch.maximum(reference, top), reference)
        factor = torch.exp2(reference - after)
        total, out, reference = total * factor, out * factor[:, None], after
        # A block done again has all of its exponentials from the special-function unit.
        done = exponentials(block - reference[:, None], 0 if held and first else share, coefficients)
        p = torch.where(online[:, None], done, p)
        total = total + p.sum(1)
        out = out + p.bfloat16().float() @ v[first : first + BLOCK]
    return (out / total[:, None]).bfloat16(), again


def by_warp(rows: Tensor, vote) -> Tensor:
    return vote(rows.view(-1, WARP), 1).repeat_interleave(WARP)


def classic(scores: Tensor, v: Tensor) -> Tensor:
    p = torch.exp(scores - scores.amax(1, keepdim=True))
    return ((p.bfloat16().float() @ v) / p.sum(1, keepdim=True)).bfloat16()


def main() -> None:
    torch.manual_seed(0)
    columns = {
        "online": {"held": False},
        "online, 5/16": {"held": False, "share": 5},
        "held, 5/16": {"held": True, "share": 5},
        "held, 16/16": {"held": True, "share": 16},
        "held, degree 2, 5/16": {"held": True, "share": 5, "coefficients": DEGREE_2},
        "held, degree 2, 8/16": {"held": True, "share": 8, "coefficients": DEGREE_2},
    }
    for keys in (1024, 4096):
        print(f"\n| {keys} keys | " + " | ".join(columns) + " | again |")
        print("|---" * (len(columns) + 2) + "|")
        for kind, scores in kinds(keys):
            v = torch.randn(keys, DIM_V).bfloat16().float()
            exact = torch.softmax(scores.double(), 1) @ v.double()
            mean = (classic(scores, v).double() - exact).abs().mean()
            plain = torch.softmax(scores.bfloat16(), 1) @ v.bfloat16()
            most = (plain.double() - exact).abs().max()
            cells, again = [], 0.0
            for options in columns.values():
                found, share = attention(scores, v, **options)
                error = (found.double() - exact).abs()
                cells.append(f"{error.mean() / mean:.2f} ({error.max() / most:.2f})")
                again = share if options["held"] else again
            print(f"| {kind} | " + " | ".join(cells) + f" | {again:.2f} |", flush=True)


if __name__ == "__main__":
    main()
