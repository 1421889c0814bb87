"""Imported by a program: from then on it runs as where nvidia-cutlass-dsl isn't installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

PACKAGES = ("cutlass", "nvidia_cutlass_dsl")
DISTRIBUTION = "nvidia-cutlass-dsl"

_find_spec, _version = importlib.util.find_spec, importlib.metadata.version


class Absent:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(name)


def find_spec(name: str, package: str | None = None) -> Any:
    return None if name in PACKAGES else _find_spec(name, package)


def version(name: str) -> str:
    if name == DISTRIBUTION:
        raise importlib.metadata.PackageNotFoundError(name)
    return _version(name)


sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
importlib.util.find_spec = find_spec
importlib.metadata.version = version
