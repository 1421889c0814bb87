"""Pack calls of compiled kernels for a GPU machine without a compiler: shared objects, inputs, argument
lists."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from coflash.vgpu import Buffer, Launch, record
from coflash.vgpu.recorder import host_memory, merge_buffers


def runtime_libraries() -> list[str]:
    import cutlass
    import tvm_ffi

    libraries = Path(cutlass.__file__).parents[2] / "cu13" / "lib"
    return [str(libraries / "libcute_dsl_runtime.so"), tvm_ffi.libinfo.find_libtvm_ffi()]


def link(object_file: Path, target: Path) -> None:
    if object_file.suffix == ".so":
        shutil.copy(object_file, target)
        return
    subprocess.run(["cc", "-shared", str(object_file), *runtime_libraries(), "-o", str(target)], check=True)


def tensor_spec(tensor: Any) -> dict:
    return {
        "address": tensor.data_ptr(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "strides": tuple(tensor.stride()),
    }


def argument_spec(value: Any, tensors: list) -> Any:
    if hasattr(value, "__dlpack__"):
        tensors.append(value)
        return tensor_spec(value)
    if isinstance(value, (tuple, list)):
        return tuple(argument_spec(v, tensors) for v in value)
    return value


class Pack:
    """One case: give it each call before anything runs, then `write`."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self._calls: list[tuple[str, str, list]] = []
        self._tensors: list = []

    def add(self, object_file: Path, function: str, arguments: Iterable[Any]) -> None:
        target = self.folder / f"{self.name}.{len(self._calls)}.so"
        link(object_file, target)
        specs = [argument_spec(value, self._tensors) for value in arguments]
        self._calls.append((target.name, function, specs))

    def write(self, outputs: dict[str, Any]) -> None:
        memory = [host_memory(tensor) for tensor in self._tensors]
        storages = [(b.address, b.data.tobytes()) for b in merge_buffers(b for b in memory if b is not None)]
        packed = {
            "calls": self._calls,
            "storages": storages,
            "outputs": {name: tensor_spec(tensor) for name, tensor in outputs.items()},
        }
        (self.folder / f"{self.name}.pkl").write_bytes(pickle.dumps(packed))


# The package's own kernels: cases of `coflash verify`, with random inputs and with exact ones.
OWN = ("d64", "d128 causal")


def own_call(name: str, exact: bool, sink: Callable[..., Any]) -> dict[str, Any]:
    """Give `sink` a case's compiled kernel and its arguments; the outputs among them."""
    from dataclasses import replace

    import torch

    from coflash import compiler, planning
    from coflash.commands import verify
    from coflash.compiler import launch
    from coflash.operands import Operands

    problem = {**verify.CASES, **verify.MORE_CASES}[name]
    device = replace(planning.typical("sm_90a"), num_sms=verify.MULTIPROCESSORS)
    plan = planning.plan(problem, device, backend="kernel")
    entry = compiler.build(plan.kernel, plan.config, plan.arch)
    operands = Operands(**verify.random_operands(problem))
    if exact:
        # Row i of q and k is 64 times unit vector i mod head_dim: a power of two of keys have all the
        # weight.
        for t in (operands.q, operands.k):
            row, column = torch.arange(t.shape[1])[:, None], torch.arange(t.shape[-1])
            t.copy_(64.0 * (row % t.shape[-1] == column)[None, :, None, :])
        operands.v.copy_((operands.v.float() * 4).round().clamp(-8, 8))
    out = torch.full((*operands.q.shape[:-1], problem.head_dim_v), math.nan, dtype=problem.dtype)
    lse = torch.full((problem.batch, problem.nheads_q, problem.seqlen_q), math.nan)
    start = launch.Launch(lambda *arguments: sink(entry, arguments), entry.arguments, plan.scalars)
    start(operands, out, lse)
    return {"out": out, "lse": lse}


def save_launch(path: Path, launch: Launch, outputs: dict[str, Any]) -> None:
    """A launch with its memory, so that the very kernel that ran on the GPU can be run without its
    compiler."""
    columns = {
        "ptx": np.frombuffer(launch.ptx.encode(), np.uint8),
        "kernel": np.array(launch.kernel),
        "shape": np.array([launch.grid, launch.block, launch.cluster], np.int64),
        "shared_bytes": np.array(launch.shared_bytes),
        "params": np.frombuffer(launch.params, np.uint8),
        "addresses": np.array([b.address for b in launch.buffers], np.uint64),
        "names": np.array([b.name for b in launch.buffers]),
        **{f"buffer{i}": b.data for i, b in enumerate(launch.buffers)},
        **{f"at_{name}": np.array([t.data_ptr(), t.nbytes], np.uint64) for name, t in outputs.items()},
    }
    np.savez_compressed(path, **columns)


def load_launch(path: Path) -> tuple[Launch, dict[str, np.ndarray]]:
    """The launch that `save_launch` kept, and where it will leave its outputs (as raw bytes)."""
    saved = np.load(path)
    buffers = [
        Buffer(int(address), saved[f"buffer{i}"].copy(), str(name))
        for i, (address, name) in enumerate(zip(saved["addresses"], saved["names"], strict=True))
    ]
    grid, block, cluster = (tuple(map(int, dim)) for dim in saved["shape"])
    launch = Launch(
        ptx=saved["ptx"].tobytes().decode(),
        kernel=str(saved["kernel"]),
        grid=grid,
        block=block,
        cluster=cluster,
        shared_bytes=int(saved["shared_bytes"]),
        params=saved["params"].tobytes(),
        buffers=buffers,
    )
    outputs = {}
    for key in saved.files:
        if key.startswith("at_"):
            address, size = map(int, saved[key])
            (home,) = [b for b in buffers if b.address <= address < b.address + b.nbytes]
            outputs[key.removeprefix("at_")] = home.data[address - home.address :][:size]
    return launch, outputs


def main() -> None:
    """python -m tests.vgpu.hardware.pack FOLDER [--own]: flash-attn-4's sm_90a cases, or the package's
    own."""
    import sys

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if "--own" in sys.argv:
        for name in OWN:
            for exact in (False, True):
                pack = Pack(folder, own_name(name, exact))
                launches: list[Launch] = []

                def keep(
                    entry: Any, given: Any, pack: Pack = pack, launches: list[Launch] = launches
                ) -> None:
                    pack.add(entry.so, entry.function, given)
                    recorded = record(entry.so, entry.ptx, function=entry.function, names=entry.arguments)
                    launches.extend(recorded(*given))

                outputs = own_call(name, exact, keep)
                pack.write(outputs)
                save_launch(folder / f"{own_name(name, exact)}.launch.npz", *launches, outputs)
        return
    from tests.vgpu.peers.cases import CASES, inputs, run

    for case in CASES["sm_90a"]:
        pack = Pack(folder, str(case))
        given = inputs(case)
        made = run(case, given, lambda call, pack=pack: pack.add(call.object, "peer", call.arguments))
        pack.write(made)


def own_name(name: str, exact: bool) -> str:
    return "own-" + name.replace(" ", "-") + ("-exact" if exact else "")


if __name__ == "__main__":
    main()
