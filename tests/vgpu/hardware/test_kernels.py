"""Kernels on the virtual GPU against what the same kernels gave on an H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.vgpu.mutations import kernels

from coflash.vgpu import Machine, record

DATA = Path(__file__).parent / "data"


def test_the_hand_written_kernel_is_right_on_hardware():
    """The base of the mutation tests, launched there with tensor maps from our own encoder."""
    problem = kernels.hopper()
    hardware = np.load(DATA / "gemm.npz")["gemm"].reshape(problem.c.shape)
    Machine(arch="sm_90a").run(problem.launch)
    assert np.array_equal(hardware, problem.right)
    assert np.array_equal(hardware, problem.c)


@pytest.mark.xdist_group("vgpu-own-kernels")
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("d64", True),
        pytest.param("d128 causal", False, marks=pytest.mark.slow),
        pytest.param("d64", False, marks=pytest.mark.slow),
        pytest.param("d128 causal", True, marks=pytest.mark.slow),
        pytest.param("d256", True, marks=pytest.mark.slow),
        pytest.param("d256", False, marks=pytest.mark.slow),
    ],
)
def test_own_forward_gives_the_hardwares_result(name, exact):
    """Exact sums: the same bits. Else the sums' order and ex2's last bit may move a value to a neighbour.

    The recording is of the kernel as it was; a kernel that sums in another order still has to agree with
    it."""
    pytest.importorskip("cutlass")
    torch = pytest.importorskip("torch")
    from tests.vgpu.hardware.pack import own_call, own_name

    def run(entry, arguments):
        launches = record(entry.so, entry.ptx, function=entry.function, names=entry.arguments)(*arguments)
        for launch in launches:
            report = Machine(arch="sm_90a").run(launch)
            assert report.ok, str(report)

    _, _, outputs = own_call(name, exact, run)
    recorded = np.load(DATA / "own_kernels.npz")
    for output, value in outputs.items():
        bits = torch.from_numpy(recorded[f"{own_name(name, exact)}/{output}"])
        hardware, value = bits.view(value.dtype).double(), value.double()
        if exact and output == "out":
            assert torch.equal(value, hardware)
            continue
        difference = (value - hardware).abs()
        if output == "lse":
            assert difference.max() <= 2.0**-9  # of weights rounded to 16 bits before they are summed
            continue
        assert (difference <= 2.0**-7 * hardware.abs() + 1e-3 * hardware.abs().max()).all()
        assert difference.square().mean().sqrt() <= 2.0**-10 * hardware.square().mean().sqrt()
