"""Small hand-written kernels for the virtual GPU: an image in shared memory, one instruction, results."""

from __future__ import annotations

import numpy as np

from coflash.vgpu.launch import Buffer, Launch
from coflash.vgpu.machine import Machine

from .on_hardware import Watch

THREADS = 128


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(first, first + count)) + "}"


def store_all(first: int, count: int, pointer: str = "%d1") -> str:
    """Every thread writes its registers to output[thread][...]; uses %d18 and %r0 (the thread)."""
    lines = [f"mul.wide.u32 %d18, %r0, {4 * count};", f"add.s64 %d18, {pointer}, %d18;"]
    for i in range(count):
        lines.append(f"st.global.b32 [%d18+{4 * i}], %r{first + i};")
    return "\n".join(lines)


def load_all(first: int, count: int, pointer: str = "%d5") -> str:
    """Every thread reads its registers from input[thread][...]."""
    lines = [f"mul.wide.u32 %d18, %r0, {4 * count};", f"add.s64 %d18, {pointer}, %d18;"]
    for i in range(count):
        lines.append(f"ld.global.b32 %r{first + i}, [%d18+{4 * i}];")
    return "\n".join(lines)


def source(arch: str, body: str, image_bytes: int) -> str:
    """The kernel: %r0 is the thread, %r2 the shared base, %d0, %d1, %d5 the CTA's image, output, input."""
    copies = []
    for offset in range(0, image_bytes, 16 * THREADS):
        copies.append(f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d3+{offset}];")
        copies.append(f"st.shared.v4.b32 [%r3+{offset}], {{%r4, %r5, %r6, %r7}};")
    return f"""
.version 9.0
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .u64 image, .param .u64 output, .param .u64 input, .param .u32 sizes)
{{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<700>;
.reg .b64 %d<32>;
ld.param.b64 %d0, [image];
ld.param.b64 %d1, [output];
ld.param.b64 %d5, [input];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mul.wide.u32 %d4, %r1, {image_bytes};
add.s64 %d0, %d0, %d4;
ld.param.b32 %r8, [sizes];
mul.wide.u32 %d4, %r1, %r8;
add.s64 %d1, %d1, %d4;
add.s64 %d5, %d5, %d4;
shl.b32 %r1, %r0, 4;
cvt.u64.u32 %d2, %r1;
add.s64 %d3, %d0, %d2;
mov.u32 %r2, smem;
add.s32 %r3, %r2, %r1;
{chr(10).join(copies)}
fence.proxy.async.shared::cta;
bar.sync 0;
{body}
ret;
}}
"""


def run(
    arch: str,
    body: str,
    image: np.ndarray,
    words: int,
    given: np.ndarray | None = None,
    ctas: int = 1,
    extra_shared: int = 1024,
    schedule: str = "round-robin",
) -> np.ndarray:
    """Run with all checks on; no finding is allowed. Returns the output, uint32 [ctas, THREADS, words].

    image: uint8 [ctas, bytes], a multiple of 2048 bytes each; given: the input, as the output.
    """
    image = np.ascontiguousarray(image).reshape(ctas, -1)
    output = np.zeros((ctas, THREADS, words), np.uint32)
    given = np.zeros_like(output) if given is None else np.ascontiguousarray(given, np.uint32)
    buffers = [Buffer.of(image, "image"), Buffer.of(output, "output"), Buffer.of(given, "input")]
    params = b"".join(b.address.to_bytes(8, "little") for b in buffers)
    params += (THREADS * words * 4).to_bytes(4, "little")
    launch = Launch(
        source(arch, body, image.shape[1]),
        "test",
        (ctas, 1, 1),
        (THREADS, 1, 1),
        params,
        cluster=(ctas, 1, 1),
        shared_bytes=image.shape[1] + extra_shared,
        buffers=buffers,
    )
    watch = Watch(launch)
    report = Machine(arch=arch, schedule=schedule, seed=1).run(launch)
    assert not report.findings, "\n\n".join(str(f) for f in report.findings)
    watch.finished()
    return output


def place(memory: np.ndarray, offsets: np.ndarray, elements: np.ndarray) -> None:
    """Write raw elements into shared-memory bytes at their byte offsets."""
    memory.view(elements.dtype)[offsets // elements.itemsize] = elements


def small_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], type_: str
) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements and their values; all sums of products of them are exact."""
    from coflash.vgpu.units.arith import to_float32

    if type_ in ("s8", "u8"):
        raw = rng.integers(0, 256, shape, dtype=np.uint8)
    else:
        pool = np.array([-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4], np.float32)
        values = pool[rng.integers(0, len(pool), shape)]
        if type_ in ("tf32", "f32"):
            raw = values.view(np.uint32)
        elif type_ == "f16":
            raw = values.astype(np.float16).view(np.uint16)
        elif type_ == "bf16":
            raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            codes = np.arange(
                256 if type_[1:] in ("4m3", "5m2") else 16 if type_ == "e2m1" else 64, dtype=np.uint8
            )
            table = to_float32(codes, type_)
            raw = codes[np.array([int(np.flatnonzero(table == v)[0]) for v in values.ravel()])].reshape(shape)
    return raw, to_float32(raw, type_)
