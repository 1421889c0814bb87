"""Small hand-written PTX programs: a body, an output array, and what the machine says about it."""

from __future__ import annotations

import numpy as np

from coflash.vgpu import Buffer, Launch, Machine, Report

HEADER = """
.version 9.0
.target {arch}
.address_size 64
{globals}
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .u64 output, .param .u64 input, .param .u32 number)
{directives}
{{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %d<32>;
.reg .b128 %q<4>;
ld.param.b64 %d0, [output];
ld.param.b64 %d1, [input];
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
mul.wide.u32 %d2, %r0, 4;
add.s64 %d3, %d0, %d2;
add.s64 %d4, %d1, %d2;
"""
"""%r0 is the thread, %r1 the shared base, %d0 and %d1 output and input, %d3 and %d4 the thread's word of them."""


def launch(
    body: str,
    output: np.ndarray,
    given: np.ndarray | None = None,
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 16384,
    number: int = 0,
    arch: str = "sm_90a",
    module: str = "",
    directives: str = "",
) -> Launch:
    given = aligned(1024) if given is None else given
    buffers = [Buffer.of(output, "output"), Buffer.of(given, "input")]
    params = b"".join(b.address.to_bytes(8, "little") for b in buffers) + number.to_bytes(4, "little")
    text = HEADER.format(arch=arch, globals=module, directives=directives) + body + "\nret;\n}\n"
    return Launch(
        text, "test", (grid, 1, 1), (threads, 1, 1), params, (cluster, 1, 1), shared, buffers
    )  # fmt: skip


def aligned(words: int) -> np.ndarray:
    """Zeros that start at a multiple of 128 bytes, as device memory does."""
    raw = np.zeros(words + 32, np.uint32)
    skip = -raw.ctypes.data % 128 // 4
    return raw[skip : skip + words]


def run(body: str, words: int | np.ndarray = 32, given: np.ndarray | None = None, **options) -> np.ndarray:
    """The output of a program that must run without a finding."""
    output, report = try_run(body, words, given, **options)
    assert report.ok, str(report)
    return output


def try_run(
    body: str,
    words: int | np.ndarray = 32,
    given: np.ndarray | None = None,
    *,
    schedule: str = "round-robin",
    seed: int = 0,
    checks=None,
    events: bool = False,
    arch: str = "sm_90a",
    **options,
) -> tuple[np.ndarray, Report]:
    output = aligned(words) if isinstance(words, int) else words
    what = launch(body, output, given, arch=arch, **options)
    report = Machine(arch, schedule=schedule, seed=seed, checks=checks, events=events).run(what)
    return output, report


WAIT = """
{{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared.b64 done, [{barrier}], {parity};
@!done bra again;
}}
"""


def wait(barrier: str, parity: int | str) -> str:
    return WAIT.format(barrier=barrier, parity=parity)
