"""`coflash compile`: a folder to ship, made without a GPU; and what it says about the kernels."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from coflash import cli
from coflash.compiler import builder, cache, resources, runtime


def test_a_folder_to_ship(tmp_path, capsys):
    pytest.importorskip("nvidia_cutlass_dsl", reason="needs nvidia-cutlass-dsl")
    folder = tmp_path / "kernels"
    command = ["compile", "--arch", "sm_90a", "--head-dim", "64", "-o", str(folder), "--with-runtime"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert "1 kernels in" in said.out and "0 bytes spilled" in said.out
    assert "1/1" in said.err and "Performance Loss" not in said.err
    (entry,) = [path for path in folder.iterdir() if path.name != runtime.NAME]
    assert cache.read(entry).kernel == "sm90.forward"
    assert ".loc" in (entry / "kernel.ptx").read_text()
    assert (folder / runtime.NAME).stat().st_size > 2**20

    # A second time there is nothing to do.
    before = (entry / "kernel.so").stat().st_mtime_ns
    assert cli.main(command) == 0
    assert (entry / "kernel.so").stat().st_mtime_ns == before


def test_what_the_assembler_complains_of_is_passed_on(fake, capsys, tmp_path, monkeypatch):
    run = fake.run

    def complaining(self, job, folder, **kwargs):
        run(self, job, folder, **kwargs)
        file = folder / cache.DESCRIPTION
        description = json.loads(file.read_text())
        description["resources"] = [{"registers": 168, "spill_stores": 8, "losses": ["wgmma serialized"]}]
        file.write_text(json.dumps(description))

    monkeypatch.setattr(fake, "run", complaining)
    assert cli.main(["compile", "--arch", "sm_90a", "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "8 bytes spilled" in said.out and "wgmma serialized" in said.err


def test_losses_are_read_from_a_wrapped_log(monkeypatch):
    log = """
      ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
      serialized due to insufficient register resources for the function
      'kernel_a'
      ptxas info    : 0 bytes gmem
      ptxas info    : (C7512) Potential Performance Loss: something else in the function 'kernel_b'
    """
    log = " ".join(log.split())
    (loss,) = resources._losses(log, "kernel_a")
    assert loss.endswith("serialized due to insufficient register resources for the function 'kernel_a'")
    assert resources._losses(log, "kernel_c") == ()


def test_a_failing_compiler_is_reported(fake, capsys, tmp_path):
    fake.fail = builder.CompileError("the assembler gave up")
    assert cli.main(["compile", "--arch", "sm_90a", "-o", str(tmp_path / "out")]) == 1
    assert "the assembler gave up" in capsys.readouterr().err


def test_progress_on_a_terminal_rewrites_one_line():
    import io

    from coflash.compiler.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    job = SimpleNamespace(kernel="sm90.forward", arch="sm_90a")
    with Progress(2, stream) as progress:
        progress(job, None)
        progress(job, None)
    assert stream.getvalue().count("\r") == 2 and stream.getvalue().count("\n") == 1
    assert "2/2" in stream.getvalue()
