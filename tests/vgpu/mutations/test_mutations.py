"""The virtual GPU finds faults: mutated kernels are reported, with the right cause, and right kernels are
not."""

from __future__ import annotations

import re

import pytest
from tests.vgpu.mutations import kernels
from tests.vgpu.mutations.mutate import FAMILIES, Mutation, mutations

from coflash.vgpu import Finding, Machine

BASES = {"sm_90a": (kernels.hopper, kernels.HOPPER), "sm_100a": (kernels.blackwell, kernels.BLACKWELL)}
TRIES = (("lazy", 0), ("eager", 0), ("random", 0), ("random", 1), ("round-robin", 0))

ALL = [(arch, mutation) for arch, (_, ptx) in BASES.items() for mutation in mutations(ptx)]
# Of each kind of fault on each kernel: the first one in the plain suite, the others in the slow one.
FIRST = list({(arch, mutation.kind): (arch, mutation) for arch, mutation in reversed(ALL)}.values())
REST = [pair for pair in ALL if pair not in FIRST]


def _reported(arch: str, mutation: Mutation) -> tuple[set[str], list[str]]:
    """The causes reported under the first schedule that finds a right one, else those of all schedules."""
    make, _ = BASES[arch]
    causes: set[str] = set()
    texts: list[str] = []
    for schedule, seed in TRIES:
        problem = make(mutation.ptx)
        report = Machine(arch=arch, schedule=schedule, seed=seed).run(problem.launch)
        causes |= {_cause(finding) for finding in report.findings}
        texts += map(str, report.findings)
        if not report.findings and not problem.is_right():
            causes.add("answer")
        if causes & mutation.causes:
            break
    return causes, texts


def _cause(finding: Finding) -> str:
    return "deadlock" if finding.message.startswith("deadlock") else finding.check


def _check(arch: str, mutation: Mutation) -> None:
    causes, texts = _reported(arch, mutation)
    assert causes, f"nobody noticed: {mutation}"
    wanted = ", ".join(sorted(mutation.causes))
    assert causes & mutation.causes, f"{mutation} should be {wanted}, was reported as:\n" + "\n".join(texts)


def _name(value: object) -> str:
    return f"{value.kind} {value.line}".replace(" ", "-") if isinstance(value, Mutation) else str(value)


@pytest.mark.parametrize(("arch", "mutation"), FIRST, ids=_name)
def test_one_fault_of_each_kind(arch, mutation):
    _check(arch, mutation)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "mutation"), REST, ids=_name)
def test_other_faults(arch, mutation):
    _check(arch, mutation)


def test_there_are_enough_faults_of_every_family():
    assert len(ALL) >= 120
    for family in FAMILIES:
        assert any(list(family(ptx)) for _, ptx in BASES.values()), family.__name__


@pytest.mark.parametrize("arch", BASES)
@pytest.mark.parametrize("schedule", ["round-robin", "lazy", "eager"])
def test_right_kernels_are_clean(arch, schedule):
    _is_clean(arch, schedule, 0)


@pytest.mark.parametrize("arch", BASES)
@pytest.mark.parametrize("seed", range(5))
def test_right_kernels_are_clean_in_random_order(arch, seed):
    _is_clean(arch, "random", seed)


@pytest.mark.slow
@pytest.mark.parametrize("arch", BASES)
@pytest.mark.parametrize("seed", range(5, 20))
def test_right_kernels_are_clean_in_more_random_orders(arch, seed):
    _is_clean(arch, "random", seed)


def _is_clean(arch: str, schedule: str, seed: int) -> None:
    make, _ = BASES[arch]
    problem = make(seed=seed)
    report = Machine(arch=arch, schedule=schedule, seed=seed).run(problem.launch)
    assert report.ok, str(report)
    assert problem.is_right()


def _relaxed(ptx: str, *instructions: str) -> str:
    for text in instructions:
        assert ptx.count(text) == 1
        ptx = ptx.replace(text, re.sub(r"(parity|arrive)\.", r"\1.relaxed.cluster.", text))
    return ptx


ARRIVE_P = "mbarrier.arrive.shared::cta.b64 %state, [%p_ready]"
WAIT_P, WAIT_V = (
    f"mbarrier.try_wait.parity.shared::cta.b64 %ready, [{b}], 0" for b in ("%p_ready", "%v_ready")
)
RELAXED = _relaxed(kernels.BLACKWELL, ARRIVE_P, WAIT_P)


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_relaxed_barriers_order_tensor_memory_between_tcgen05_fences(schedule):
    problem = kernels.blackwell(RELAXED)
    report = Machine(arch="sm_100a", schedule=schedule).run(problem.launch)
    assert report.ok, str(report)
    assert problem.is_right()


@pytest.mark.parametrize("side", ["before", "after"])
def test_relaxed_barriers_order_nothing_without_a_fence_on_either_side(side):
    fence = f"tcgen05.fence::{side}_thread_sync;"
    barrier = RELAXED.index(f"{'arrive' if side == 'before' else 'parity'}.relaxed")
    at = RELAXED.rindex(fence, 0, barrier) if side == "before" else RELAXED.index(fence, barrier)
    ptx = RELAXED[:at] + RELAXED[at + len(fence) :]
    report = Machine(arch="sm_100a").run(kernels.blackwell(ptx).launch)
    assert "races" in {finding.check for finding in report.findings}


def test_relaxed_barriers_do_not_order_shared_memory():
    report = Machine(arch="sm_100a").run(kernels.blackwell(_relaxed(RELAXED, WAIT_V)).launch)
    assert "races" in {finding.check for finding in report.findings}
