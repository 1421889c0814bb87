"""The models of the approximate functions against an H200's results (driver 580.159).

The models are the float64 function, rounded. How far the hardware is from that, at most, over every float32
is in data/approximation_errors.json; here the same bounds must hold between hardware and model on the
recorded sample, and NaNs, infinities and zeros must be the same.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.vgpu.hardware.samples import FLOAT16, FLOAT32, float16_inputs, float32_inputs

from coflash.vgpu.units import arith

DATA = Path(__file__).parent / "data"
ULP = {"ex2": 2, "rcp": 1, "rsqrt": 2, "sqrt": 1, "tanh": 134}
ABSOLUTE = {"sin": 2**-21, "cos": 2**-21, "lg2": 2**-22}


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "approximations.npz"))


def _model(operation: str, given: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(arith.resolve(operation)(given)).view(given.dtype)


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Integers whose differences count representable values."""
    signed = bits.view(f"i{bits.itemsize}").astype(np.int64)
    return np.where(signed < 0, -(signed & (1 << (8 * bits.itemsize - 1)) - 1), signed)


@pytest.mark.parametrize("operation", FLOAT32)
def test_float32(operation, recorded):
    given = float32_inputs(operation)
    hardware, model = recorded[operation].view(np.float32), _model(operation, given).view(np.float32)
    assert np.array_equal(np.isnan(hardware), np.isnan(model))
    assert np.array_equal(recorded[operation][np.isnan(hardware)], model.view(np.uint32)[np.isnan(model)])
    infinite = np.isinf(hardware)
    assert np.array_equal(infinite, np.isinf(model))
    assert np.array_equal(hardware[infinite], model[infinite])

    name = operation.split(".")[0]
    finite = np.isfinite(hardware)
    if name in ("sin", "cos"):
        finite &= np.abs(given.view(np.float32)) <= np.float32(np.pi)
    distance = np.abs(_ordered(recorded[operation]) - _ordered(model.view(np.uint32)))[finite]
    off = np.abs(hardware[finite].astype(np.float64) - model[finite])
    if name in ULP:
        assert distance.max() <= ULP[name]
        assert np.array_equal(hardware[finite] == 0, model[finite] == 0)
    elif name == "lg2":  # small near 1, where the result goes through zero; elsewhere the last bits
        assert np.all((off <= ABSOLUTE[name]) | (distance <= 2))
    else:
        assert off.max() <= ABSOLUTE[name]


@pytest.mark.parametrize("operation", FLOAT16)
def test_every_16_bit_input(operation, recorded):
    hardware, model = recorded[operation], _model(operation, float16_inputs())
    infinity = 0x7C00 if operation.endswith(".f16") else 0x7F80
    assert np.array_equal((hardware & 0x7FFF) > infinity, (model & 0x7FFF) > infinity)
    assert np.abs(_ordered(hardware) - _ordered(model)).max() <= 1
    special = (float16_inputs() & 0x7FFF == 0) | ((hardware & 0x7FFF) >= infinity)
    assert np.array_equal(hardware[special], model[special])


def test_bounds_are_those_measured_over_every_float32():
    measured = json.loads((DATA / "approximation_errors.json").read_text())
    for operation in FLOAT32:
        name = operation.split(".")[0]
        if name in ULP:
            assert measured[operation]["ulp"] <= ULP[name]
        elif name != "lg2":
            assert measured[operation]["absolute"] <= ABSOLUTE[name]
