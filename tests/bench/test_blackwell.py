"""`coflash bench` on a Blackwell GPU, as far as one can be pretended: what it plans, compiles and calls there.

Host tensors claim to be on the device, and what would be launched runs on the virtual GPU.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass")

from coflash import calls, compiler, planning, vgpu  # noqa: E402
from coflash.bench import check, measure, providers, shapes, tensors  # noqa: E402
from coflash.commands import bench  # noqa: E402
from coflash.compiler import launch  # noqa: E402

DEVICE = torch.device("cuda", 0)
COFLASH = providers.PROVIDERS["coflash"]


@pytest.fixture(params=["sm_100a", "sm_103a"])
def arch(request, monkeypatch):
    """A GPU of this architecture, with few multiprocessors so that each has several work items."""
    device = replace(planning.typical(request.param), num_sms=4)
    monkeypatch.setattr(planning, "device_info", lambda _: device)
    return request.param


@pytest.mark.parametrize("suite", [name for name in shapes.SUITES if name != "small"])
def test_every_shape_takes_the_blackwell_kernel(arch, suite, monkeypatch):
    asked = []
    monkeypatch.setattr(compiler, "build_many", lambda jobs, progress: asked.extend(jobs))
    chosen = shapes.suite(suite)
    bench._compile(chosen, ["forward"], DEVICE)
    assert asked and all(job.kernel == "sm100.forward" and job.arch == arch for job in asked)
    assert all(measure.expected(shape, "forward", DEVICE) for shape in chosen)


SHAPE = shapes.Shape("few", "", 2, 2, 1, 64, 64, 200, 200)
CALLS = {
    "full": SHAPE,
    "causal": replace(SHAPE, causal=True),
    "pairs": replace(SHAPE, batch=1, heads=1, head_dim=128, head_dim_v=128, seqlen_q=512, seqlen_k=256),
    "window, sink": replace(SHAPE, causal=True, window=(63, 0), sink=True),
    "varlen": replace(SHAPE, batch=3, causal=True, seqlen_q=130, seqlen_k=130, lengths=(130, 7, 64)),
    "192/128": replace(SHAPE, batch=1, head_dim=192, head_dim_v=128, causal=True),
    "decode": replace(SHAPE, heads=8, seqlen_q=1),
}


def honest():
    """While it lasts, tensors say where they are."""
    return mock.patch.object(torch.Tensor, "device", torch._C.TensorBase.device)


@pytest.fixture
def posing(monkeypatch):
    """Host tensors claim to be on a GPU whose launches the virtual GPU carries out; returns what was launched."""
    ran = []

    def load(entry):
        recorded = vgpu.record(entry.so, entry.ptx, names=entry.arguments, multiprocessors=4)

        def call(*arguments):
            with honest():
                for found in recorded(*arguments):
                    report = vgpu.Machine("sm_100a").run(found)
                    assert report.ok, str(report)
                    ran.append(found)

        return call

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(calls, "_CALLS", {})
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: DEVICE))
    return ran


@pytest.mark.parametrize("arch", ["sm_100a"], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_timed_runs_the_kernel_and_is_right(arch, posing, name):
    with honest():
        made = tensors.make(CALLS[name], torch.device("cpu"), grad=False)
    call = COFLASH.prepare(made)
    with torch.no_grad():
        outs = [call.forward() for _ in range(2)]  # calls seen before take a shorter way
    assert [found.block for found in posing] == [
        (512, 1, 1)
    ] * 2  # the Blackwell kernel's, and nothing else ran
    with honest():
        assert all(check.forward(made, out).right for out in outs)
