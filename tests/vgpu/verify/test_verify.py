"""`coflash verify` and `vgpu.check`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.vgpu.mutations import kernels

from coflash import cli
from coflash.commands import verify
from coflash.vgpu import check
from coflash.vgpu.check import schedules

torch = pytest.importorskip("torch")

# A kernel for the hand-written host code of the recorder's tests: doubles the first `count` floats.
DOUBLE = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 data, .param .u32 count, .param .align 64 .b8 block[128])
.reqntid 128, 1, 1
{
  .reg .pred %p; .reg .b32 %i, %n, %c; .reg .b64 %a, %o; .reg .f32 %f;
  ld.param.u64 %a, [data];
  ld.param.u32 %n, [count];
  mov.u32 %i, %tid.x;
  mov.u32 %c, %ctaid.x;
  setp.ne.u32 %p, %c, 0;
  @%p bra done;
  mov.u32 %c, %ctaid.y;
  setp.ne.u32 %p, %c, 0;
  @%p bra done;
  setp.ge.u32 %p, %i, %n;
  @%p bra done;
  mul.wide.u32 %o, %i, 4;
  add.u64 %a, %a, %o;
  ld.global.f32 %f, [%a];
  add.f32 %f, %f, %f;
  st.global.f32 [%a], %f;
done:
  ret;
}
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Path:
    pytest.importorskip("tvm_ffi")
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("stranger")
    source = Path(__file__).parents[1] / "recorder" / "host.c"
    target = folder / "double.o"
    subprocess.run(["cc", "-c", "-fPIC", '-DKERNEL="kernel"', str(source), "-o", str(target)], check=True)
    (folder / "double.ptx").write_text(DOUBLE)
    return target


def _verify(*words: str) -> int:
    return cli.main(["verify", *words])


def test_a_strangers_object_is_clean(stranger, capsys):
    assert _verify("--object", str(stranger), "--arg", "float32[64]", "--arg", "64", "--arg", "16") == 0
    shown = capsys.readouterr().out
    assert "kernel: grid (132, 2, 1), block (128, 1, 1), cluster (2, 1, 1), 4096 bytes" in shown
    assert "round-robin random lazy eager" in shown


def test_a_strangers_fault_is_told_and_sets_the_exit_code(stranger, capsys):
    assert _verify("--object", str(stranger), "--arg", "float32[64]", "--arg", "65", "--arg", "16") == 1
    assert "[bounds] kernel kernel, CTA (0, 0, 0)" in capsys.readouterr().out


def test_wrong_arguments_are_told(stranger, capsys):
    assert _verify("--object", str(stranger), "--arg", "float32[64]") == 2
    shown = capsys.readouterr().err
    assert "expects 3 arguments" in shown
    assert "each with --arg" in shown


def test_missing_files_are_told(tmp_path, capsys):
    assert _verify("--object", str(tmp_path / "no.so")) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("none", None),
        ("7", 7),
        ("0.5", 0.5),
        ("int32[3]=0,100,256", [0, 100, 256]),
        ("float16[2,2]=1", [[1, 1], [1, 1]]),
    ],
)
def test_arguments_from_the_command_line(spec, value):
    made = verify.parse_argument(spec)
    assert (made.tolist() if isinstance(made, torch.Tensor) else made) == value


def test_random_arguments_have_the_type_and_shape():
    made = verify.parse_argument("bfloat16[2, 3]")
    assert made.dtype == torch.bfloat16
    assert made.shape == (2, 3)
    assert made.float().abs().sum() > 0


@pytest.mark.parametrize("spec", ["x", "float33[2]", "float32[4]=1,2", "float32[2"])
def test_bad_arguments(spec):
    with pytest.raises(ValueError, match="--arg"):
        verify.parse_argument(spec)


@pytest.mark.parametrize("name", list({**verify.CASES, **verify.MORE_CASES}))
def test_reference_agrees_with_the_portable_path(name):
    """Two float64 computations that share nothing."""
    from dataclasses import replace

    from coflash import portable
    from coflash.operands import Operands

    problem = {**verify.CASES, **verify.MORE_CASES}[name]
    operands = Operands(**verify.random_operands(problem))
    out, lse = verify.attention(problem, operands, torch.float64)
    doubled = operands._replace(q=operands.q.double(), k=operands.k.double(), v=operands.v.double())
    exact = replace(problem, dtype=torch.float64, device_type="cpu")
    same_out, same_lse = portable.forward(exact, doubled, portable.Numerics())
    assert torch.allclose(out, same_out, atol=1e-12)
    assert torch.allclose(lse, same_lse.double(), atol=1e-6)


def test_unknown_case_is_told(capsys):
    assert _verify("--case", "no such case") == 2
    assert "no case contains" in capsys.readouterr().err


def test_list(capsys):
    assert _verify("--list") == 0
    assert "d128 causal" in capsys.readouterr().out


def test_table_and_exit_code(monkeypatch, capsys):
    rows = iter(
        [
            verify.Row("k90", "one", "s", "lazy", 0.1, 0.2),
            verify.Row("k90", "two", "s", "lazy", 0.3, 0.2),
            verify.Row("k90", "three", "s", "lazy", 0.1, 0.2, findings=("[races] something " * 12,)),
        ]
    )
    monkeypatch.setattr(verify, "verify", lambda *_: next(rows))
    assert _verify("--arch", "sm_90a") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("ok")
    assert lines[2].endswith("FAILED")
    assert lines[3].endswith("FAILED")
    assert any(line.startswith("- [races] something") for line in lines)


def test_schedules_start_with_every_mode():
    assert schedules(1) == [("round-robin", 0)]
    assert {name for name, _ in schedules(4)} == {"round-robin", "random", "lazy", "eager"}
    assert schedules(6)[4:] == [("random", 1), ("random", 2)]
    assert schedules(0) == schedules(1)


def test_check_restores_memory_and_keeps_the_last_result():
    problem = kernels.hopper()
    seen = []
    verdict = check(
        [problem.launch], tries=schedules(3), after_run=lambda run: seen.append(problem.is_right())
    )
    assert verdict.ok, str(verdict)
    assert seen == [True, True, True]
    assert verdict.instructions > 0
    assert "no findings" in str(verdict)


def test_check_finds_results_that_depend_on_the_schedule():
    """Two CTAs store to one place: without the check for races the difference itself is the finding."""
    from coflash.vgpu import Buffer, Launch

    ptx = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry f(.param .u64 p)
{ .reg .b64 %a; .reg .b32 %x, %y; .reg .pred %q;
  ld.param.u64 %a, [p]; mov.u32 %x, %tid.x; shr.u32 %x, %x, 5; add.u32 %y, %x, 1;
  setp.ne.u32 %q, %x, 0; @%q bra store;
  add.u32 %y, %y, 0;
store: atom.global.exch.b32 %x, [%a], %y; ret; }
"""
    data = np.zeros(1, np.uint32)
    buffer = Buffer.of(data, "x")
    launch = Launch(ptx, "f", (1, 1, 1), (128, 1, 1), buffer.address.to_bytes(8, "little"), buffers=[buffer])
    tries = [("random", seed) for seed in range(8)]
    verdict = check([launch], tries=tries, checks=[])
    assert [finding.check for finding in verdict.findings] == ["schedule"]
    assert "the result depends on who runs first" in str(verdict)
    assert check([launch], tries=tries, checks=[], same_bits=False).ok


def test_progress_is_one_rewritten_line_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = verify.Progress(4)
    progress.name("sm_90a d64")
    progress.step()
    progress.clear()
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert shown.count("\r") == 3
    assert "[#######......................." in shown
    assert "sm_90a d64" in shown


def test_no_progress_elsewhere(capsys):
    progress = verify.Progress(4)
    progress.name("x")
    progress.step()
    progress.clear()
    assert capsys.readouterr().err == ""
