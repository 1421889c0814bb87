"""Layouts that CuTe-DSL prints, read back and evaluated: a second source for the index maps.

The DSL fixes its architecture when it is imported, so it runs in a process of its own per architecture.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from typing import Any

import numpy as np
import pytest


def needs_dsl(test: Any) -> Any:
    """For tests that ask the DSL: skipped where it is missing, and in one process, which keeps its answers."""
    missing = importlib.util.find_spec("cutlass") is None
    test = pytest.mark.skipif(missing, reason="nvidia-cutlass-dsl is missing")(test)
    return pytest.mark.xdist_group("printed layouts")(test)


def printed(arch: str, body: str) -> dict[str, str]:
    """Run statements inside a traced function that call show(name, layout); the layouts as text."""
    program = (
        "import json\n"
        "import cutlass, cutlass.cute as cute\n"
        "from cutlass import *\n"
        "from cutlass.cute.nvgpu import warp, warpgroup, tcgen05, OperandMajorMode\n"
        "found = {}\n"
        "def show(name, layout):\n"
        "    found[name] = str(layout)\n"
        "@cute.jit\n"
        "def traced():\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
        "if __name__ == '__main__':\n"
        "    cute.compile(traced)\n"
        "    print('LAYOUTS ' + json.dumps(found))\n"
    )
    return _run(arch, program)


@cache
def _run(arch: str, program: str) -> dict[str, str]:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py") as f:  # the DSL reads the source of what it traces
        f.write(program)
        f.flush()
        environment = {**os.environ, "CUTE_DSL_ARCH": arch}
        done = subprocess.run(
            [sys.executable, f.name], env=environment, capture_output=True, text=True, timeout=300
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LAYOUTS ")]
    assert lines, done.stdout + done.stderr
    result: dict[str, str] = json.loads(lines[0][8:])
    return result


def parse(text: str) -> tuple[Any, Any, tuple[int, int, int] | None]:
    """(shape, stride, swizzle) of "S<3,4,3> o 0 o (8,4):(1,8)" or of a plain layout."""
    swizzle = None
    match = re.match(r"S<(\d+),(\d+),(\d+)> o 0 o ", text)
    if match:
        swizzle = (int(match[1]), int(match[2]), int(match[3]))
        text = text[match.end() :]
    shape, stride = text.split(":")
    return ast.literal_eval(shape), ast.literal_eval(stride), swizzle


def _offsets(shape: Any, stride: Any) -> np.ndarray:
    """Offset of every linear index of one mode, first sub-mode fastest."""
    if isinstance(shape, int):
        return np.arange(shape) * stride
    total = np.zeros(1, np.int64)
    for s, d in zip(shape, stride, strict=True):
        total = (total[None, :] + _offsets(s, d)[:, None]).ravel()
    return total


def table(text: str) -> np.ndarray:
    """Offsets of a layout with two top modes, as [size of mode 0, size of mode 1]; without its swizzle."""
    shape, stride, _ = parse(text)
    first, second = _offsets(shape[0], stride[0]), _offsets(shape[1], stride[1])
    return first[:, None] + second[None, :]
