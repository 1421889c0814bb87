"""Kernels on the virtual GPU against what the same kernels gave on an H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.vgpu.hardware.pack import OWN, load_launch, own_name
from tests.vgpu.mutations import kernels

from coflash.vgpu import Machine

DATA = Path(__file__).parent / "data"


def test_the_hand_written_kernel_is_right_on_hardware():
    """The base of the mutation tests, launched there with tensor maps from our own encoder."""
    problem = kernels.hopper()
    hardware = np.load(DATA / "gemm.npz")["gemm"].reshape(problem.c.shape)
    Machine(arch="sm_90a").run(problem.launch)
    assert np.array_equal(hardware, problem.right)
    assert np.array_equal(hardware, problem.c)


@pytest.mark.parametrize("exact", [False, True], ids=["random", "exact"])
@pytest.mark.parametrize("name", OWN)
def test_own_forward_gives_the_hardwares_result(name, exact):
    """The very kernel that ran there. Exact sums: the same bits.

    Else the order in which a tensor core adds and the last bit of ex2 may move a value to its neighbour.
    """
    launch, outputs = load_launch(DATA / f"{own_name(name, exact)}.launch.npz")
    report = Machine(arch="sm_90a").run(launch)
    assert report.ok, str(report)
    recorded = np.load(DATA / "own_kernels.npz")
    bits = recorded[f"{own_name(name, exact)}/out"]
    value = outputs["out"].view(np.uint16).reshape(bits.shape)
    if exact:
        assert np.array_equal(value, bits.view(np.uint16))
    else:
        mine, hardware = _bfloat16(value), _bfloat16(bits.view(np.uint16))
        difference = np.abs(mine - hardware)
        assert np.mean(difference == 0) > 0.99
        assert np.all(difference <= 2.0**-7 * np.abs(hardware) + 1e-3 * np.abs(hardware).max())
    lse = outputs["lse"].view(np.float32)
    assert np.abs(lse - recorded[f"{own_name(name, exact)}/lse"].view(np.float32).reshape(-1)).max() <= 1e-5


def _bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)
