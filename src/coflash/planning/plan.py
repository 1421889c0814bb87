"""Problem and device in, Plan out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coflash.planning import choices, cost, support
from coflash.planning.device import CHIPS, DeviceInfo
from coflash.problem import Problem

#: Architectures whose kernel a CUDA tensor takes without being asked to.
DEFAULT_ARCHS = ("sm_90a",)


@dataclass(frozen=True)
class Plan:
    """How one call is done, and why."""

    path: str  # "portable" or "kernel"
    reason: str  # one sentence
    problem: Problem
    device: DeviceInfo | None = None
    kernel: str = ""  # the compiler's name for it
    config: Any = None  # the kernel's frozen config
    scalars: Mapping[str, int | float] = field(default_factory=dict, hash=False)  # bound host arguments
    backward: str = "portable"  # the path that gradients take

    @property
    def arch(self) -> str:
        return self.device.arch if self.device else ""

    @functools.cached_property
    def cost(self) -> cost.Cost | None:
        """The estimate behind the choice; worked out when asked for."""
        if self.path != "kernel" or self.device is None:
            return None
        return cost.estimate(self.problem, self.config, self.device)


def plan(
    problem: Problem,
    device: DeviceInfo | None,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    backend: str = "auto",
) -> Plan:
    """Choose the path, the kernel and its config for a call.

    `backend` is the caller's: "auto" takes a kernel where one is the default, "kernel" demands one,
    "portable" is always granted. `kernel_options` overrides fields of the kernel's config, for
    experiments.
    """
    if backend == "portable":
        return Plan("portable", 'backend="portable" was asked for', problem, device)
    arch = device.arch if device else problem.device_type
    if device is None or arch not in CHIPS or (backend == "auto" and arch not in DEFAULT_ARCHS):
        if backend == "kernel" or kernel_options:
            raise NotImplementedError(
                f'{arch} has no kernel: kernels exist for {", ".join(CHIPS)}; backend="portable" works'
            )
        if arch in CHIPS:
            reason = f'the {arch} kernel is taken on request only, with backend="kernel"'
        else:
            reason = f"{arch} has no kernel"
        return Plan("portable", reason, problem, device)
    missing = support.refusals(problem, arch)
    if missing:
        raise NotImplementedError(
            f'the {arch} kernel can\'t do {" nor ".join(missing)} yet; backend="portable" does it'
        )
    try:
        kernel, config = _choose(problem, device, kernel_options or {})
    except ValueError as error:
        if kernel_options:
            raise
        raise NotImplementedError(
            f"the {arch} kernel has no tile for head_dim={problem.head_dim} with "
            f'head_dim_v={problem.head_dim_v} ({error}); backend="portable" does it'
        ) from error
    return Plan(
        path="kernel",
        reason=_reason(problem, device, config),
        problem=problem,
        device=device,
        kernel=kernel,
        config=config,
        scalars=_scalars(problem, device, config),
    )


def _choose(problem: Problem, device: DeviceInfo, overrides: Mapping[str, Any]) -> tuple[str, Any]:
    if device.arch == "sm_90a":
        return "sm90.forward", choices.sm90_forward(problem, overrides)
    return "sm100.forward", choices.sm100_forward(problem, device, overrides)


def _scalars(problem: Problem, device: DeviceInfo, config: Any) -> dict[str, int | float]:
    left, right = problem.window
    scalars: dict[str, int | float] = {
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
        "softcap": float(problem.softcap),
        "num_blocks": device.num_sms * getattr(config, "blocks_per_sm", 1),  # of a persistent grid
    }
    if left is not None:
        scalars["window_left"] = left
    if right is not None:
        scalars["window_right"] = right
    return scalars


def _reason(problem: Problem, device: DeviceInfo, config: Any) -> str:
    words = [f"{device.name} ({device.arch}) has a forward kernel for this call"]
    if getattr(config, "softmax", "") == "held":
        words.append("bfloat16 has the range to hold the first maximum")
    if config.pack_heads > 1:
        words.append(f"{config.pack_heads} query heads share a tile because there are few queries")
    if problem.needs_grad:
        words.append("gradients take the portable path until there is a backward kernel")
    return "; ".join(words)
