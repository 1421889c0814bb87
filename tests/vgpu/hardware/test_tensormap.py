"""The tensor-map decoder against 1000 maps that a driver (580.159) encoded on an H200."""

from pathlib import Path

import numpy as np
import pytest

from coflash.vgpu import tensormap
from coflash.vgpu.tensormap import TensorMap
from coflash.vgpu.units.formats import UnsupportedInstruction

KINDS = "u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32ftz tf32 tf32ftz".split()  # CUtensorMapDataType
SIZES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parent / "data" / "tensormaps.npz"))


def _expected(recorded: dict[str, np.ndarray], i: int) -> TensorMap:
    rank, kind = int(recorded["rank"][i]), int(recorded["kind"][i])

    def row(name: str, length: int = rank) -> tuple[int, ...]:
        return tuple(int(x) for x in recorded[name][i][:length])

    return TensorMap(
        address=int(recorded["address"][i]),
        element=KINDS[kind],
        extents=row("extents"),
        strides=(SIZES[kind], *row("strides", rank - 1)),
        box=row("box"),
        element_strides=row("element_strides"),
        swizzle=(0, 32, 64, 128)[int(recorded["swizzle"][i])],
        interleave=(0, 16, 32)[int(recorded["interleave"][i])],
        nan_fill=bool(recorded["nan_fill"][i]),
    )


def test_decodes_every_map_the_driver_encoded(recorded):
    assert len(recorded["raw"]) == 1000
    for i, raw in enumerate(recorded["raw"]):
        assert tensormap.decode(raw.tobytes()) == _expected(recorded, i)


def test_encodes_what_the_driver_encodes(recorded):
    for i, raw in enumerate(recorded["raw"]):
        promotion = (0, 64, 128, 256)[int(recorded["l2"][i])]
        made = tensormap.encode(_expected(recorded, i), promotion)
        assert made[:64] == raw[:64].tobytes()


def test_box_bytes_are_the_drivers(recorded):
    """The driver keeps the size of a box in the map, which is what a copy adds to a transaction count.

    It divides by element strides rounding down where the manual rounds up, so maps with such strides are
    left out.
    """
    compared = 0
    for i, raw in enumerate(recorded["raw"]):
        if max(recorded["element_strides"][i]) > 1:
            continue
        try:
            tile = _expected(recorded, i).tile
        except UnsupportedInstruction:  # interleaved, or a box narrower than its swizzle
            continue
        assert tile.box_bytes == int(raw.view("<u4")[16]), f"map {i}: {tile}"
        compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("word", "bits", "message"),
    [
        (2, 1 << 0, "unknown flags 0x1"),
        (2, 1 << 22, "unknown flags 0x400000"),
        (2, 5 << 4, "rank"),
        (2, 15 << 7, "element type 15"),
        (2, 3 << 11, "interleave 3"),
        (2, 1 << 16, "rounds u8 to tf32"),
        (13, 1 << 15, "unknown bits"),
    ],
)
def test_refuses_what_it_does_not_understand(word, bits, message):
    words = np.frombuffer(
        tensormap.encode(TensorMap(1 << 20, "u8", (64, 8), (1, 64), (16, 8), (1, 1))), "<u4"
    ).copy()
    words[word] |= bits
    with pytest.raises(ValueError, match=message):
        tensormap.decode(words.tobytes())


def test_refuses_a_short_map():
    with pytest.raises(ValueError, match="128 bytes"):
        tensormap.decode(bytes(64))
