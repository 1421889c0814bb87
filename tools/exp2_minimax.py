"""Derive the polynomials of `coflash.exp2` and measure them over every float32 in [-127, 0].

    python tools/exp2_minimax.py             # derive, compare with the table in the package, measure
    python tools/exp2_minimax.py --derive    # derive and compare only (a second)

Each polynomial is the minimax one of its degree for the relative error of 2**f on [0, 1], among those with
p(0) = 1 exactly: whole powers of two, and with them the weight of a row's largest score, carry no error.
Remez's exchange finds it in 60-digit arithmetic; rounding the coefficients to float32 one by one, from the
lowest power up, and solving for the remaining ones each time keeps the rounding from adding up.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Callable
from functools import partial

import mpmath as mp
import torch

from coflash.exp2 import COEFFICIENTS, DEPRESSED, Depressed
from coflash.portable.exp2 import SMALLEST, exp2_polynomial

mp.mp.dps = 60
GRID = 4000  # samples of [0, 1] for the exchange
AFTER_126 = 126.00000762939453  # the next float32
CHUNK = 1 << 22  # float32 values measured at a time


def to_float32(x: mp.mpf) -> float:
    return struct.unpack("f", struct.pack("f", float(x)))[0]


def relative_error(coefficients: list[mp.mpf], f: mp.mpf) -> mp.mpf:
    return mp.polyval(coefficients[::-1], f) / mp.power(2, f) - 1


def remez(degree: int, fixed: list[mp.mpf]) -> tuple[list[mp.mpf], mp.mpf]:
    """The best polynomial whose lowest coefficients are `fixed`, and its largest relative error on [0, 1]."""
    free = list(range(len(fixed), degree + 1))
    count = len(free) + 1
    # The error is 0 at f = 0 when p(0) = 1, so the extrema lie in (0, 1]; start from Chebyshev's points.
    points = [(1 - mp.cos(mp.pi * (i + 1) / count)) / 2 for i in range(count)]
    coefficients: list[mp.mpf] = []
    for _ in range(60):
        system, right = mp.matrix(count, count), mp.matrix(count, 1)
        for row, f in enumerate(points):
            for column, power in enumerate(free):
                system[row, column] = f**power / mp.power(2, f)
            system[row, count - 1] = (-1) ** row
            right[row] = 1 - mp.polyval(fixed[::-1], f) / mp.power(2, f)
        solution = mp.lu_solve(system, right)
        coefficients = fixed + [solution[i] for i in range(count - 1)]
        level = abs(solution[count - 1])

        samples = [mp.mpf(i) / GRID for i in range(GRID + 1)]
        errors = [relative_error(coefficients, f) for f in samples]
        extrema: list[int] = []  # the largest error within each run of one sign
        for i, error in enumerate(errors):
            if error == 0:
                continue
            if extrema and mp.sign(error) == mp.sign(errors[extrema[-1]]):
                if abs(error) > abs(errors[extrema[-1]]):
                    extrema[-1] = i
            else:
                extrema.append(i)
        if len(extrema) > count:  # keep the consecutive run whose smallest error is largest
            runs = [extrema[i : i + count] for i in range(len(extrema) - count + 1)]
            extrema = max(runs, key=lambda run: min(abs(errors[i]) for i in run))
        if len(extrema) < count:
            break
        points = [samples[i] for i in extrema]
        largest = max(abs(error) for error in errors)
        if largest - level < level * mp.mpf("1e-6"):
            break
    return coefficients, max(abs(relative_error(coefficients, mp.mpf(i) / GRID)) for i in range(GRID + 1))


def derive(degree: int) -> tuple[tuple[float, ...], float, float]:
    """Float32 coefficients in ascending powers; largest relative error before and after rounding them."""
    _, ideal = remez(degree, [mp.mpf(1)])
    fixed = [mp.mpf(1)]
    while len(fixed) <= degree:
        coefficients, _ = remez(degree, fixed)
        fixed.append(mp.mpf(to_float32(coefficients[len(fixed)])))
    rounded = max(abs(relative_error(fixed, mp.mpf(i) / GRID)) for i in range(GRID + 1))
    return tuple(float(c) for c in fixed), float(ideal), float(rounded)


def fused(x: torch.Tensor, degree: int) -> torch.Tensor:
    """What a GPU computes: Horner's scheme by fused multiply-adds (float64 rounded once to float32)."""
    whole = torch.floor(x)
    fraction = (x - whole).double()
    value = torch.full_like(x, COEFFICIENTS[degree][-1])
    for coefficient in COEFFICIENTS[degree][-2::-1]:
        value = (value.double() * fraction + coefficient).float()
    return torch.where(x < SMALLEST, 0.0, torch.ldexp(value.double(), whole)).float()


def depress(lowest: float, span: float) -> Depressed:
    """The cubic without its quadratic term, with the `q` (within 40 units in the last place of the cube root of the
    leading coefficient) and `magic` whose `shift` is nearest to a float32."""
    _, c1, c2, c3 = COEFFICIENTS[3]
    a = c2 / (3 * c3)
    root = to_float32(c3 ** (1 / 3))
    magics = torch.arange(2**23 + int(lowest) % 512, 2**24 - int(span), 512, dtype=torch.float64)
    qs = root + torch.arange(-40, 41, dtype=torch.float64)[:, None] * 2.0**-25
    shifts = qs * (magics + a)
    at = int((shifts - shifts.float().double()).abs().argmin())
    q, magic = qs[at // len(magics)].item(), magics[at % len(magics)].item()
    shift = to_float32(q * (magic + a))
    a = shift / q - magic
    square = (c1 - 3 * q**3 * a * a) / q
    constant = 1 - (q * a) ** 3 - q * a * square
    return Depressed(lowest, span, magic, q, shift, to_float32(square), to_float32(constant))


def depressed(x: torch.Tensor) -> torch.Tensor:
    """What a GPU computes by that cubic."""
    c = DEPRESSED
    y = ((x.double() - c.lowest) / c.span).float().clamp(0.0, 1.0).double()
    t = torch.floor(c.span * y + c.magic)
    s = (c.q * c.span * y + (c.shift - c.q * t).float().double()).float().double()
    value = (s * (s * s + c.square).float().double() + c.constant).float()
    return torch.ldexp(value.double(), t - c.magic + c.lowest).float()


def measure(function: Callable[[torch.Tensor], torch.Tensor], low: float, high: float) -> dict[str, float]:
    """Relative errors of `function` over every float32 x with low <= -x <= high, against exp2 in float64."""
    first, last = (struct.unpack("I", struct.pack("f", bound))[0] for bound in (low, high))
    worst, worst_at, square, count = 0.0, 0.0, 0.0, 0
    for start in range(first, last + 1, CHUNK):
        x = -torch.arange(start, min(start + CHUNK, last + 1), dtype=torch.int32).view(torch.float32)
        error = function(x).double().div_(torch.exp2(x.double())).sub_(1)
        largest, at = error.abs().max(0)
        if largest.item() > worst:
            worst, worst_at = largest.item(), x[at].item()
        square += error.square_().sum().item()
        count += x.numel()
    return {"max": worst, "at": worst_at, "rms": math.sqrt(square / count), "count": count}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--derive", action="store_true", help="derive and compare, do not measure")
    arguments = parser.parse_args()

    agree = True
    for degree, table in sorted(COEFFICIENTS.items()):
        coefficients, ideal, rounded = derive(degree)
        same = coefficients == table
        agree &= same
        print(
            f"degree {degree}: minimax {ideal:.4e}, with float32 coefficients {rounded:.4e}, "
            f"in the package: {same}"
        )
        print("    " + ", ".join(repr(c) for c in coefficients))
    same = depress(DEPRESSED.lowest, DEPRESSED.span) == DEPRESSED
    agree &= same
    print(f"the same cubic for kernels, in the package: {same}")
    if arguments.derive:
        return 0 if agree else 1

    rows: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"library": torch.exp2}
    for degree in sorted(COEFFICIENTS):
        rows[f"degree {degree}, fused"] = partial(fused, degree=degree)
        rows[f"degree {degree}, portable"] = partial(exp2_polynomial, degree=degree)
    # Near 0 float32 values are dense, so an average over all of them says little: [1, 126] is apart.
    ranges = {"[-126, 0]": (0.0, 126.0), "[-126, -1]": (1.0, 126.0), "[-127, -126)": (AFTER_126, 127.0)}
    for label, (low, high) in ranges.items():
        print(f"\nrelative error over every float32 in {label}:")
        for name, function in rows.items():
            result = measure(function, low, high)
            print(
                f"    {name:20s} max {result['max']:.3e} at {result['at']:<16.9g} rms {result['rms']:.3e}"
                f"  ({result['count']} values)",
                flush=True,
            )
    result = measure(depressed, 0.0, -DEPRESSED.lowest)
    print(f"\nthe cubic of kernels over every float32 in [{DEPRESSED.lowest:g}, 0]: max {result['max']:.3e}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
