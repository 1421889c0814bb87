"""The recorder over a host object written by hand in C, so that every byte it must report is known."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from coflash.vgpu import recorder
from coflash.vgpu.recorder import RecorderError, host_memory, parameter_layout, record

pytest.importorskip("tvm_ffi")
if not (shutil.which("cc") or shutil.which("gcc")):
    pytest.skip("needs a C compiler", allow_module_level=True)

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(
  .param .u64 kernel_param_0,
  .param .u32 kernel_param_1,
  .param .align 64 .b8 kernel_param_2[128]
)
.reqntid 128, 1, 1
{ ret; }
"""
MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount


def _object(folder: Path, *flags: str, name: str = "host") -> Path:
    target = folder / f"{name}.o"
    source = Path(__file__).with_name("host.c")
    command = ["cc", "-c", "-fPIC", '-DKERNEL="kernel"', *flags, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    return _object(tmp_path_factory.mktemp("object"))


def test_launch_is_recorded_whole(host):
    data = np.arange(10, dtype=np.float32)
    (launch,) = record(host, PTX, names=["x"])(data, 10, MULTIPROCESSORS)
    assert launch.kernel == "kernel"
    assert launch.grid == (132, 2, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (2, 1, 1)
    assert launch.shared_bytes == 4096
    params = launch.params
    assert len(params) == 192
    assert int.from_bytes(params[:8], "little") == data.ctypes.data
    assert int.from_bytes(params[8:12], "little") == 10
    assert params[64:] == bytes([7] * 128)
    (buffer,) = launch.buffers
    assert (buffer.address, buffer.nbytes, buffer.name) == (data.ctypes.data, 40, "x")


def test_buffers_are_the_tensors_memory(host):
    data = np.zeros(10, dtype=np.float32)
    (launch,) = record(host, PTX)(data, 10, MULTIPROCESSORS)
    launch.buffers[0].data.view(np.float32)[3] = 5.0
    assert data[3] == 5.0


def test_linked_object_and_ptx_file(host, tmp_path):
    linked = tmp_path / "host.so"
    subprocess.run(["cc", "-shared", str(host), str(recorder.build()), "-o", str(linked)], check=True)
    (tmp_path / "host.ptx").write_text(PTX)
    (launch,) = record(linked, multiprocessors=6)(np.zeros(4), 4, MULTIPROCESSORS)
    assert launch.grid[0] == 6


def test_argument_error_of_the_host_code_is_passed_on(host):
    with pytest.raises(RecorderError, match="launch: expects 3 arguments"):
        record(host, PTX)(np.zeros(4))


def test_unknown_attribute_is_named(host):
    with pytest.raises(RecorderError, match="attribute 200"):
        record(host, PTX)(np.zeros(4), 4, 200)


def test_missing_symbol_is_named(tmp_path):
    """Also where a real runtime, loaded before, would offer it."""
    needy = _object(tmp_path, "-DNEEDS_MORE", name="needy")
    with pytest.raises(RecorderError, match="needs _cudaGraphLaunch, which the recorder does not offer"):
        record(needy, PTX)


def test_kernel_missing_from_the_ptx_is_named(host):
    other = PTX.replace("kernel(", "other(")
    with pytest.raises(RecorderError, match="the PTX has no kernel kernel; it has other"):
        record(host, other)(np.zeros(4), 4, MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (PTX.replace("sm_90a", "sm_80"), "is for sm_80"),
        (PTX.replace(".target sm_90a", ""), "names no .target"),
        ("missing.ptx", "cannot be read"),
    ],
)
def test_unusable_ptx(host, ptx, message):
    with pytest.raises(RecorderError, match=message):
        record(host, ptx)


def test_unusable_object(tmp_path):
    text = tmp_path / "x.so"
    text.write_bytes(b"not an object\0__tvm_ffi_f\0")
    with pytest.raises(RecorderError, match="not an ELF object"):
        record(text, PTX)
    with pytest.raises(RecorderError, match="does not exist"):
        record(tmp_path / "y.so", PTX)


def test_wrong_function_name(host):
    with pytest.raises(RecorderError, match="does not export other; it exports"):
        record(host, PTX, function="other")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("COFLASH_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RecorderError, match="needs a C compiler, and no-such-compiler is not on the PATH"):
        recorder.build()


def test_parameter_layout_follows_natural_alignment():
    ptx = """.visible .entry f(
      .param .b8 a, .param .u64 .ptr .global .align 16 b, .param .f32 c, .param .align 16 .b8 d[20], .param
      .u16 e
    ) { ret; }"""
    assert parameter_layout(ptx, "f") == [(0, 1), (8, 8), (16, 4), (32, 20), (52, 2)]
    assert parameter_layout(".entry g() { ret; }", "g") == []


def test_host_memory_spans_a_strided_view():
    base = np.zeros((4, 6), np.float32)
    view = base[1:3, 2:4]
    memory = host_memory(view, "view")
    assert memory.address == view.ctypes.data
    assert memory.nbytes == (6 + 2) * 4
    assert host_memory(np.zeros((0, 3))) is None
    with pytest.raises(RecorderError, match="negative stride"):
        host_memory(base[::-1], "flipped")


def test_views_of_one_allocation_become_one_buffer():
    base = np.zeros(64, np.uint8)
    parts = [host_memory(base[:32], "k"), host_memory(base[16:64], "v"), host_memory(base.copy(), "q")]
    merged = {b.name: b for b in recorder.merge_buffers(parts)}
    assert set(merged) == {"k+v", "q"}
    assert (merged["k+v"].address, merged["k+v"].nbytes) == (base.ctypes.data, 64)


def test_encoded_tensor_maps_are_the_drivers():
    """Host code may ask the driver for its tensor maps; the recorder answers as a driver did, on 1000 of
    them."""
    data = np.load(Path(__file__).parents[1] / "hardware" / "data" / "tensormaps.npz")
    encode = recorder._runtime()._cuTensorMapEncodeTiled
    out = (ctypes.c_uint8 * 128)()
    columns = [data[n] for n in ("extents", "strides", "box", "element_strides")]
    for i, raw in enumerate(data["raw"]):
        extents, strides = (np.ascontiguousarray(c[i], np.uint64) for c in columns[:2])
        box, element_strides = (np.ascontiguousarray(c[i], np.uint32) for c in columns[2:])
        status = encode(
            out,
            ctypes.c_uint32(int(data["kind"][i])),
            ctypes.c_uint32(int(data["rank"][i])),
            ctypes.c_uint64(int(data["address"][i])),
            *(ctypes.c_void_p(a.ctypes.data) for a in (extents, strides, box, element_strides)),
            *(ctypes.c_uint32(int(data[n][i])) for n in ("interleave", "swizzle", "l2", "nan_fill")),
        )
        assert status == 0
        assert bytes(out)[:64] == raw[:64].tobytes()
