"""From a plan to a kernel that runs: compile, keep on disk, load, launch.

`launcher(plan)` is all that a call needs. `build` and `build_many` make kernels without running them,
`compile_to` runs the compiler in this process, into a folder of one's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coflash.compiler.builder import Job, build, build_many
    from coflash.compiler.cache import Entry
    from coflash.compiler.dsl import Compiled, compile_to
    from coflash.compiler.errors import BrokenEntry, CompileError, RuntimeMissing
    from coflash.compiler.launch import launcher, load

__all__ = [
    "BrokenEntry",
    "CompileError",
    "Compiled",
    "Entry",
    "Job",
    "RuntimeMissing",
    "build",
    "build_many",
    "compile_to",
    "launcher",
    "load",
]

_HOME = {
    "BrokenEntry": "errors",
    "CompileError": "errors",
    "Compiled": "dsl",
    "Entry": "cache",
    "Job": "builder",
    "RuntimeMissing": "errors",
    "build": "builder",
    "build_many": "builder",
    "compile_to": "dsl",
    "launcher": "launch",
    "load": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coflash.compiler' has no attribute {name!r}")
    return getattr(importlib.import_module(f"coflash.compiler.{_HOME[name]}"), name)
