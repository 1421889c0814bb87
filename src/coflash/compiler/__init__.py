"""From a plan to a kernel that runs: compile, keep on disk, load, launch."""

from coflash.compiler.dsl import Compiled, CompileError, compile_to

__all__ = ["CompileError", "Compiled", "compile_to"]
