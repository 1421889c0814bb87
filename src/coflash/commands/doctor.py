"""`coflash doctor`: what is here, whether it works, and which path typical calls take.

Exits non-zero when something is broken: installed but unusable, or giving wrong results. What is merely not
installed isn't broken.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

import coflash
from coflash.problem import Problem

OK, ABSENT, BROKEN = "ok", "absent", "broken"


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str  # OK, ABSENT or BROKEN
    detail: str


@dataclass(frozen=True)
class Route:
    call: str
    device: str
    path: str  # "portable", "kernel", "refused", or BROKEN where planning itself failed
    reason: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    findings = [_guarded(subject, check) for subject, check in CHECKS.items()]
    routes = list(typical_routes())
    broken = [finding.subject for finding in findings if finding.state == BROKEN]
    broken += [f"{route.call} on {route.device}" for route in routes if route.path == BROKEN]
    if args.json:
        report = {
            "coflash": coflash.__version__,
            "broken": broken,
            "findings": [asdict(finding) for finding in findings],
            "calls": [asdict(route) for route in routes],
        }
        print(json.dumps(report, indent=1))
    else:
        _print(findings, routes)
        print(f"\nBroken: {', '.join(broken)}." if broken else "\nNothing is broken.")
    return 1 if broken else 0


def _guarded(subject: str, check: Callable[[], tuple[str, str]]) -> Finding:
    """A check that fails is a finding, not the end of the examination."""
    try:
        state, detail = check()
    except Exception as error:  # whatever it is, it is what the user came to hear
        state, detail = BROKEN, f"{type(error).__name__}: {error}"
    return Finding(subject, state, detail)


# --------------------------------------------------------------------------------------------- examinations


def check_python() -> tuple[str, str]:
    return OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def check_torch() -> tuple[str, str]:
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < (2, 10):
        return BROKEN, f"{torch.__version__}, {build}; coflash needs 2.10 or newer"
    return OK, f"{torch.__version__}, {build}, {torch.get_num_threads()} CPU threads"


def check_gpu() -> tuple[str, str]:
    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            names.append(f"{properties.name} (sm_{properties.major}{properties.minor}, {memory:.0f} GiB)")
        return OK, ", ".join(names)
    if Path("/dev/nvidiactl").exists():
        why = "torch can't use it" if torch.version.cuda else "this torch is built for the CPU"
        return BROKEN, f"the machine has an NVIDIA GPU, but {why}"
    return ABSENT, "no NVIDIA GPU: attention takes the portable path, kernels run on the virtual GPU"


def check_driver() -> tuple[str, str]:
    if ctypes.util.find_library("cuda") is None:
        return ABSENT, "no NVIDIA driver"
    driver = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        return BROKEN, f"cuDriverGetVersion returned {status}"
    return OK, f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def check_dsl() -> tuple[str, str]:
    dsl, ffi = _version("nvidia-cutlass-dsl"), _version("apache-tvm-ffi")
    if dsl is None and ffi is None:
        return ABSENT, 'not installed: pip install "coflash[cu13]" (or cu12) builds kernels'
    if dsl is None:
        return ABSENT, f"apache-tvm-ffi {ffi} alone: kernels compiled elsewhere run, none can be built"
    if not dsl.startswith("4.8."):
        return BROKEN, f"nvidia-cutlass-dsl {dsl}; coflash is written for 4.8"
    if ffi is None:
        return BROKEN, f"nvidia-cutlass-dsl {dsl} without apache-tvm-ffi, which kernels are called through"
    if shutil.which("gcc") is None:
        return BROKEN, f"nvidia-cutlass-dsl {dsl} is here, but not gcc, which links what it compiles"
    return OK, f"nvidia-cutlass-dsl {dsl}, apache-tvm-ffi {ffi}, gcc"


def check_cache() -> tuple[str, str]:
    from coflash.compiler import cache

    root = cache.writable_root()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return BROKEN, f"{root} can't be written to; COFLASH_CACHE names another folder"
    counts = [f"{root} ({_kernels_in(root)} kernels)"]
    for folder in cache.readonly_roots():
        if not folder.is_dir():
            return BROKEN, f"COFLASH_CACHE_READONLY names {folder}, which is not a folder"
        counts.append(f"read-only {folder} ({_kernels_in(folder)} kernels)")
    return OK, ", ".join(counts)


def check_transformers() -> tuple[str, str]:
    version = _version("transformers")
    if version is None:
        return ABSENT, "not installed"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < (5, 5):
        return ABSENT, f"{version}: register_with_transformers() needs 5.5 or newer"
    return OK, version


def check_portable() -> tuple[str, str]:
    return _compare_with_float64("cpu", "portable")


def check_kernel() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return ABSENT, "no GPU to run one on"
    from coflash.planning import device_info

    device = torch.device("cuda")
    problem = CALLS["training, 4k tokens, causal"]
    route = _route("", problem, device_info(device))
    if route.path != "kernel":
        return ABSENT, route.reason
    return _compare_with_float64("cuda", "kernel")


def _compare_with_float64(device: str, backend: Any) -> tuple[str, str]:
    """A small causal call with grouped heads, against the formula in float64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 96, 4, 64, generator=generator)
    k, v = (torch.randn(2, 128, 2, 64, generator=generator) for _ in range(2))
    q, k, v = (t.to(device, torch.bfloat16) for t in (q, k, v))
    with torch.no_grad():
        out = cast(torch.Tensor, coflash.flash_attn_func(q, k, v, causal=True, backend=backend)).double()
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        visible = torch.ones(96, 128, dtype=torch.bool, device=device).tril(32)
        scores = (q @ k.transpose(2, 3) / 8).masked_fill(~visible, -torch.inf)
        error = (out - (scores.softmax(-1) @ v).transpose(1, 2)).abs().max().item()
    state = OK if error < 0.02 else BROKEN
    return state, f"largest error against float64, in bfloat16: {error:.1e}"


CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    "Python": check_python,
    "torch": check_torch,
    "GPU": check_gpu,
    "driver": check_driver,
    "kernel compiler": check_dsl,
    "kernel cache": check_cache,
    "transformers": check_transformers,
    "portable path": check_portable,
    "kernel path": check_kernel,
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels_in(folder: Path) -> int:
    return sum(1 for _ in folder.glob("**/kernel.json")) if folder.is_dir() else 0


# -------------------------------------------------------------------------------------------- typical calls


def _call(seqlen_q: int, seqlen_k: int, heads: tuple[int, int], dim: int, **options: Any) -> Problem:
    return Problem(
        **{
            "dtype": torch.bfloat16,
            "device_type": "cpu",
            "head_dim": dim,
            "head_dim_v": dim,
            "nheads_q": heads[0],
            "nheads_kv": heads[1],
            "batch": 4,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            **options,
        }
    )


CALLS = {
    "training, 4k tokens, causal": _call(4096, 4096, (16, 16), 128, causal=True, needs_grad=True),
    "grouped heads, window and sink": _call(
        8192, 8192, (64, 8), 64, causal=True, window_left=127, has_sink=True
    ),
    "packed sequences": _call(16384, 16384, (16, 4), 128, causal=True, packed_q=True, packed_k=True),
    "decoding from a paged cache": _call(
        1, 8192, (64, 8), 128, causal=True, has_seqused_k=True, page_size=16
    ),
    "float32": _call(1024, 1024, (8, 8), 64, dtype=torch.float32),
}


def typical_routes() -> Iterator[Route]:
    """What each typical call takes on this machine, and on the GPUs that have kernels."""
    from coflash import planning

    devices: list[Any] = [None]
    if torch.cuda.is_available():
        devices = [planning.device_info(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    here = {device.arch for device in devices if device is not None}
    devices += [planning.typical(arch) for arch in ("sm_90a", "sm_100a") if arch not in here]
    for device in devices:
        for name, problem in CALLS.items():
            yield _route(name, problem, device)


def _route(name: str, problem: Problem, device: Any) -> Route:
    from coflash import planning

    where = "this machine's CPU" if device is None else f"{device.name} ({device.arch})"
    try:
        plan = planning.plan(problem, device)
    except NotImplementedError as refusal:
        return Route(name, where, "refused", str(refusal))
    except Exception as error:
        return Route(name, where, BROKEN, f"{type(error).__name__}: {error}")
    return Route(name, where, plan.path, plan.reason)


def _print(findings: list[Finding], routes: list[Route]) -> None:
    marks = {OK: "ok", ABSENT: "--", BROKEN: "BROKEN"}
    print(f"coflash {coflash.__version__}")
    for finding in findings:
        print(f"  {marks[finding.state]:6}  {finding.subject:15}  {finding.detail}")
    device = None
    for route in routes:
        if route.device != device:
            device = route.device
            print(f"\nOn {device}, typical calls take:")
        print(f"  {route.path:8}  {route.call:30}  {route.reason}")
