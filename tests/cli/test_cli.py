"""The command line as a user types it, and what importing coflash costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types

import pytest
import torch

import coflash
from coflash import cli
from coflash.commands import demo, doctor

SRC = os.path.dirname(os.path.dirname(coflash.__file__))


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SRC, **environment},
    )


class TestImport:
    def test_imports_no_compiler(self):
        """Nor anything else that costs time: torch is there already, the rest comes on first use."""
        code = (
            "import sys, torch; before = set(sys.modules); import coflash; coflash.flash_attn_func;"
            "print(*sorted(set(sys.modules) - before))"
        )
        result = python("-c", code)
        assert result.returncode == 0, result.stderr
        added = {name.split(".")[0] for name in result.stdout.split()}
        assert not added & {
            "cutlass",
            "nvidia_cutlass_dsl",
            "tvm_ffi",
            "transformers",
            "matplotlib",
            "triton",
        }
        mine = {name for name in result.stdout.split() if name.startswith("coflash.")}
        assert not {name for name in mine if name.split(".")[1] in ("compiler", "kernels", "vgpu", "bench")}

    def test_costs_little_beyond_torch(self):
        """At most 0.15 s, the public functions included; a busy machine gets three tries."""
        code = (
            "import torch, time; start = time.process_time(); import coflash; coflash.flash_attn_func;"
            "print(time.process_time() - start)"
        )
        tries = (float(python("-c", code).stdout) for _ in range(3))
        assert any(seconds <= 0.15 for seconds in tries)

    def test_public_names(self):
        for name in coflash.__all__:
            assert callable(getattr(coflash, name))
            assert name in dir(coflash)
        with pytest.raises(AttributeError, match="no attribute 'flash'"):
            _ = coflash.flash


class TestVerbs:
    @pytest.mark.parametrize("verb", cli.VERBS)
    def test_every_verb_has_help(self, verb, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main([verb, "--help"])
        assert exit_.value.code == 0
        assert f"coflash {verb}" in capsys.readouterr().out

    def test_overview_names_every_verb(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["--help"])
        assert exit_.value.code == 0
        out = capsys.readouterr().out
        assert all(verb in out for verb in cli.VERBS)

    @pytest.mark.parametrize("words", [[], ["dance"]])
    def test_anything_else_is_refused(self, words, capsys):
        with pytest.raises(SystemExit) as exit_:
            cli.main(words)
        assert exit_.value.code == 2
        assert "coflash" in capsys.readouterr().err

    def test_version(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert capsys.readouterr().out == f"coflash {coflash.__version__}\n"

    def test_overview_imports_no_verb(self):
        code = (
            "import sys; from coflash import cli\n"
            "try: cli.main(['--help'])\n"
            "except SystemExit: pass\n"
            "print([m for m in sys.modules if m.startswith('coflash.commands') or m == 'torch'])"
        )
        assert python("-c", code).stdout.splitlines()[-1] == "[]"

    def test_exit_code_is_the_verbs(self, monkeypatch):
        verb = types.ModuleType("coflash.commands.doctor")
        verb.configure = lambda parser: parser.add_argument("--code", type=int)
        verb.run = lambda args: args.code
        monkeypatch.setitem(sys.modules, "coflash.commands.doctor", verb)
        assert cli.main(["doctor", "--code", "3"]) == 3

    def test_interrupted(self, monkeypatch):
        verb = types.ModuleType("coflash.commands.doctor")
        verb.configure = lambda parser: None

        def run(args):
            raise KeyboardInterrupt

        verb.run = run
        monkeypatch.setitem(sys.modules, "coflash.commands.doctor", verb)
        assert cli.main(["doctor"]) == 130


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _own_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("COFLASH_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("COFLASH_CACHE_READONLY", raising=False)

    def test_healthy(self, capsys):
        assert cli.main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert "Nothing is broken." in out
        assert torch.__version__ in out

    def test_json(self, capsys):
        assert cli.main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["broken"] == [] and report["coflash"] == coflash.__version__
        states = {finding["subject"]: finding["state"] for finding in report["findings"]}
        assert states.keys() == doctor.CHECKS.keys()
        assert states["portable path"] == "ok"
        devices = {route["device"] for route in report["calls"]}
        assert any("sm_90a" in device for device in devices)
        assert {route["path"] for route in report["calls"]} <= {"portable", "kernel", "refused"}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
    def test_calls_without_a_gpu_are_portable(self):
        here = [route for route in doctor.typical_routes() if "CPU" in route.device]
        assert len(here) == len(doctor.CALLS)
        assert all(route.path == "portable" and route.reason for route in here)

    def test_unusable_cache(self, monkeypatch, tmp_path, capsys):
        occupied = tmp_path / "file"
        occupied.write_text("")
        monkeypatch.setenv("COFLASH_CACHE", str(occupied / "cache"))
        assert cli.main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "Broken: kernel cache" in out and "COFLASH_CACHE" in out

    def test_missing_read_only_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("COFLASH_CACHE_READONLY", str(tmp_path / "nowhere"))
        state, detail = doctor.check_cache()
        assert state == doctor.BROKEN and "nowhere" in detail

    def test_wrong_results_are_noticed(self, monkeypatch):
        right = coflash.flash_attn_func

        def wrong(*args, **kwargs):
            return right(*args, **kwargs) * 1.05

        monkeypatch.setattr(coflash, "flash_attn_func", wrong)
        assert doctor.check_portable()[0] == doctor.BROKEN

    def test_a_failing_check_is_a_finding(self, monkeypatch, capsys):
        def fails():
            raise OSError("no such thing")

        monkeypatch.setitem(doctor.CHECKS, "transformers", fails)
        assert cli.main(["doctor"]) == 1
        assert "OSError: no such thing" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("versions", "state"),
        [
            ({}, doctor.ABSENT),
            ({"apache-tvm-ffi": "0.1.15"}, doctor.ABSENT),
            ({"nvidia-cutlass-dsl": "4.8.1"}, doctor.BROKEN),
            ({"nvidia-cutlass-dsl": "4.3.0", "apache-tvm-ffi": "0.1.15"}, doctor.BROKEN),
            ({"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"}, doctor.OK),
        ],
    )
    def test_compiler(self, monkeypatch, versions, state):
        monkeypatch.setattr(doctor, "_version", versions.get)
        assert doctor.check_dsl()[0] == state

    def test_old_torch(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
        assert doctor.check_torch()[0] == doctor.BROKEN

    def test_as_a_program(self):
        result = python("-m", "coflash.cli", "doctor", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["broken"] == []


def test_demo_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(demo, "NEEDED", {"not_a_module": "not-a-package"})
    assert cli.main(["demo"]) == 2
    assert "not-a-package" in capsys.readouterr().out


def test_clock_of_progress(capsys):
    from coflash.commands._demo.progress import Progress

    start = time.perf_counter()
    with Progress("working", 25) as progress:
        for _ in range(25):
            progress.step("note")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["working", "25/25", "note"] and len(lines) <= 11
    assert 0 <= progress.seconds <= time.perf_counter() - start
