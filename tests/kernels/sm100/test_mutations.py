"""The silence of the virtual GPU on the Blackwell forward means something: mechanical faults in its PTX are found."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

pytest.importorskip("cutlass")

from tests.kernels.sm90 import cases  # noqa: E402
from tests.kernels.sm100.calls import Case, prepare  # noqa: E402
from tests.vgpu.mutations.mutate import Mutation, mutations  # noqa: E402

from coflash.vgpu import Machine  # noqa: E402

FAULTS = 40
CAUGHT = 0.95
TRIES = (("lazy", 0), ("eager", 0), ("random", 0), ("random", 1), ("round-robin", 0))
OPTIONS = {"head_dim": 128, "head_dim_v": 128, "packed_q": True, "packed_k": True}
# Many items for one CTA, masked on both sides, with maxima that grow; a first item of one block, and rows, tiles and
# items that see nothing; items whose first block is seen whole. Together they execute every instruction.
MANY = Case(
    (300, 5, 130), (500, 7, 200), 2, 1, window_left=400, window_right=0, inputs="rising 10", options=OPTIONS
)
FEW = Case((130, 40, 400, 250), (90, 30, 60, 60), 1, 1, window_left=150, window_right=0, options=OPTIONS)
WHOLE = Case(
    (130, 20),
    (384, 256),
    1,
    1,
    window_left=1000,
    window_right=1000,
    inputs="rising 3",
    options=OPTIONS,
)
CALLS = (MANY, FEW, WHOLE)


def spread(ptx: str, count: int) -> list[Mutation]:
    """`count` faults, every kind in turn, each kind's from all over the kernel."""
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations(ptx):
        kinds[mutation.kind].append(mutation)
    for found in kinds.values():
        step = max(1, len(found) * len(kinds) // count)
        found[:] = found[step // 2 :: step] + [m for i, m in enumerate(found) if (i - step // 2) % step]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return list(itertools.islice((m for m in turns if m is not None), count))


def notice(case: Case, mutation: Mutation) -> str:
    """What is reported first of the mutated kernel; empty if nothing is."""
    call, (launch,) = prepare(case, case.config(), blocks=1)
    launch.ptx = mutation.ptx
    for schedule, seed in TRIES:
        call.arguments["out"].fill_(float("nan"))
        call.arguments["lse"].fill_(float("nan"))
        report = Machine("sm_100a", schedule=schedule, seed=seed, max_steps=3_000_000).run(launch)
        if report.findings:
            return str(report.findings[0])
        if not cases.errors(call).ok:
            return "answer"
    return ""


def test_the_calls_execute_every_instruction() -> None:
    hits = 0
    for case in CALLS:
        _, (launch,) = prepare(case, case.config(), blocks=1)
        machine = Machine("sm_100a")
        assert machine.run(launch).ok
        hits += machine.counters.hits.sum(axis=1)
    missed = [machine.program.instruction_at(at) for at, count in enumerate(hits) if not count]
    assert [
        instruction.text for instruction in missed if instruction
    ] == []  # behind the last one stands none


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_are_noticed() -> None:
    _, (launch,) = prepare(MANY, MANY.config(), blocks=1)
    chosen = spread(launch.ptx, FAULTS)
    missed = [m for m in chosen if not any(notice(call, m) for call in CALLS)]
    assert len(chosen) == FAULTS
    assert len(missed) <= (1 - CAUGHT) * FAULTS, "\n".join(map(str, missed))
