"""flash-attn-4's kernels, known to be right on hardware, on the virtual GPU: right answers, no findings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.vgpu.peers.cases import CASES, Case, allowed_error, answers, inputs, run
from tests.vgpu.peers.harness import Call

from coflash.vgpu import Finding, check

SCHEDULES = [("round-robin", 0), ("lazy", 0), ("random", 0)]


def _explained(case: Case) -> set[str]:
    """What is reported of these kernels although they work, and why: docs/vgpu.md, "Findings in right
    kernels"."""
    if case.arch != "sm_100a":
        return set()
    return {"tensor_load_wait"} | ({"exit"} if case.backward else set())


def _run(case: Case, schedules: list[tuple[str, int]]) -> tuple[dict[str, torch.Tensor], list[Finding]]:
    findings: list[Finding] = []

    def on_call(call: Call) -> None:
        # Without `deterministic`, the gradients are summed in no fixed order.
        same_bits = case.deterministic or not case.backward
        findings.extend(check(call.launches(), tries=schedules, same_bits=same_bits).findings)

    return run(case, inputs(case), on_call), findings


@pytest.mark.peers
@pytest.mark.parametrize("case", [*CASES["sm_90a"], *CASES["sm_100a"]], ids=str)
def test_answer_and_findings(case):
    _check_answer_and_findings(case)


FEW = [
    Case("sm_90a", 64, 200, 200, causal=True),
    Case("sm_100a", 128, 256, 256),
    Case("sm_100a", 64, 128, 256, backward=True),
]


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 isn't installed")
@pytest.mark.parametrize("case", FEW, ids=str)
def test_answer_and_findings_of_a_few(case):
    assert case in CASES[case.arch]
    _check_answer_and_findings(case)


def _check_answer_and_findings(case: Case) -> None:
    made, findings = _run(case, SCHEDULES)
    given = inputs(case)
    right, allowed = answers(case, given, torch.float64), allowed_error(case, given)
    for name, value in made.items():
        error = (value.double() - right[name]).abs().max().item()
        assert error <= allowed[name], f"{name}: error {error:.3g}, allowed {allowed[name]:.3g}"
    unexplained = [finding for finding in findings if finding.check not in _explained(case)]
    assert not unexplained, "\n".join(map(str, unexplained))


HARDWARE = Path(__file__).parents[1] / "hardware" / "data" / "kernels.npz"


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES["sm_90a"], ids=str)
def test_same_result_as_an_h200(case):
    """Where the arithmetic is exact, the same bits; else within the bound of a different order of
    accumulation.

    The tensor cores of the virtual GPU add products in their own order and ex2 is rounded differently in
    its last bit, so a result may round to the neighbouring 16-bit value; more than a few such neighbours
    would be an error.
    """
    made, _ = _run(case, SCHEDULES[:1])
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
