"""What the rescale threshold tau does to accuracy, on scores made to hurt.

    python tools/rescale_threshold.py

For each kind of row and each dtype: mean error of the output against float64, as a multiple of the classic
online softmax's (tau = 0), and the largest weight that occurs.  Rows are 1024 keys long, in tiles of 64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coflash.operands import Operands
from coflash.portable import Numerics, forward, schedule
from coflash.problem import Problem

ROWS, KEYS, DIM_V = 256, 1024, 64
THRESHOLDS = (1.0, 2.0, 4.0, 8.0, 12.0, 15.0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kinds() -> dict[str, Tensor]:
    """Scores in natural units, `(ROWS, KEYS)`."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(ROWS, KEYS, generator=generator)
    ramp = torch.arange(KEYS)[None] / 64.0 * math.log(2.0)  # log2 units a tile
    huge = torch.zeros(ROWS, KEYS)
    return {
        "random": 2 * noise,
        "random, wide": 8 * noise,
        "rising by 1 a tile": ramp + 0.2 * noise,
        "rising by 4 a tile": 4 * ramp + 0.2 * noise,
        "rising by 7.9 a tile": 7.9 * ramp + 0.05 * noise,
        "rising by 20 a tile": 20 * ramp + 0.2 * noise,
        "falling by 4 a tile": 4 * ramp.flip(1) + 0.2 * noise,
        "one huge, last": huge.index_fill(1, torch.tensor([KEYS - 1]), 60.0) + 0.2 * noise,
        "one huge, first": huge.index_fill(1, torch.tensor([0]), 60.0) + 0.2 * noise,
        "a late lead of 7.9": torch.where(torch.arange(KEYS) < 64, 0.0, 7.9 * math.log(2.0)) + 0.2 * noise,
        "all equal": torch.full((ROWS, KEYS), 5.0),
        "all near -65504": torch.full((ROWS, KEYS), -65504.0) + noise,
    }


def error(scores: Tensor, dtype: torch.dtype, threshold: float) -> tuple[float, float]:
    """Mean and largest error of the output; the identity as q makes k the scores."""
    q = torch.eye(ROWS, dtype=dtype)[None, :, None]
    k = scores.T.to(dtype)[None, :, None].contiguous()
    v = torch.randn(1, KEYS, 1, DIM_V, generator=torch.Generator().manual_seed(1)).to(dtype)
    problem = Problem(
        dtype=dtype,
        device_type="cpu",
        head_dim=ROWS,
        head_dim_v=DIM_V,
        nheads_q=1,
        nheads_kv=1,
        batch=1,
        seqlen_q=ROWS,
        seqlen_k=KEYS,
    )
    out, _ = forward(problem, Operands(q, k, v), Numerics(threshold))
    truth = torch.softmax(k[0, :, 0].double().T, -1) @ v[0, :, 0].double()
    errors = (out[0, :, 0].double() - truth).abs()
    return float(errors.mean()), float(errors.max())


def main() -> None:
    schedule.SMALLEST_TILE, schedule.TILE_SCORES = 64, 64 * 64
    print("mean error as a multiple of tau = 0's (largest error likewise)")
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        print(
            f"\n{name:24s}{'error at tau = 0':>20s}" + "".join(f"{f'tau = {t:g}':>16s}" for t in THRESHOLDS)
        )
        for kind, scores in kinds().items():
            mean, most = error(scores, dtype, 0.0)
            cells = [error(scores, dtype, t) for t in THRESHOLDS]
            row = "".join(
                f"{f'{a / mean:.2f} ({b / most:.2f})':>16s}" if mean else f"{'-':>16s}" for a, b in cells
            )
            print(f"{kind:24s}{f'{mean:.2e} ({most:.1e})':>20s}{row}")


if __name__ == "__main__":
    main()
