"""The two libraries a compiled kernel needs in the process: the DSL's runtime and tvm-ffi.

Neither is the compiler. A GPU machine that runs kernels made elsewhere has libcute_dsl_runtime.so, found
in this order: in a folder made by `coflash compile --with-runtime`, in an installed nvidia-cutlass-dsl, by
the dynamic loader's own search (LD_LIBRARY_PATH).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coflash.compiler.errors import RuntimeMissing

NAME = "libcute_dsl_runtime.so"

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def dsl_runtime(cuda_major: int = 13) -> Path | None:
    """The installed DSL's runtime library, for this CUDA version if there is one for it."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        return None
    for root in spec.submodule_search_locations:
        for version in sorted((12, 13), key=lambda v: v != cuda_major):
            path = Path(root) / f"cu{version}" / "lib" / NAME
            if path.exists():
                return path
    return None


def tvm_ffi_library() -> Path:
    return Path(_tvm_ffi().libinfo.find_libtvm_ffi())


def _tvm_ffi() -> Any:
    try:
        return importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise RuntimeMissing("running a compiled kernel needs the package apache-tvm-ffi") from error


def load(folders: Iterable[Path] = ()) -> None:
    """Bring the DSL's runtime into the process, once; `folders` are looked in first."""
    global _loaded
    with _lock:
        if _loaded is not None:
            return
        installed = dsl_runtime(_cuda_major())
        candidates = [str(folder / NAME) for folder in folders if (folder / NAME).exists()]
        candidates += [str(installed)] if installed else []
        reasons = []
        for path in [*candidates, NAME]:
            try:
                _loaded = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return
            except OSError as error:
                reasons.append(f"  {path}: {error}")
        raise RuntimeMissing(
            f"running a compiled kernel needs {NAME}: install nvidia-cutlass-dsl, or put the library on "
            "LD_LIBRARY_PATH or beside the kernels (`coflash compile --with-runtime`)\n" + "\n".join(reasons)
        )


def prepare(folders: Iterable[Path] = ()) -> None:
    """`load`, and tvm-ffi; what is missing is reported when a kernel is loaded."""
    with contextlib.suppress(RuntimeMissing):
        load(folders)
        _tvm_ffi()


@functools.cache
def _cuda_major() -> int:
    import torch

    return int((torch.version.cuda or "13").partition(".")[0])


def function(shared_object: Path, name: str) -> Any:
    """The tvm-ffi function `name` of a shared object; `load` comes first."""
    return _tvm_ffi().load_module(str(shared_object))[name]
