"""A hop that is down is given up as soon as the node knows that it does not reach the peer behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.hosting.hops import LOST_LOOKS, Hops


class Stage:
    """A runner that says whether its hop is up."""

    def __init__(self) -> None:
        self.beat = SimpleNamespace(linked=True)
        self.lost: list[bool] = []

    async def link(self, endpoint: str, *, keep_stream: bool = False) -> None:
        """Where it dials changes nothing here."""

    def lose_hop(self, reason: str, *, is_out_of_reach: bool = False) -> None:
        assert "peer-b" in reason
        self.lost.append(is_out_of_reach)


@pytest.fixture
def stage() -> Any:
    return Stage()


async def linked(stage: Any, *, out_of_reach: bool) -> Hops:
    hops = Hops(lambda peer_id: ["10.0.0.2"], lambda peer_id: out_of_reach)
    await hops.link("demo-1", stage, "10.0.0.2:7000", "peer-b")
    return hops


async def test_a_hop_to_a_peer_out_of_reach_is_lost_once_it_stays_down(stage: Any) -> None:
    hops = await linked(stage, out_of_reach=True)
    await hops.look()
    assert stage.lost == [], "its stream is up"
    stage.beat.linked = False
    for _ in range(LOST_LOOKS - 1):
        await hops.look()
    assert stage.lost == []
    for _ in range(3):
        await hops.look()
    assert stage.lost == [True], "and it is said once"
    stage.beat.linked = True
    await hops.look()
    stage.beat.linked = False
    for _ in range(LOST_LOOKS):
        await hops.look()
    assert stage.lost == [True, True], "after it was up again"


async def test_a_hop_to_a_peer_that_answers_is_left_to_its_runner(stage: Any) -> None:
    hops = await linked(stage, out_of_reach=False)
    stage.beat.linked = False
    for _ in range(10):
        await hops.look()
    assert stage.lost == []
