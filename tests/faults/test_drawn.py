"""A drawn fault at a drawn moment of an answer: the text is right, and nothing is left over.

`python -m tools.faults drawn` plays as many as one likes, and has the deadlines that are promised.
"""

from __future__ import annotations

import itertools

import pytest

from tools.faults.drawn import Case, cases, play
from tools.faults.faults import Fault, Phase
from tools.faults.mesh import Meshes
from tools.faults.record import keep

SEED = 212
"""The first eight runs of it have every fault, every moment and every size."""

FIRST = sorted(itertools.islice(cases(SEED), 8), key=lambda case: case.peers)
EXTENDED = 3
"""The number of the one that the extended suite plays: a node is killed. The other ones are slow; tests/meshes and
tests/node kill runners in the quick suite."""
MORE = sorted(itertools.islice(cases(SEED), 8, 50), key=lambda case: case.peers)


def test_the_first_runs_have_every_fault_every_moment_and_every_size() -> None:
    assert {case.fault for case in FIRST} == set(Fault)
    assert {case.phase for case in FIRST} == set(Phase)
    assert {case.peers for case in FIRST} == {2, 3, 4}
    faults = {case.number: case.fault for case in FIRST}
    assert faults[EXTENDED] is Fault.NODE_KILL


def test_every_cell_comes_once_before_any_comes_twice() -> None:
    cells = [(case.fault, case.phase, case.peers) for case in itertools.islice(cases(7), 168)]
    assert len(set(cells[:84])) == len(set(cells[84:])) == 84 and cells[:84] != cells[84:]
    assert list(itertools.islice(cases(7), 5)) == list(itertools.islice(cases(7), 5)), "the seed tells all"
    assert any(case.strikes_the_entry for case in itertools.islice(cases(7), 84))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=pytest.mark.extended if case.number == EXTENDED else pytest.mark.slow)
        for case in FIRST
    ],
)
def test_a_request_survives(meshes: Meshes, case: Case) -> None:
    survives(meshes, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_a_request_survives_more(meshes: Meshes, case: Case) -> None:
    survives(meshes, case)


def survives(meshes: Meshes, case: Case) -> None:
    print(f"seed {SEED}, run {case}")
    try:
        outcome = play(meshes.of(case.peers), case)
    except BaseException:
        meshes.give_up()
        raise
    keep({"name": "drawn", "seed": SEED, **outcome.describe()})
    assert outcome.outcome == "stop" and outcome.tokens_lost == 0
