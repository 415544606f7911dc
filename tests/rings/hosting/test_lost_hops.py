"""A hop that is down is given up as soon as the node knows that it does not reach the peer behind it, and one that
rests is opened to find out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.rings.hosting import hops as module
from exo_mesh.rings.hosting.hops import LOST_LOOKS, Hops, is_up


class Stage:
    """A runner that says whether its hop is up."""

    def __init__(self) -> None:
        self.beat = Heartbeat(linked=True)
        self.lost: list[bool] = []
        self.num_opened = 0
        self.opens = True

    async def link(self, endpoint: str, *, keep_stream: bool = False) -> None:
        """Where it dials changes nothing here."""

    async def open_hop(self) -> None:
        """The hop rests no longer, and is up if the next stage answers."""
        self.num_opened += 1
        self.beat = Heartbeat(linked=self.opens)

    def lose_hop(self, reason: str, *, is_out_of_reach: bool = False) -> None:
        assert "peer-b" in reason
        self.lost.append(is_out_of_reach)


@pytest.fixture
def stage() -> Any:
    return Stage()


def around(*, is_out_of_reach: bool, is_silent: bool = False) -> Any:
    return SimpleNamespace(
        hosts_of=lambda peer_id: ["10.0.0.2"],
        is_out_of_reach=lambda peer_id: is_out_of_reach,
        is_silent=lambda peer_id: is_silent,
    )


async def linked(stage: Any, *, out_of_reach: bool) -> Hops:
    hops = Hops(around(is_out_of_reach=out_of_reach))
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


@pytest.mark.parametrize("silent", [True, False])
async def test_a_hop_that_rests_is_opened_while_its_peer_is_silent(stage: Any, silent: bool) -> None:
    hops = Hops(around(is_out_of_reach=True, is_silent=silent))
    await hops.link("demo-1", stage, "10.0.0.2:7000", "peer-b")
    stage.beat, stage.opens = Heartbeat(linked=True, hop_rests=True), False
    for _ in range(LOST_LOOKS + 1):
        await hops.look()
    assert stage.num_opened == int(silent)
    assert stage.lost == ([True] if silent else []), "a hop that rests counts as up"


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("rests", [True, False])
async def test_the_hop_of_an_idle_ring_shows_whether_it_is_up(
    stage: Any, opens: bool, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is just opening or closing. It has until a given time."""
    monkeypatch.setattr(module, "SHOW_STEP_S", 0.01)
    stage.beat, stage.opens = Heartbeat(linked=rests, hop_rests=rests, is_idle=True), opens
    begin = asyncio.get_running_loop().time()
    assert await is_up(stage, begin + 0.1) is opens
    assert stage.num_opened == 1


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_hop_is_not_opened_to_show_what_is_known(stage: Any, is_idle: bool) -> None:
    later = asyncio.get_running_loop().time() + 60
    stage.beat.is_idle = is_idle
    assert await is_up(stage, later)
    stage.beat = Heartbeat(linked=False, is_idle=is_idle)
    assert not await is_up(stage, later if not is_idle else 0.0), "nobody asks for more than what is known"
    stage.beat = Heartbeat(linked=True, hop_rests=True, is_idle=True)
    assert not await is_up(stage)
    assert stage.num_opened == 0
