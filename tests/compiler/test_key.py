"""The key of a compiled kernel: whatever changes the machine code changes it, and nothing else does."""

from __future__ import annotations

import enum
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.compiler.fake_compiler import KERNEL
from tests.compiler.scale_config import ScaleConfig

from coflash.compiler import key as keys

ROOT = Path(__file__).parents[2]


class Color(enum.Enum):
    RED = 1
    GREEN = 2


@dataclass(frozen=True)
class Rich:
    tile: tuple[int, int] = (128, 64)
    color: Color = Color.RED
    part: ScaleConfig = ScaleConfig()
    rate: float = 0.5
    name: str = "a"
    flag: bool = True
    nothing: None = None


@pytest.mark.parametrize(
    "change",
    [
        {"tile": (128, 128)},
        {"color": Color.GREEN},
        {"part": ScaleConfig(unroll=2)},
        {"rate": 0.25},
        {"name": "b"},
        {"flag": False},
        {"nothing": 0},
    ],
    ids=str,
)
def test_every_field_of_a_config_counts(change):
    assert keys.make(KERNEL, Rich(), "sm_90a") == keys.make(KERNEL, Rich(), "sm_90a")
    assert keys.make(KERNEL, Rich(), "sm_90a") != keys.make(KERNEL, replace(Rich(), **change), "sm_90a")


def test_architecture_kernel_and_dsl_count(monkeypatch):
    key = keys.make(KERNEL, ScaleConfig(), "sm_90a")
    assert key.digest != keys.make(KERNEL, ScaleConfig(), "sm_100a").digest
    assert key.digest != keys.make("tests.compiler.scale_kernel:Other", ScaleConfig(), "sm_90a").digest
    monkeypatch.setattr(keys, "dsl_version", lambda: "0.1")
    other = keys.make(KERNEL, ScaleConfig(), "sm_90a")
    assert other.stem == key.stem and other.folder != key.folder


def test_configs_of_different_types_differ():
    @dataclass(frozen=True)
    class Other:
        threads: int = 256
        unroll: int = 1

    assert keys.describe(Other()) != keys.describe(ScaleConfig())


@pytest.mark.parametrize("value", [lambda x: x, object(), {1}, ScaleConfig])
def test_what_has_no_stable_form_is_refused(value):
    with pytest.raises(TypeError, match="config can hold"):
        keys.describe(replace(Rich(), name=value))


def test_the_key_is_the_same_in_every_process():
    code = (
        "from coflash.compiler import key; from tests.compiler.scale_config import ScaleConfig; "
        f"print(key.make({KERNEL!r}, ScaleConfig(unroll=3), 'sm_90a').folder)"
    )
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONHASHSEED": "7"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == keys.make(KERNEL, ScaleConfig(unroll=3), "sm_90a").folder


@pytest.mark.parametrize(
    "changed",
    [
        "kernels/features.py",
        "kernels/parts/ptx.py",
        "kernels/sm90/forward.py",
        "kernels/sm90/load.py",
        "compiler/dsl.py",
    ],
)
def test_the_source_of_the_kernel_counts_and_no_other(tmp_path, changed):
    copy = tmp_path / "src" / "coflash"
    ignore = shutil.ignore_patterns("vgpu", "portable", "__pycache__")
    shutil.copytree(ROOT / "src" / "coflash", copy, ignore=ignore)

    def digest() -> str:
        code = (
            "from coflash.compiler import key; from coflash.kernels.sm90.config import ForwardConfig; "
            "print(key.make('sm90.forward', ForwardConfig('bf16', 64, 64), 'sm_90a').digest)"
        )
        env = {"PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    before = digest()
    for other in ("kernels/sm100/forward.py", "planning/choices.py"):
        with open(copy / other, "a") as file:
            file.write("# changed\n")
    assert digest() == before
    with open(copy / changed, "a") as file:
        file.write("# changed\n")
    assert digest() != before


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        ("sm90.forward", ("coflash.kernels.sm90.forward", "Forward")),
        ("sm90.dq_pass", ("coflash.kernels.sm90.dq_pass", "DqPass")),
        ("a.b:C", ("a.b", "C")),
    ],
)
def test_where_a_kernel_lives(kernel, place):
    assert keys.locate(kernel) == place
