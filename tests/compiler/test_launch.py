"""Launching: arguments by name, the scheduler's counter, and the compiled host code run over a stand-in
runtime.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coflash.compiler import launch
from coflash.operands import LENGTHS, Operands

ROOT = Path(__file__).parents[2]


def test_arguments_are_bound_by_name():
    calls = []
    bound = launch.Launch(
        lambda *arguments: calls.append(arguments),
        ("page_table", "out", "lse", "softmax_scale", "window_left", "softcap"),
        {"window_left": 128, "softcap": 30.0, "max_seqlen_q": 7},
    )
    bound(SimpleNamespace(page_table="PAGES", softmax_scale=0.125), "OUT", None)
    assert calls == [("PAGES", "OUT", None, 0.125, 128, 30.0)]


def test_lengths_are_given_contiguous():
    given = []
    lengths = torch.arange(8, dtype=torch.int32)[::2]
    bound = launch.Launch(lambda *arguments: given.extend(arguments), ("cu_seqlens_k", "seqused_q"), {})
    bound(SimpleNamespace(cu_seqlens_k=lengths, seqused_q=lengths), None, None)
    assert all(x.is_contiguous() and x.tolist() == [0, 2, 4, 6] for x in given)


def layouts():
    """Operands by what is odd about them, and whether a kernel can read them in place."""
    base = torch.randn(4, 6, 8, 64).to(torch.bfloat16)
    spare = torch.randn(base.numel() + 8).to(torch.bfloat16)
    return {
        "contiguous": (base, True),
        "heads first": (base.transpose(1, 2), True),
        "every other row": (base[:, ::2], True),
        "part of a wider row": (base[..., :32], True),
        "expanded": (base[:1].expand(4, -1, -1, -1), False),
        "rows of 60": (base[..., :60].contiguous(), False),
        "dimensions first": (base.transpose(1, 3), False),
        "every other dimension": (base[..., ::2], False),
        "address off by two bytes": (spare[1 : 1 + base.numel()].view_as(base), False),
        "address off by 16 bytes": (spare[8:].view_as(base), True),
    }


@pytest.mark.parametrize("name", layouts())
def test_operands_are_copied_only_where_they_must_be(name):
    x, in_place = layouts()[name]
    given = []
    bound = launch.Launch(lambda *arguments: given.extend(arguments), ("q", "k", "v"), {})
    bound(SimpleNamespace(q=x, k=x, v=x), None, None)
    for y in given:
        assert torch.equal(x, y)
        assert (y.data_ptr() == x.data_ptr() and y.stride() == x.stride()) == in_place
        assert y.data_ptr() % 16 == 0 and y.stride(-1) == 1


@pytest.mark.parametrize("name", layouts())
def test_only_what_is_read_in_place_is_launched_directly(name):
    odd, in_place = layouts()[name]
    in_place = in_place or name.startswith("address")  # of later calls' addresses the caller takes care
    plain = torch.ones(2, 3, 4, 64, dtype=torch.bfloat16)
    for which in "qkv":
        call = Operands(**{"q": plain, "k": plain, "v": plain, which: odd}, softmax_scale=0.125)
        direct = launch.Launch(print, ("q", "k", "v"), {}).direct(call)
        assert (direct is not None) == in_place


def test_a_direct_launch_passes_what_it_is_given():
    calls = []
    names = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    names += ("softmax_scale", "window_left", "tile_counter", "num_blocks")
    bound = launch.Launch(lambda *given: calls.append(given), names, {"window_left": 7, "num_blocks": 132})
    x = torch.ones(2, 3, 4, 64, dtype=torch.bfloat16)
    direct = bound.direct(Operands(x, x, x, softmax_scale=0.125))
    direct("Q", "K", "V", "CU_Q", "CU_K", "USED_Q", "USED_K", "OUT", "LSE")
    ((*given, counter, blocks),) = calls
    assert (
        given == ["Q", "K", "V", "OUT", "LSE", "CU_Q", "CU_K", "USED_Q", "USED_K", 0.125, 7] and blocks == 132
    )
    assert counter.tolist() == [0] * launch.COUNTER_WORDS


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_must_be_copied_are_not_launched_directly(name):
    x = torch.ones(2, 3, 4, 64, dtype=torch.bfloat16)
    lengths = torch.arange(8, dtype=torch.int32)
    bound = launch.Launch(print, ("q", "k", "v", name), {})
    assert bound.direct(Operands(x, x, x, **{name: lengths})) is not None
    assert bound.direct(Operands(x, x, x, **{name: lengths[::2]})) is None


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_that_no_kernel_takes(scale):
    bound = launch.Launch(print, ("softmax_scale",), {})
    x = torch.ones(2, 3, 4, 64, dtype=torch.bfloat16)
    operands = Operands(x, x, x, softmax_scale=scale)
    for start in (bound.direct, lambda operands: bound(operands, None, None)):
        with pytest.raises(NotImplementedError, match="softmax_scale"):
            start(operands)


def test_a_sink_of_any_type_is_given_as_contiguous_float32():
    given = []
    sink = torch.arange(8, dtype=torch.bfloat16)[::2]
    launch.Launch(lambda x: given.append(x), ("sink",), {})(SimpleNamespace(sink=sink), None, None)
    assert given[0].dtype == torch.float32 and given[0].is_contiguous()
    assert given[0].tolist() == [0, 2, 4, 6]


def test_the_counter_is_zero_and_on_the_operands_device():
    given = []
    bound = launch.Launch(lambda *arguments: given.extend(arguments), ("q", "tile_counter"), {})
    bound(SimpleNamespace(q=torch.empty(1)), None, None)
    assert given[1].device == torch.device("cpu") and given[1].dtype == torch.int32
    assert given[1].tolist() == [0] * launch.COUNTER_WORDS


def test_a_launcher_builds_and_loads_once(fake, monkeypatch):
    from tests.compiler.fake_compiler import KERNEL
    from tests.compiler.scale_config import ScaleConfig

    loads = []
    monkeypatch.setattr(launch, "load", lambda entry: loads.append(entry) or (lambda *_: None))
    monkeypatch.setattr(launch, "_functions", {})
    plan = SimpleNamespace(kernel=KERNEL, config=ScaleConfig(), arch="sm_90a", scalars={})
    for _ in range(3):
        launch.launcher(plan)(SimpleNamespace(x=1, y=2), None, None)
    assert fake.compilations() == len(loads) == 1


RECORD = """
import sys, torch
from types import SimpleNamespace
from coflash.compiler import builder, launch
from coflash.vgpu.recorder import record
from tests.compiler.scale_config import ScaleConfig

entry = builder.build("tests.compiler.scale_kernel:Scale", ScaleConfig(unroll=4), "sm_90a")
assert "cutlass" not in sys.modules, "the compiler belongs in a process of its own"
launches = []
function = record(entry.so, function=entry.function)
run = launch.Launch(lambda *a: launches.extend(function(*a)), entry.arguments, {"factor": 3.0})
for size in (1, 1024, 5000):
    run(SimpleNamespace(x=torch.ones(size), y=torch.empty(size)), None, None)
print([(tuple(one.grid), tuple(one.block), one.kernel == entry.symbol) for one in launches])
"""

WITHOUT_DSL = """
import tests.compiler.without_dsl
import torch
from types import SimpleNamespace
from coflash.compiler import builder, launch, CompileError
from tests.compiler.scale_config import ScaleConfig
try:
    builder.build("tests.compiler.scale_kernel:Scale", ScaleConfig(unroll=8), "sm_90a")
except CompileError as error:
    print(error)
kernel = "tests.compiler.scale_kernel:Scale"
plan = SimpleNamespace(kernel=kernel, config=ScaleConfig(unroll=4), arch="sm_90a", scalars={"factor": 2.0})
run = launch.launcher(plan)
try:
    run(SimpleNamespace(x=torch.ones(3), y=torch.ones(3)), None, None)
except ValueError as error:
    print(error)
"""


def python(code: str, cache_root: Path, **env: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "COFLASH_CACHE": str(cache_root), "PYTHONPATH": paths, **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compile_load_and_launch_without_a_gpu_then_without_the_dsl(cache_root, tmp_path):
    pytest.importorskip("nvidia_cutlass_dsl", reason="needs nvidia-cutlass-dsl")
    from coflash.compiler import runtime

    assert python(RECORD, cache_root) == str([((n, 1, 1), (256, 1, 1), True) for n in (1, 1, 5)]) + "\n"

    # Now the same kernel as a machine without the DSL finds it: a folder, and the runtime library beside it.
    (cache_root / runtime.NAME).symlink_to(runtime.dsl_runtime())
    said = python(WITHOUT_DSL, tmp_path / "new", COFLASH_CACHE_READONLY=str(cache_root))
    assert "needs nvidia-cutlass-dsl" in said  # for a config that the folder lacks
    assert "expected device_type=cuda" in said  # the host code runs, and a host tensor is not what it wants
