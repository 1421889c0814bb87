"""The parts of `coflash demo`."""
