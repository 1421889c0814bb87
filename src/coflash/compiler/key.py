"""The name of a compiled kernel on disk: a hash of everything that decides what the compiler makes.

That is the kernel's name, its config, the architecture, the processor of the host code, the source of the kernel's
package and of `coflash.kernels.parts` (and of the module that compiles it), and the DSL's version. The version stands
in the name in clear, because a machine without the DSL has to accept whichever one made the kernel.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import json
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

FORMAT = 1  # of an entry's files; raise it when their meaning changes


@dataclass(frozen=True)
class Key:
    kernel: str
    arch: str
    digest: str
    dsl: str | None  # None: no DSL here, any version's kernel is welcome

    @property
    def stem(self) -> str:
        return f"{self.kernel.replace(':', '.')}-{self.arch}-{self.digest}"

    @property
    def folder(self) -> str:
        """The entry's folder; for a key without a version it is a pattern."""
        return f"{self.stem}-dsl{self.dsl or '*'}"


def locate(kernel_name: str) -> tuple[str, str]:
    """Module and class of a kernel: "sm90.forward" is Forward in coflash.kernels.sm90.forward; a kernel from
    elsewhere is named in full, as "package.module:Class"."""
    if ":" in kernel_name:
        module, _, name = kernel_name.partition(":")
        return module, name
    words = kernel_name.rpartition(".")[2].split("_")
    return f"coflash.kernels.{kernel_name}", "".join(word.capitalize() for word in words)


def make(kernel_name: str, config: Any, arch: str) -> Key:
    return Key(kernel_name, arch, digest(kernel_name, config, arch), dsl_version())


def digest(kernel_name: str, config: Any, arch: str) -> str:
    """Hash of everything that decides what a version of the compiler makes."""
    parts = {
        "format": FORMAT,
        "kernel": kernel_name,
        "arch": arch,
        "config": describe(config),
        "host": platform.machine(),
        "source": _source(locate(kernel_name)[0]),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def dsl_version() -> str | None:
    """The installed DSL's version, found without importing it; None where it isn't installed."""
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return None


def describe(value: Any) -> Any:
    """A config as plain JSON, the same in every process; refuses what has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.name]
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    raise TypeError(
        f"a kernel config can hold numbers, strings, enums, tuples and dataclasses, not {value!r}"
    )


@functools.cache
def _source(module: str) -> str:
    """Hash of the Python text that the kernel of `module` is made from."""
    here = Path(__file__).parent
    kernels = here.parent / "kernels"
    files = [here / "dsl.py", here / "host_code.py"]
    files += [*sorted(kernels.glob("*.py")), *sorted((kernels / "parts").rglob("*.py"))]
    if module.startswith("coflash.kernels."):
        package = kernels.joinpath(*module.split(".")[2:-1])
        files += sorted(package.rglob("*.py"))
    else:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {module!r}")
        files.append(Path(spec.origin))
    text = hashlib.sha256()
    for file in files:
        text.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return text.hexdigest()
