"""Exact attention at close to the speed of a matrix product, from PyTorch, in Python alone.

The public functions are loaded on first use, so that `import coflash` costs next to nothing and neither
the kernel DSL nor a compiler is ever imported before a kernel has to be built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coflash.interface import (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
        flex_attention,
    )

__version__ = "0.1.0"

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
]

_HOME = dict.fromkeys(__all__, "coflash.interface")


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'coflash' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
