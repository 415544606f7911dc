"""Whether a request uses a ring, as far as one node knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import EntryRequests, Telemetry
from exo_mesh.rings.placing.ring_use import RingUse

NOTHING = Telemetry("b", 1, 100, 200, 0, entry_requests=EntryRequests({}, frozenset()))


class Here:
    """This node, which has a stage of the ring or none, and one peer."""

    def __init__(self) -> None:
        self.is_idle_here: bool | None = None
        self.last_telemetry = {"b": NOTHING}
        self.peers = [SimpleNamespace(id="b")]
        self.running: dict[str, int] = {}
        members: Any = SimpleNamespace(is_idle_here=lambda instance_id: self.is_idle_here)
        membership: Any = self
        self.use = RingUse(membership, members, lambda: self.running)
        self.changed = SimpleNamespace(beat=lambda: None)

    @property
    def is_calm(self) -> bool:
        return self.use.is_calm("i")


def test_a_ring_that_nobody_uses_is_calm() -> None:
    here = Here()
    assert here.is_calm
    here.is_idle_here = True
    assert here.is_calm


def test_a_stage_here_that_sees_a_request_is_enough() -> None:
    here = Here()
    here.is_idle_here = False
    assert not here.is_calm


def test_so_is_a_request_of_a_client_here_that_runs_or_waits() -> None:
    here = Here()
    here.running = {"i": 1}
    assert not here.is_calm
    here.running = {"other": 1}
    assert here.is_calm
    with here.use.awaits("i"):
        assert not here.is_calm


@pytest.mark.parametrize(
    "reading",
    [
        replace(NOTHING, entry_requests=EntryRequests({"i": 1}, frozenset())),
        replace(NOTHING, entry_requests=EntryRequests({}, frozenset(["i"]))),
        replace(NOTHING, outstanding={"i": 1}),
        replace(NOTHING, entry_requests=None),
        None,
    ],
    ids=["runs", "waits", "at its driver", "of an older version", "has reported nothing"],
)
def test_so_is_a_peer_that_reports_one_or_cannot_tell(reading: Telemetry | None) -> None:
    here = Here()
    here.last_telemetry = {} if reading is None else {"b": reading}
    assert not here.is_calm
