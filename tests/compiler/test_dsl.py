"""The real compiler, on a kernel of a few lines: what it writes, for which processor, and in which
process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import py_compile
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from tests.compiler.fake_compiler import KERNEL
from tests.compiler.scale_config import ScaleConfig

from coflash import planning
from coflash.compiler import CompileError, Job, builder, cache, compile_to, host_code, resources
from coflash.compiler import key as keys
from coflash.problem import Problem

pytestmark = pytest.mark.xdist_group("compiler-dsl")  # one worker process, one fixture for each architecture

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
needs_objdump = pytest.mark.skipif(not shutil.which("objdump"), reason="needs binutils")


@pytest.fixture(scope="module", params=ARCHS)
def compiled(request, tmp_path_factory):
    return compile_to(tmp_path_factory.mktemp("out"), KERNEL, ScaleConfig(unroll=2), request.param)


def test_what_is_written(compiled):
    assert f".target {compiled.arch}\n" in compiled.ptx.read_text()
    assert f".entry {compiled.symbol}(" in compiled.ptx.read_text()
    assert compiled.arguments == ("x", "y", "factor")
    assert {path.name for path in compiled.directory.iterdir()} == {*cache.FILES, cache.DESCRIPTION}
    assert json.loads(compiled.json.read_text())["arguments"] == ["x", "y", "factor"]


def test_lines_of_the_source_are_in_the_ptx(compiled):
    assert re.search(r'\.file\s+\d+ ".*tests/compiler/scale_kernel\.py"', compiled.ptx.read_text())
    assert re.search(r"\.loc\s+\d+ \d+ \d+", compiled.ptx.read_text())


def test_resources(compiled):
    (used,) = compiled.resources
    assert used.symbol == compiled.symbol
    assert 8 <= used.registers <= 32
    assert (used.stack_bytes, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert (used.static_shared_bytes, used.barriers, used.threads) == (0, 0, 256)


@pytest.mark.filterwarnings("ignore:This static loop")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_spills_and_barriers_are_reported(tmp_path, arch):
    (used,) = compile_to(tmp_path, "tests.compiler.greedy_kernel:Greedy", ScaleConfig(), arch).resources
    assert used.stack_bytes > 0
    assert used.spill_stores > 0 and used.spill_loads > 0
    assert used.registers == 64
    assert used.static_shared_bytes == 0  # dynamic shared memory belongs to the launch
    assert used.barriers == 1


def test_a_report_changes_no_instruction(tmp_path):
    plain = compile_to(tmp_path / "plain", KERNEL, ScaleConfig(), "sm_90a", report=False)
    full = compile_to(tmp_path / "full", KERNEL, ScaleConfig(), "sm_90a")

    def code(compiled):
        sections = resources._sections(compiled.cubin.read_bytes())
        return sections[".text." + compiled.symbol].data

    assert code(plain) == code(full)
    assert ".loc" in full.ptx.read_text() and ".loc" not in plain.ptx.read_text()
    (used,) = plain.resources
    assert (used.registers, used.stack_bytes, used.spill_stores) == (full.resources[0].registers, 0, 0)


@needs_objdump
def test_the_shared_object_exports_one_name_and_needs_two_libraries(compiled):
    names = subprocess.run(["nm", "-D", "--defined-only", compiled.so], capture_output=True, text=True).stdout
    assert [line.split()[-1] for line in names.splitlines()] == [f"__tvm_ffi_{compiled.function}"]
    dynamic = subprocess.run(["readelf", "-d", compiled.so], capture_output=True, text=True).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libcute_dsl_runtime.so", "libtvm_ffi.so"]


def vector_registers(shared_object: Path) -> set[str]:
    """Kinds of vector registers that the host code names; v: any of the instructions that need AVX or
    later.
    """
    text = subprocess.run(["objdump", "-d", shared_object], capture_output=True, text=True, check=True).stdout
    kinds = set(re.findall(r"%([xyz])mm\d", text))
    if re.search(r"%[xyz]mm(1[6-9]|2\d|3[01])|%k[0-7]\b|\t62 ", text):
        kinds.add("evex")
    if re.search(r"\tv[a-z]+", text):
        kinds.add("v")
    return kinds


@needs_objdump
@pytest.mark.skipif(sys.platform != "linux" or "x86_64" not in host_code.platform.machine(), reason="x86-64")
def test_host_code_is_for_the_named_processor(tmp_path, monkeypatch):
    """Not for the one of this machine: a plain x86-64 asked for gives no AVX at all, x86-64-v3 no AVX-512."""
    compile_to(tmp_path / "v3", KERNEL, ScaleConfig(), "sm_90a")
    found = vector_registers(tmp_path / "v3" / "kernel.so")
    assert "v" in found and not {"z", "evex"} & found
    monkeypatch.setitem(host_code.HOST_TARGETS, "x86_64", ("x86_64-unknown-linux-gnu", "x86-64"))
    compile_to(tmp_path / "v1", KERNEL, ScaleConfig(), "sm_90a")
    assert vector_registers(tmp_path / "v1" / "kernel.so") == {"x"}


def test_an_error_in_a_kernel_names_the_kernel(tmp_path):
    with pytest.raises(CompileError, match=r"greedy_kernel:Greedy for sm_90a, ScaleConfig\(threads=-1"):
        compile_to(tmp_path, "tests.compiler.greedy_kernel:Greedy", ScaleConfig(threads=-1), "sm_90a")


def test_compiling_leaves_the_excepthook_alone(tmp_path):
    hook = sys.excepthook
    compile_to(tmp_path, KERNEL, ScaleConfig(), "sm_90a")
    assert sys.excepthook is hook


def test_a_folder_of_any_name(tmp_path, worker):
    folder = tmp_path / "one, two 'three' \"four\" $five"
    assert compile_to(folder, KERNEL, ScaleConfig(), "sm_90a", report=False).so.exists()
    (folder / "beside").mkdir()
    worker.run(Job(KERNEL, ScaleConfig(), "sm_90a"), folder / "beside")
    cache.read(folder / "beside")


def test_without_a_linker(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="needs a C compiler"):
        host_code.link(host_code.HostCode(b"", ()), tmp_path / "x.so")


def test_a_linker_named_by_a_relative_path(tmp_path, monkeypatch):
    script = tmp_path / "linker"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./linker")
    host_code.link(host_code.HostCode(b"", ()), tmp_path / "x.so")


FORKING = """
import contextlib, os, pickle, sys, tempfile, time
from coflash.compiler import dsl, host_code
empty = host_code._empty_kernels

def dies(module):
    raise ValueError

def differs(module):
    empty(module)
    from cutlass._mlir import ir
    module.operation.attributes["different"] = ir.StringAttr.get("yes", module.context)

def interrupted():
    child = forks()
    if child == 0:
        raise KeyboardInterrupt
    return child

def killed_at_work():
    from cutlass.cutlass_dsl import tvm_ffi_provider
    rename, finish = tvm_ffi_provider.rename_tvm_ffi_function, host_code.Beside.finish
    parent, (read, write) = os.getpid(), os.pipe()

    def hangs(*arguments):
        rename(*arguments)
        os.write(write, b"!")
        time.sleep(60)

    def fails(self, compiled):
        if os.getpid() == parent and os.read(read, 1):
            raise ValueError("the parent fails")
        return finish(self, compiled)

    tvm_ffi_provider.rename_tvm_ffi_function, host_code.Beside.finish = hangs, fails

forks = os.fork
what, way = sys.argv[1:]
if way == "interrupted":
    os.fork = interrupted
if way == "killed at work":
    killed_at_work()
if way == "unknown":
    host_code._MAGIC = b"something else"
if way == "another thread":
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if way == "no callback":
    import cutlass.base_dsl.dsl
    del cutlass.base_dsl.dsl.BaseDSL.trace_finalize_hooks
host_code._empty_kernels = {"dies": dies, "differs": differs}.get(way, empty)
job = *pickle.loads(bytes.fromhex(what)), False, "f"
try:
    beside = dsl._run_dsl(*job, fork=True)
except dsl.CompileError as error:
    beside = None
    assert way == "killed at work" and "the parent fails" in str(error)
if way == "as without":
    plain = dsl._run_dsl(*job)
    assert beside.ptx == plain.ptx and beside.cubin == plain.cubin and beside.arguments == plain.arguments
    _, image = beside.host_code.image
    assert beside.cubin in image and image in plain.host_code.object_file
    assert image not in beside.host_code.object_file and plain.host_code.image is None
print(beside is not None, [name for name in os.listdir(tempfile.gettempdir()) if "coflash" in name])
"""


def forking(folder, kernel, config, arch, way):
    """Whether a process gets host code that it makes in another, `way` being what happens there."""
    what = pickle.dumps((kernel, config, arch)).hex()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(folder / "temporary files")
    os.makedirs(environment["TMPDIR"], exist_ok=True)
    command = [sys.executable, "-c", FORKING, what, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    found, left = done.stdout.strip().split(" ", 1)
    assert left == "[]"
    return found == "True"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_host_code_made_beside_a_kernel_is_the_same(arch, tmp_path):
    assert forking(tmp_path, KERNEL, ScaleConfig(), arch, "as without")
    problem = Problem(torch.bfloat16, "cuda", 64, 64, 4, 4, 2, 512, 512, causal=True)
    plan = planning.plan(problem, planning.typical(arch), backend="kernel")
    assert forking(tmp_path, plan.kernel, plan.config, plan.arch, "works")


@pytest.mark.parametrize(
    "way",
    ["dies", "differs", "unknown", "no callback", "another thread", "interrupted", "killed at work"],
)
def test_host_code_that_cannot_be_made_beside_a_kernel(way, tmp_path):
    assert not forking(tmp_path, KERNEL, ScaleConfig(), "sm_90a", way)


@pytest.fixture(scope="module")
def worker():
    with builder.Worker() as process:
        yield process


def test_a_worker_of_a_process_that_ignores_its_children(tmp_path):
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with builder.Worker() as process:
            process.run(Job(KERNEL, ScaleConfig(), "sm_90a"), tmp_path)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    cache.read(tmp_path)


def test_a_worker_makes_an_entry(worker, tmp_path):
    for arch in ("sm_90a", "sm_100a"):
        folder = tmp_path / arch
        folder.mkdir()
        worker.run(Job(KERNEL, ScaleConfig(), arch), folder)
        assert cache.read(folder).arch == arch
        assert cache.read(folder).arguments == ("x", "y", "factor")


def test_a_worker_says_what_went_wrong_and_goes_on(worker, tmp_path):
    job = Job("tests.compiler.greedy_kernel:Greedy", ScaleConfig(threads=-1), "sm_90a")
    with pytest.raises(CompileError, match="threads=-1"):
        worker.run(job, tmp_path)
    with pytest.raises(CompileError, match="no attribute 'Absent'"):
        worker.run(Job("tests.compiler.scale_kernel:Absent", ScaleConfig(), "sm_90a"), tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no module named 'tests.compiler.absent'"):
        worker.run(Job("tests.compiler.absent:Absent", ScaleConfig(), "sm_90a"), tmp_path)
    worker.run(Job(KERNEL, ScaleConfig(), "sm_90a"), tmp_path)
    cache.read(tmp_path)


def test_a_worker_refuses_a_source_that_changed_meanwhile(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_source", lambda module: "what the caller read when it started")
    with pytest.raises(CompileError, match="has changed"):
        worker.run(Job(KERNEL, ScaleConfig(), "sm_90a"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_worker_reports_a_full_disk_as_one(worker, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", small], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs privileges")
    try:
        with pytest.raises(OSError, match="No space left"):
            worker.run(Job(KERNEL, ScaleConfig(), "sm_90a"), small)
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_worker_that_dies_is_reported(tmp_path):
    worker = builder.Worker()
    worker._start("sm_90a").kill()
    with pytest.raises(CompileError, match="ended with code -9"):
        worker.run(Job(KERNEL, ScaleConfig(), "sm_90a"), tmp_path)
    worker.close()


def test_a_config_that_cannot_be_sent(tmp_path):
    class Local(ScaleConfig):
        pass

    with pytest.raises(CompileError, match="can't be sent"):
        builder.Worker().run(Job(KERNEL, Local(), "sm_90a"), tmp_path)


@pytest.mark.parametrize("told_not_to", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_a_dsl_without_bytecode_is_translated_once(told_not_to, installed, tmp_path, monkeypatch):
    source = tmp_path / "cutlass.py"
    source.write_text("")
    spec = importlib.util.spec_from_file_location("cutlass", source)
    if installed:
        py_compile.compile(str(source))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr("sys.dont_write_bytecode", told_not_to)
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda command, env, **_: started.append(env))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1" if told_not_to else "")
    builder.Worker()._start("sm_90a")
    (env,) = started
    kept_apart = told_not_to and not installed
    assert ("PYTHONPYCACHEPREFIX" in env) == kept_apart
    assert ("PYTHONDONTWRITEBYTECODE" in env) != kept_apart
