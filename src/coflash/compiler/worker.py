"""A process that compiles: jobs come in on stdin, answers go out on stdout.

Run as a file, not as a module: `coflash` then starts as an empty package, so that neither PyTorch nor
anything else of the parent's is imported. Kernels never need PyTorch, and its import takes longer than
compiling does. A compiler in its own process also can't take the caller down, nor leave anything behind in
it.

A job is a length (8 bytes, little endian) and a pickle of (folder, kernel name, config, arch, report, digest
of the key). An answer is one line of JSON, either {"ok": true} or {"error": ..., "errno": ...}. The digest is
worked out again here: a kernel whose source was edited meanwhile must not get the old source's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import signal
import struct
import sys
import types
from typing import Any

#: Modules that are imported on the way and seldom touched: a fifth of the DSL's import.
SELDOM = {
    "importlib.metadata._adapters",  # imports the parser of e-mail
    "numpy",
    "ml_dtypes",  # imports NumPy
    "cutlass.pipeline",
    "cutlass.utils.gemm",
    "cutlass.cute.experimental",
    "cutlass.jax",
}


class Lazily:
    """Import hook: the modules of `SELDOM` are run when something of theirs is first asked for."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in SELDOM else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def compile_methods_late() -> None:
    """Let the methods of dataclasses, which are made of text, be compiled when they are first called: all but
    `__init__` seldom are, and the DSL has 130 such classes. (Python 3.13 is faster at it, in another way.)"""
    compile_now = getattr(dataclasses, "_create_fn", None)
    if compile_now is None:
        return

    def compile_late(name: str, *how: Any, **more: Any) -> Any:
        if name == "__init__":
            return compile_now(name, *how, **more)
        compiled = functools.cache(lambda: compile_now(name, *how, **more))

        def method(*args: Any) -> Any:
            return compiled()(*args)

        method.__name__ = name
        return method

    dataclasses._create_fn = compile_late  # type: ignore[attr-defined]


def main() -> None:
    gc.disable()  # tracing makes millions of small objects and few cycles; the process is short-lived
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(os.path.dirname(here))
    package = types.ModuleType("coflash")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["coflash"] = package
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, Lazily())
    compile_methods_late()

    # A caller that ignores the signal hands that down, and a child that ends can't be waited for then.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints must not look like an answer
    while header := sys.stdin.buffer.read(8):
        (size,) = struct.unpack("<q", header)
        print(json.dumps(answer(sys.stdin.buffer.read(size))), file=answers, flush=True)
    os._exit(0)  # nothing is left to write, and taking millions of objects apart takes a while


def answer(job: bytes) -> dict[str, Any]:
    try:
        folder, kernel, config, arch, report, digest = pickle.loads(job)
        from coflash.compiler import cache, dsl, host_code, key

        if key.digest(kernel, config, arch) != digest:
            raise dsl.CompileError(
                "the source of the kernels has changed since the calling process read it: start that again"
            )
        fork = not report and host_code.Beside.worthwhile()
        if not fork:
            host_code.tvm_ffi_without_numpy()
        with contextlib.redirect_stdout(sys.stderr):
            dsl.compile_to(folder, kernel, config, arch, report=report, fork=fork)
            cache.seal(dsl.Path(folder))
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        if "No space left on device" in str(error):  # the DSL and the linker say it in words
            number = errno.ENOSPC
        return {"error": f"{type(error).__name__}: {error}", "errno": number}
    return {"ok": True}


if __name__ == "__main__":
    main()
