from __future__ import annotations

from pathlib import Path

import pytest
from tests.compiler.fake_compiler import FakeWorker

from coflash.compiler import builder


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts with an empty cache of its own."""
    root = tmp_path / "cache"
    monkeypatch.setenv("COFLASH_CACHE", str(root))
    monkeypatch.delenv("COFLASH_CACHE_READONLY", raising=False)
    builder._temporary.clear()
    builder._temporary_roots.cache_clear()
    return root


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    """Compilations take no time and are counted."""

    class Worker(FakeWorker):
        log = tmp_path / "log"

        @classmethod
        def compilations(cls) -> int:
            return len(cls.log.read_text().splitlines()) if cls.log.exists() else 0

    monkeypatch.setattr(builder, "Worker", Worker)
    return Worker
