"""coflash under the names other libraries call attention by: PyTorch's SDPA and transformers.

Importing this package imports neither; each name is loaded from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coflash.integrations.pytorch import (
        disable_sdpa,
        enable_sdpa,
        register_sdpa,
        sdpa,
        use_coflash_sdpa,
    )
    from coflash.integrations.transformers import register_with_transformers

__all__ = [
    "disable_sdpa",
    "enable_sdpa",
    "register_sdpa",
    "register_with_transformers",
    "sdpa",
    "use_coflash_sdpa",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'coflash.integrations' has no attribute {name!r}")
    home = "transformers" if name == "register_with_transformers" else "pytorch"
    return getattr(importlib.import_module(f"coflash.integrations.{home}"), name)
