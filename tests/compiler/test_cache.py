"""The disk cache under everything that can happen to it; the compiler is a stand-in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from tests.compiler.fake_compiler import KERNEL, build
from tests.compiler.scale_config import ScaleConfig

from coflash.compiler import BrokenEntry, CompileError, Job, builder, cache
from coflash.compiler import key as keys

ROOT = Path(__file__).parents[2]


def racers(cache_root: Path, log: Path, seconds: float, count: int) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "COFLASH_CACHE": str(cache_root), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.compiler.fake_compiler", str(seconds), str(log)]
    return [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(count)
    ]


def leftovers(root: Path) -> list[Path]:
    return list(root.glob(".making-*"))


def test_a_second_build_finds_the_first(fake, cache_root):
    first = build()
    assert build() == first
    assert fake.compilations() == 1
    assert first.folder.parent == cache_root
    assert not leftovers(cache_root)


def test_configs_and_architectures_have_entries_of_their_own(fake):
    entries = {build(ScaleConfig(unroll=u)).folder for u in (1, 2)}
    entries.add(builder.build(KERNEL, ScaleConfig(), "sm_100a").folder)
    assert len(entries) == 3 == fake.compilations()


@pytest.mark.parametrize("name", [*cache.FILES, cache.DESCRIPTION])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone", "directory"])
def test_a_broken_entry_is_noticed_and_made_again(fake, name, damage):
    file = build().folder / name
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        file.write_bytes(data[:1] + bytes([data[1] ^ 1]) + data[2:])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "directory":
            file.mkdir()
    entry = build()
    assert fake.compilations() == 2
    assert (entry.folder / name).read_bytes() == data


def test_an_entry_of_another_format_is_made_again(fake):
    description = build().folder / cache.DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), "format": cache.FORMAT + 1}))
    build()
    assert fake.compilations() == 2


def test_processes_that_race_compile_once(cache_root, tmp_path):
    running = racers(cache_root, tmp_path / "log", seconds=0.5, count=5)
    folders = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 5
    assert len(folders) == 1
    cache.read(Path(folders.pop()))
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert not leftovers(cache_root)


def test_without_locks_a_racer_keeps_the_entry_that_came_first(fake, cache_root, monkeypatch):
    job = Job(KERNEL, ScaleConfig(), "sm_90a")
    made = []
    for _ in range(2):  # both got past the lookup before either had published
        with cache.writing(cache_root, job.key) as folder:
            fake().run(job, folder)
            made.append(cache.publish(folder, cache_root, job.key))
    assert made[0] == made[1]
    assert not leftovers(cache_root)


def test_a_killed_compiler_leaves_nothing_that_is_taken_for_an_entry(cache_root, tmp_path, fake):
    log = tmp_path / "log"
    (process,) = racers(cache_root, log, seconds=60, count=1)
    while not (log.exists() and log.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (left,) = leftovers(cache_root)
    entry = build()  # its lock is gone with it
    assert cache.read(entry.folder) == entry
    assert left.exists()  # it might belong to a living process on another machine ...
    os.utime(left, (0, 0))
    build(ScaleConfig(unroll=2))
    assert not left.exists()  # ... but not after an hour


def test_a_compiler_that_fails_leaves_nothing(fake, cache_root):
    fake.fail = CompileError("no such register")
    with pytest.raises(CompileError, match="no such register"):
        build()
    assert not leftovers(cache_root)
    fake.fail = None
    build()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_reported_and_the_kernel_used_all_the_same(
    fake, cache_root, monkeypatch, number
):
    run = fake.run

    def refusing(self, job, folder, **kwargs):
        if folder.is_relative_to(cache_root):
            raise OSError(number, os.strerror(number))
        run(self, job, folder, **kwargs)

    monkeypatch.setattr(fake, "run", refusing)
    with pytest.warns(RuntimeWarning, match=os.strerror(number)):
        entry = build()
    assert not entry.folder.is_relative_to(cache_root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build() == entry  # this process compiles it no second time


def test_a_cache_that_cannot_be_a_folder(fake, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="could not be kept"):
        build()


def test_a_full_disk(fake, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs privileges")
    try:
        monkeypatch.setenv("COFLASH_CACHE", str(small))
        with pytest.warns(RuntimeWarning, match="No space left"):
            cache.read(build().folder)
    finally:
        subprocess.run(["umount", small], check=True)


def test_no_disk_at_all(fake, monkeypatch):
    fake.fail = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CompileError, match="no room"):
        build()


def test_readonly_caches_are_looked_in_after_the_writable_one(fake, cache_root, tmp_path, monkeypatch):
    made = build()
    shipped = tmp_path / "shipped"
    shutil.move(cache_root, shipped)
    monkeypatch.setenv("COFLASH_CACHE_READONLY", os.pathsep.join([str(tmp_path / "absent"), str(shipped)]))
    assert build().folder == shipped / made.folder.name
    assert fake.compilations() == 1
    assert not cache_root.exists()


def test_a_broken_entry_of_a_readonly_cache_is_reported_and_left(fake, cache_root, tmp_path, monkeypatch):
    made = build()
    shipped = tmp_path / "shipped"
    shutil.move(cache_root, shipped)
    broken = shipped / made.folder.name / "kernel.so"
    broken.write_bytes(b"")
    monkeypatch.setenv("COFLASH_CACHE_READONLY", str(shipped))
    with pytest.warns(RuntimeWarning, match="broken"):
        assert build().folder.parent == cache_root
    assert broken.read_bytes() == b""


def test_another_version_of_the_dsl_makes_its_own(fake, monkeypatch):
    first = build()
    monkeypatch.setattr(keys, "dsl_version", lambda: "4.99.0")
    second = build()
    assert fake.compilations() == 2
    assert first.folder.name.rpartition("-dsl")[0] == second.folder.name.rpartition("-dsl")[0]
    monkeypatch.setattr(keys, "dsl_version", lambda: None)
    assert build() == second  # without the DSL the newest there is will do
    assert fake.compilations() == 2


def test_many_kernels_at_once(fake, tmp_path):
    jobs = [Job(KERNEL, ScaleConfig(unroll=u), arch) for u in (1, 2, 3) for arch in ("sm_90a", "sm_100a")]
    seen = []
    entries = builder.build_many(
        jobs, root=tmp_path / "out", processes=3, progress=lambda job, _: seen.append(job)
    )
    assert [entry.arch for entry in entries] == [job.arch for job in jobs]
    assert {entry.folder.parent for entry in entries} == {tmp_path / "out"}
    assert sorted(map(str, seen)) == sorted(map(str, jobs))
    assert fake.compilations() == len(jobs)
    builder.build_many(jobs, root=tmp_path / "out")
    assert fake.compilations() == len(jobs)


def test_many_kernels_of_which_one_fails(fake, tmp_path, monkeypatch):
    run = fake.run

    def failing(self, job, folder, **kwargs):
        if job.config.unroll == 2:
            raise CompileError("the second")
        run(self, job, folder, **kwargs)

    monkeypatch.setattr(fake, "run", failing)
    with pytest.raises(CompileError, match="the second"):
        builder.build_many([Job(KERNEL, ScaleConfig(unroll=u), "sm_90a") for u in (1, 2, 3)])


def test_a_folder_meant_to_be_shipped_has_no_second_place(fake, tmp_path):
    fake.fail = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CompileError, match="No space left"):
        builder.build_many([Job(KERNEL, ScaleConfig(), "sm_90a")], root=tmp_path / "out")


def test_reading_what_is_no_entry(tmp_path):
    with pytest.raises(BrokenEntry):
        cache.read(tmp_path)
