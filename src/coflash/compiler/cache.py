"""Compiled kernels on disk.

One folder for each kernel, named by its key. A folder appears whole or not at all: it is written under a
temporary name and renamed. Many processes and machines may share a cache. `COFLASH_CACHE` names the folder
that is written to (default: ~/.cache/coflash), `COFLASH_CACHE_READONLY` names more to look in, separated
as in PATH.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coflash.compiler.errors import BrokenEntry
from coflash.compiler.key import FORMAT, Key

#: What an entry holds beside its description, and what `read` checks.
FILES = ("kernel.so", "kernel.ptx", "kernel.cubin")
DESCRIPTION = "kernel.json"
LOCKS = ".locks"
STALE_SECONDS = 3600  # a temporary folder this old was left by a compiler that was killed


@dataclass(frozen=True)
class Entry:
    """One compiled kernel on disk."""

    folder: Path
    kernel: str
    arch: str
    function: str
    symbol: str
    arguments: tuple[str, ...]
    description: dict[str, Any]

    @property
    def so(self) -> Path:
        return self.folder / "kernel.so"

    @property
    def ptx(self) -> Path:
        return self.folder / "kernel.ptx"

    @property
    def resources(self) -> list[dict[str, Any]]:
        return self.description["resources"]


def writable_root() -> Path:
    named = os.environ.get("COFLASH_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coflash"


def readonly_roots() -> tuple[Path, ...]:
    named = os.environ.get("COFLASH_CACHE_READONLY", "")
    return tuple(Path(part).expanduser() for part in named.split(os.pathsep) if part)


def seal(folder: Path) -> None:
    """Write sizes and hashes into a finished folder's description, so that `read` can tell a broken one."""
    description = json.loads((folder / DESCRIPTION).read_text())
    description["format"] = FORMAT
    description["files"] = {name: _fingerprint(folder / name) for name in FILES}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def read(folder: Path) -> Entry:
    """The entry in a folder, every byte checked; BrokenEntry otherwise."""
    try:
        d = json.loads((folder / DESCRIPTION).read_text())
        if d["format"] != FORMAT:
            raise BrokenEntry(f"{folder} has format {d['format']}, not {FORMAT}")
        for name in FILES:
            if _fingerprint(folder / name) != d["files"][name]:
                raise BrokenEntry(f"{folder / name} isn't the file that was written")
        return Entry(folder, d["kernel"], d["arch"], d["function"], d["symbol"], tuple(d["arguments"]), d)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenEntry(f"{folder}: {error}") from error


def find(key: Key) -> Entry | None:
    """The entry of a key, from the writable cache or a read-only one."""
    root = writable_root()
    for place in (root, *readonly_roots()):
        entry = find_in(place, key, readonly=place != root)
        if entry is not None:
            return entry
    return None


def find_in(root: Path, key: Key, *, readonly: bool = False) -> Entry | None:
    """The entry of a key in one cache. A broken one is removed, or reported where the cache is read-only."""
    for folder in _candidates(root, key):
        try:
            return read(folder)
        except BrokenEntry as error:
            if readonly:
                warnings.warn(f"skipping a broken kernel: {error}", RuntimeWarning, stacklevel=2)
            else:
                discard(folder)
    return None


def _candidates(root: Path, key: Key) -> list[Path]:
    if key.dsl is not None:
        folder = root / key.folder
        return [folder] if folder.is_dir() else []
    with contextlib.suppress(OSError):
        return sorted(root.glob(key.folder), reverse=True)
    return []


@contextlib.contextmanager
def writing(root: Path, key: Key) -> Iterator[Path]:
    """A temporary folder in `root` to compile into; other processes that can lock wait for this key."""
    locks = root / LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with _locked(locks / key.stem):
        _sweep(root)
        folder = root / f".making-{os.getpid()}-{uuid.uuid4().hex}"
        folder.mkdir()  # with everybody's permissions, unlike tempfile's: a cache can be shared
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, root: Path, key: Key) -> Entry:
    """Give a sealed folder its name. A good entry that another process published first is kept."""
    target = root / key.folder
    for _ in range(3):
        try:
            os.rename(folder, target)
        except OSError:
            if not target.is_dir():
                raise
            try:
                return read(target)
            except BrokenEntry:
                discard(target)
        else:
            return read(target)
    raise BrokenEntry(f"{target} can't be replaced")


def discard(folder: Path) -> None:
    """Remove an entry: renamed first, so that nobody reads half of it. Removing what is gone is no error."""
    trash = folder.with_name(f".making-{os.getpid()}-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        os.rename(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The system drops it when a process dies; where locks don't work, go on without."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # a network filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(root: Path) -> None:
    for left in root.glob(".making-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _fingerprint(file: Path) -> list[Any]:
    data = file.read_bytes()
    return [len(data), hashlib.sha256(data).hexdigest()]
