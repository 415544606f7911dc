"""The drawn faults of test_drawn.py with stages of llama.cpp: the text is right, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
from exo_mesh_llamacpp import provider

from exo_mesh.engine.registry import GROUP
from tests.faults.test_drawn import FIRST
from tools.faults.drawn import Case, play
from tools.faults.faults import Fault, Phase
from tools.faults.mesh import Meshes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "llamacpp" not in {point.name for point in metadata.entry_points(group=GROUP)},
        reason="the installed metadata does not name the llamacpp engine: install exo-mesh again",
    ),
    pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed"),
]

LLAMACPP = ("--engine", "llamacpp", "--engine-option", "threads=1", "--engine-option", "kv=f32")


@pytest.fixture(scope="module")
def llamacpp_meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    made = Meshes(tmp_path_factory.mktemp("llamacpp"), LLAMACPP)
    yield made
    made.close()


def test_the_runs_have_every_fault_and_every_moment() -> None:
    assert {case.fault for case in FIRST} == set(Fault)
    assert {case.phase for case in FIRST} == set(Phase)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_request_over_llamacpp_stages_survives(llamacpp_meshes: Meshes, case: Case) -> None:
    try:
        outcome = play(llamacpp_meshes.of(case.peers), case)
    except BaseException:
        llamacpp_meshes.give_up()
        raise
    assert outcome.outcome == "stop" and outcome.tokens_lost == 0
