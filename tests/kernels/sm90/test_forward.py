"""Every option of the Hopper forward at small shapes, on the virtual GPU: exact enough, and without a finding."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from tests.kernels.sm90 import cases  # noqa: E402
from tests.kernels.sm90.cases import Case  # noqa: E402

from coflash import vgpu  # noqa: E402
from coflash.compiler import compile_to  # noqa: E402
from coflash.kernels.sm90.config import ForwardConfig  # noqa: E402
from coflash.vgpu.check import schedules  # noqa: E402

pytestmark = pytest.mark.xdist_group("sm90 forward")

SMALL: dict[str, Any] = {"tile_n": 32, "lse": True}
CAUSAL = Case((100, 100), (150, 150), 2, 1, window_right=0, options=SMALL)

CASES = {
    "causal, grouped heads": CAUSAL,
    "more queries than keys: rows that see nothing": cases.replace(CAUSAL, lengths_q=(200,), lengths_k=(90,)),
    "window, softcap, sink": Case(
        (150,), (200,), 2, 1, window_left=40, window_right=20, softcap=5.0, options={**SMALL, "sink": True}
    ),
    "packed, causal, empty sequences": Case(
        (70, 0, 33, 130),
        (90, 40, 0, 200),
        2,
        1,
        window_right=0,
        options={**SMALL, "packed_q": True, "packed_k": True, "warpgroups": 3},
    ),
    "seqused, NaN behind it": Case(
        (70, 33), (90, 130), slack=50, options={**SMALL, "seqused_q": True, "seqused_k": True}
    ),
    "packed heads that do not divide 64, d72, v40": Case(
        (20,), (90,), 10, 2, options={**SMALL, "pack_heads": 5, "head_dim": 72, "head_dim_v": 40}
    ),
    "products with V between exponentials, some of Q in registers": cases.replace(
        CAUSAL, options={**SMALL, "v_ahead": 1, "q_registers": 2, "k_stages": 3}
    ),
    "float16": Case((70,), (150,), 2, 1, window_right=0, options={**SMALL, "dtype": "fp16"}),
}


_folder = tempfile.TemporaryDirectory(prefix="coflash-")


@functools.cache
def _compiled(config: ForwardConfig) -> Path:
    return compile_to(tempfile.mkdtemp(dir=_folder.name), "sm90.forward", config, "sm_90a", report=False).so


def verify(case: Case, tries=(("round-robin", 0),), blocks: int = 3, **changes: Any) -> vgpu.Verdict:
    """Run a case under every schedule in `tries`; assert that it is clean, and as exact as the error rule asks."""
    from coflash.kernels.sm90.forward import argument_names

    config = case.config(**changes)
    call = cases.make(case, config, blocks=blocks)
    names = [name for name in argument_names(config) if name != "stream"]
    launches = vgpu.record(_compiled(config), names=names)(*(call.arguments[name] for name in names))

    def check(run) -> None:
        found = cases.errors(call)
        assert found.ok, f"{run.schedule} {run.seed}: {found}"
        assert not call.arguments["tile_counter"].any(), "the counter must be left at 0"

    verdict = vgpu.check(launches, arch="sm_90a", tries=tries, after_run=check)
    assert verdict.ok, str(verdict)
    return verdict


@pytest.mark.parametrize("name", CASES)
def test_option(name: str) -> None:
    verify(CASES[name])


def test_all_schedules_leave_the_same_bits() -> None:
    verify(CAUSAL, tries=schedules(4))


@pytest.mark.parametrize("inputs", ["rising 3", "rising 30", "late 60", "huge", "flat"])
def test_adversarial_scores(inputs: str) -> None:
    verify(cases.replace(CAUSAL, lengths_q=(150,), lengths_k=(150,), inputs=inputs))


def test_a_tile_that_fails_the_held_maximum_is_done_again() -> None:
    """Scores that outgrow the first block by e^300 overflow a held maximum; the second pass shows in the work."""
    calm = cases.replace(CAUSAL, lengths_q=(100,), lengths_k=(200,))
    steep = verify(cases.replace(calm, inputs="rising 300"))
    assert steep.instructions > 1.4 * verify(calm).instructions


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_seeds(name: str) -> None:
    verify(CASES[name], tries=schedules(20))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_head_dims(dims: tuple[int, int]) -> None:
    options = {**SMALL, "head_dim": dims[0], "head_dim_v": dims[1]}
    verify(Case((100,), (130,), 1, 1, window_right=0, options=options))
