"""Pack calls of compiled kernels for a GPU machine without a compiler: shared objects, inputs, argument
lists."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coflash.vgpu.recorder import host_memory, merge_buffers


def runtime_libraries() -> list[str]:
    import cutlass
    import tvm_ffi

    libraries = Path(cutlass.__file__).parents[2] / "cu13" / "lib"
    return [str(libraries / "libcute_dsl_runtime.so"), tvm_ffi.libinfo.find_libtvm_ffi()]


def link(object_file: Path, target: Path) -> None:
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


def main() -> None:
    """python -m tests.vgpu.hardware.pack FOLDER: flash-attn-4's sm_90a cases."""
    import sys

    from tests.vgpu.peers.cases import CASES, inputs, run

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES["sm_90a"]:
        pack = Pack(folder, str(case))
        given = inputs(case)
        made = run(case, given, lambda call, pack=pack: pack.add(call.object, "peer", call.arguments))
        pack.write(made)


if __name__ == "__main__":
    main()
