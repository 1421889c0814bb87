"""flash-attn-4's kernels, known to be right on hardware, on the virtual GPU: right answers, no findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.vgpu.peers.cases import CASES, Case, allowed_error, answers, inputs, run

from coflash.vgpu.check import check

pytestmark = pytest.mark.peers

SCHEDULES = [("round-robin", 0)]

# What the virtual GPU reports of kernels that are right, and why: see docs/vgpu.md, "Findings in right kernels".
EXPLAINED: dict[str, str] = {}


def _run(case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
    given = inputs(case)
    findings: list[str] = []

    def on_call(call) -> None:
        verdict = check(call.launches(), tries=SCHEDULES)
        findings.extend(str(f) for f in verdict.findings if f.check not in EXPLAINED)

    return run(case, given, on_call), findings


@pytest.mark.parametrize("case", [*CASES["sm_90a"], *CASES["sm_100a"]], ids=str)
def test_answer_and_findings(case):
    made, findings = _run(case)
    given = inputs(case)
    right, allowed = answers(case, given, torch.float64), allowed_error(case, given)
    for name, value in made.items():
        error = (value.double() - right[name]).abs().max().item()
        assert error <= allowed[name], f"{name}: error {error:.3g}, allowed {allowed[name]:.3g}"
    assert not findings, "\n".join(findings)


HARDWARE = Path(__file__).parents[1] / "hardware" / "data" / "kernels.npz"


@pytest.mark.parametrize("case", CASES["sm_90a"], ids=str)
def test_same_result_as_an_h200(case):
    """Where the arithmetic is exact, the same bits; else within the bound of a different order of accumulation.

    The tensor cores of the virtual GPU add products in their own order and ex2 is rounded differently in its last
    bit, so a result may round to the neighbouring 16-bit value; more than a few such neighbours would be an error.
    """
    made, _ = _run(case)
    recorded = np.load(HARDWARE)
    for name, value in made.items():
        bits = torch.from_numpy(recorded[f"{case}/{name}"])
        hardware = bits.view(value.dtype).double()
        value = value.double()
        if case.exact and name == "out":
            assert torch.equal(value, hardware)
            continue
        difference = (value - hardware).abs()
        if name == "lse":
            assert difference.max() <= 2e-6 * hardware.abs().max()
            continue
        step = 2.0**-7 * hardware.abs() + 1e-3 * hardware.abs().max()
        assert (difference <= step).all(), f"{name}: {difference.max().item():.3g}"
        assert difference.square().mean().sqrt() <= 2.0**-10 * hardware.square().mean().sqrt()
