"""The status of the runners of a node: shutting down, busy, loading, idle, failed or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.domain.reports import RunnerReport
from exo_mesh.domain.view import InstanceState
from exo_mesh.node.observation import Observation


def observation(*, sequences: int | None, states: tuple[InstanceState, ...], stops: bool) -> Any:
    beats = [] if sequences is None else [SimpleNamespace(beat=SimpleNamespace(sequences=sequences))]
    placed = [("a", SimpleNamespace(state=state, plan=SimpleNamespace(member_ids=["a"]))) for state in states]
    asked = SimpleNamespace(is_set=lambda: stops)
    membership = SimpleNamespace(own=SimpleNamespace(id="a"), stops=SimpleNamespace(asked=asked))
    return SimpleNamespace(
        _host=SimpleNamespace(beats=lambda: beats),
        _instances=SimpleNamespace(all=lambda: placed),
        _membership=membership,
    )


@pytest.mark.parametrize(
    ("sequences", "states", "stops", "status"),
    [
        (None, (), False, "none"),
        (None, (InstanceState.FAILED,), False, "failed"),
        (0, (InstanceState.READY, InstanceState.FAILED), False, "idle"),
        (0, (InstanceState.LOADING,), False, "loading"),
        (2, (InstanceState.READY, InstanceState.LOADING), False, "busy"),
        (2, (InstanceState.READY,), True, "shutting_down"),
    ],
)
def test_the_status_of_the_runners(
    sequences: int | None, states: tuple[InstanceState, ...], stops: bool, status: str
) -> None:
    found = Observation.runner(observation(sequences=sequences, states=states, stops=stops))
    assert found == RunnerReport("subprocess", status)
