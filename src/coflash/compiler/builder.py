"""Find a kernel, or have it made: one, or many at once in processes.

A kernel that can't be kept (a full or read-only disk) is made in a private temporary folder and used from
there.
"""

from __future__ import annotations

import atexit
import errno
import functools
import importlib.util
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coflash.compiler import cache, runtime
from coflash.compiler import key as keys
from coflash.compiler.cache import Entry
from coflash.compiler.errors import CompileError
from coflash.compiler.key import Key

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)


@dataclass(frozen=True)
class Job:
    """What to compile."""

    kernel: str
    config: Any
    arch: str

    @property
    def key(self) -> Key:
        return keys.make(self.kernel, self.config, self.arch)


def build(kernel_name: str, config: Any, arch: str) -> Entry:
    """The compiled kernel, from a cache or made now."""
    job = Job(kernel_name, config, arch)
    key = job.key
    entry = cache.find(key) or _temporary.get(key)
    if entry is None:
        # Running the kernel will need two libraries, which this process can load while another compiles.
        threading.Thread(target=runtime.prepare, args=(cache.readonly_roots(),), daemon=True).start()
        with Worker() as worker:
            entry = _make(job, key, cache.writable_root(), worker)
    return entry


def build_many(
    jobs: Iterable[Job],
    *,
    root: Path | None = None,
    processes: int | None = None,
    progress: Callable[[Job, Entry], None] | None = None,
) -> list[Entry]:
    """Compile several kernels in several processes. With `root`, every kernel is put there, whatever
    caches hold.
    """
    wanted = list(jobs)
    free: list[Worker] = []
    lock = threading.Lock()

    def one(job: Job) -> Entry:
        key = job.key
        found = cache.find_in(root, key) if root else cache.find(key)
        if found is None:
            with lock:
                worker = free.pop() if free else Worker()
            try:
                found = _make(job, key, root or cache.writable_root(), worker, shipped=root is not None)
            finally:
                with lock:
                    free.append(worker)
        if progress:
            progress(job, found)
        return found

    try:
        with ThreadPoolExecutor(processes or os.cpu_count() or 1) as pool:
            return list(pool.map(one, wanted))
    finally:
        for worker in free:
            worker.close()


_temporary: dict[Key, Entry] = {}  # kernels of this process that no cache could keep


def _make(job: Job, key: Key, root: Path, worker: Worker, *, shipped: bool = False) -> Entry:
    """Compile into `root`. Unless the entry is to be shipped, a private temporary folder will do as well."""
    if key.dsl is None:
        raise CompileError(
            f"{job.kernel} for {job.arch} isn't compiled yet, and compiling needs nvidia-cutlass-dsl, which "
            "isn't installed; make a folder with `coflash compile` elsewhere and name it in "
            "COFLASH_CACHE_READONLY"
        )
    refusals = []
    for place in _places(root, shipped):
        try:
            with cache.writing(place, key) as folder:
                entry = cache.find_in(place, key)  # whoever held the lock before may have made it
                if entry is None:
                    worker.run(job, folder, report=shipped)
                    entry = cache.publish(folder, place, key)
        except OSError as error:
            refusals.append(error)
            continue
        if refusals:
            warnings.warn(
                f"the compiled kernel {job.kernel} could not be kept on disk; "
                f"the next process will compile it again: {refusals[0]}",
                RuntimeWarning,
                stacklevel=4,
            )
            _temporary[key] = entry
        return entry
    raise CompileError(f"no room for compiled kernels: {'; '.join(map(str, refusals))}") from refusals[-1]


def _places(root: Path, shipped: bool) -> Iterator[Path]:
    yield root
    if not shipped:
        yield from _temporary_roots()


@functools.cache
def _temporary_roots() -> tuple[Path, ...]:
    roots = []
    for place in (None, "/dev/shm"):
        try:
            roots.append(Path(tempfile.mkdtemp(prefix="coflash-", dir=place)))
        except OSError:
            continue
    for root in roots:
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return tuple(roots)


class Worker:
    """A compiler process, started when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job, folder: Path, *, report: bool = False) -> None:
        """Compile one kernel into `folder`. OSError where the disk refused, CompileError otherwise."""
        digest = job.key.digest
        try:
            message = pickle.dumps((str(folder), job.kernel, job.config, job.arch, report, digest))
        except Exception as error:
            raise CompileError(f"{job.config!r} can't be sent to a compiler process: {error}") from error
        process = self._start(job.arch)
        assert process.stdin and process.stdout
        try:
            process.stdin.write(struct.pack("<q", len(message)) + message)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._process = None
            raise CompileError(f"the compiler process for {job.kernel} ended with code {process.wait()}")
        answer = json.loads(line)
        if "ok" not in answer:
            if answer["errno"] in _NO_ROOM:
                raise OSError(answer["errno"], answer["error"])
            raise CompileError(answer["error"])

    def close(self) -> None:
        """Let the process end, and reap it: giving its memory back takes a while, which nobody waits for."""
        if self._process is not None:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            self._process.stdout.close()
            threading.Thread(target=self._process.wait, daemon=True).start()
            self._process = None

    def _start(self, arch: str) -> subprocess.Popen[bytes]:
        if self._process is None:
            # The DSL reads many settings from the environment; a kernel is what its config says, and no more.
            env = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
            env |= {
                "CUTE_DSL_ARCH": arch,  # else the DSL asks the driver
                "CUDA_VISIBLE_DEVICES": "",  # compiling takes no GPU memory
                "OPENBLAS_NUM_THREADS": "1",  # of NumPy, which the DSL imports: it would start one for each core
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            if _dsl_is_source_only():
                env.pop("PYTHONDONTWRITEBYTECODE", None)
                env["PYTHONPYCACHEPREFIX"] = str(cache.writable_root() / "bytecode")
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
        return self._process


def _dsl_is_source_only() -> bool:
    """Whether the DSL was installed without bytecode, and none will be put beside it: each compiler process would
    then translate its 450 modules again, which takes longer than everything else it does."""
    spec = importlib.util.find_spec("cutlass")
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return False
    return sys.dont_write_bytecode or not os.access(os.path.dirname(os.path.dirname(spec.cached)), os.W_OK)
