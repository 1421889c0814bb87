"""What planning knows of a GPU: which one it is, and what one of its multiprocessors can do in a clock."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU as a plan sees it."""

    arch: str  # the name its code is compiled for: "sm_90a", "sm_100a", "sm_103a", or a plain "sm_80"
    num_sms: int
    name: str


@dataclass(frozen=True)
class Chip:
    """Rates of one multiprocessor, per clock, and of the whole chip."""

    name: str
    num_sms: int
    clock_ghz: float  # that the kernels run at before power caps it
    mma_flop: int  # 16-bit tensor-core products
    mufu: int  # exponentials
    lanes: int  # arithmetic instructions, counted per thread
    shared_bytes: int
    l2_bytes: float  # one multiprocessor's share of the L2's bandwidth
    dram_tb_s: float
    sustained_mma: float  # share of mma_flop that a large matrix product reaches: the power cap


# sm_90a: an H200; the matrix product measured at 700 to 815 TFLOP/s of 949. sm_100a, sm_103a: published
# rates.
CHIPS = {
    "sm_90a": Chip("H200", 132, 1.755, 4096, 16, 128, 128, 42.0, 4.2, 0.85),
    "sm_100a": Chip("B200", 148, 1.85, 8192, 16, 128, 128, 42.0, 7.0, 0.80),
    "sm_103a": Chip("B300", 148, 1.85, 8192, 32, 128, 128, 42.0, 7.0, 0.80),
}

_ARCH = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def device_info(device: torch.device) -> DeviceInfo:
    """The GPU behind a CUDA device; asked of the driver once."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _device_info(index)


@functools.cache
def _device_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    arch = _ARCH.get(capability, f"sm_{capability[0]}{capability[1]}")
    return DeviceInfo(arch, properties.multi_processor_count, properties.name)


def typical(arch: str) -> DeviceInfo:
    """The GPU that an architecture's figures are predicted for, where none is at hand."""
    if arch not in CHIPS:
        raise ValueError(f"arch {arch!r}: one of {', '.join(CHIPS)}")
    chip = CHIPS[arch]
    return DeviceInfo(arch, chip.num_sms, chip.name)
