"""Which runtime library a process loads, and what it says where there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from coflash.compiler import RuntimeMissing, runtime


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installation of the DSL with the runtimes of the CUDA versions asked for."""

    def install(*versions):
        for version in versions:
            folder = tmp_path / f"cu{version}" / "lib"
            folder.mkdir(parents=True)
            (folder / runtime.NAME).write_bytes(b"")
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: spec)

    return install


@pytest.mark.parametrize(
    ("versions", "cuda", "chosen"),
    [((12, 13), 13, "cu13"), ((12, 13), 12, "cu12"), ((12,), 13, "cu12"), ((13,), 12, "cu13")],
)
def test_the_runtime_of_torchs_cuda_version_is_preferred(installed, versions, cuda, chosen):
    installed(*versions)
    assert runtime.dsl_runtime(cuda).parts[-3] == chosen


def test_without_an_installation(installed, monkeypatch):
    installed()
    assert runtime.dsl_runtime() is None
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert runtime.dsl_runtime() is None


@pytest.fixture
def loads(monkeypatch):
    """What is handed to the dynamic loader, which refuses everything in `refused`."""
    found, refused = [], set()

    def load(path, mode):
        found.append(path)
        if path in refused:
            raise OSError(f"{path}: cannot open shared object file")
        return object()

    monkeypatch.setattr(runtime, "ctypes", SimpleNamespace(CDLL=load, RTLD_GLOBAL=0))
    monkeypatch.setattr(runtime, "_loaded", None)
    return SimpleNamespace(found=found, refused=refused)


def test_a_shipped_library_comes_first_and_is_loaded_once(loads, tmp_path):
    (tmp_path / runtime.NAME).write_bytes(b"")
    runtime.load([tmp_path / "absent", tmp_path])
    runtime.load([tmp_path])
    assert loads.found == [str(tmp_path / runtime.NAME)]


def test_the_loaders_own_search_comes_last(loads, installed):
    installed(13)
    loads.refused.add(str(runtime.dsl_runtime()))
    runtime.load()
    assert loads.found[-1] == runtime.NAME and len(loads.found) == 2


def test_what_is_said_where_there_is_none(loads, installed):
    installed()
    loads.refused.add(runtime.NAME)
    with pytest.raises(RuntimeMissing, match="install nvidia-cutlass-dsl.*LD_LIBRARY_PATH(?s:.*)cannot open"):
        runtime.load()


def test_without_tvm_ffi(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(RuntimeMissing, match="apache-tvm-ffi"):
        runtime.tvm_ffi_library()
