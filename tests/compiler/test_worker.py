"""What the compiler process does to start sooner changes nothing but when."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types

import pytest

from coflash.compiler import worker


def test_dataclasses_with_methods_compiled_late(monkeypatch):
    made = []
    if compile_now := getattr(dataclasses, "_create_fn", None):
        monkeypatch.setattr(
            dataclasses,
            "_create_fn",
            lambda name, *a, **k: (made.append(name), compile_now(name, *a, **k))[1],
        )
        worker.compile_methods_late()

    @dataclasses.dataclass(frozen=True, order=True)
    class Point:
        x: int
        y: list[int] = dataclasses.field(default_factory=list, compare=False)

    assert set(made) <= {"__init__"}
    one, two = Point(1), Point(2, y=[3])
    assert one == Point(1, [9]) and one != two and one < two and hash(one) == hash(Point(1))
    assert repr(two).endswith("Point(x=2, y=[3])") and one != (1,)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        one.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x  # type: ignore[misc]


def test_modules_run_when_they_are_asked_for_something(monkeypatch, tmp_path):
    (tmp_path / "seldom_used.py").write_text("import sys\nsys.seldom_used = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "SELDOM", {"seldom_used"})
    monkeypatch.setattr(sys, "meta_path", [worker.Lazily(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "seldom_used", raising=False)
    module = importlib.import_module("seldom_used")
    assert isinstance(module, types.ModuleType) and not hasattr(sys, "seldom_used")
    assert module.value == 3 and sys.seldom_used
    monkeypatch.delattr(sys, "seldom_used")
