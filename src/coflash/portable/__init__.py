"""Attention in PyTorch operations, tile by tile: runs anywhere, and is the algorithm written to be read."""

from coflash.portable.attention import backward, double_backward, forward
from coflash.portable.softmax import Numerics, chosen, using

__all__ = ["Numerics", "backward", "chosen", "double_backward", "forward", "using"]
