"""The config of the tests' kernel, apart from it as the real ones are: importing it doesn't import the
DSL.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleConfig:
    threads: int = 256
    unroll: int = 1
