"""A driver that does not answer while its ring is healthy, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.errors import MeshError, StageLostError, TransportError
from exo_mesh.rings.serving.redial import MAX_REACHED, MAX_REDIALS, REDIAL_S, WELL_S, ReachedDrivers, Redial
from tests.rings.placing.test_ownership import an_instance
from tools.simulate.virtual_loop import VirtualLoop, run

PLAN = an_instance(1, "x", "a", "b").plan


class HealthyRing:
    """Members that say that their stages run."""

    def newer_plan(self, plan: Plan) -> Plan | None:
        return None

    def unanswered_s(self, peer_id: str) -> float:
        return 0.0

    def is_alive(self, peer_id: str) -> bool:
        return True

    def member(self, peer_id: str) -> Any:
        return self

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        return ""


def a_redial(loop: VirtualLoop, reached: ReachedDrivers | None = None) -> Redial:
    members: Any = HealthyRing()
    return Redial(PLAN, members, loop.time, reached)


async def dialled_in_vain(redial: Redial) -> MeshError:
    """Each dial fails at once; the error with which it is given up."""
    while True:
        try:
            await redial.wait(7)
        except MeshError as exc:
            return exc


def in_simulated_time(story: Any) -> Any:
    def play(loop: VirtualLoop) -> Coroutine[Any, Any, Any]:
        return story(loop)

    return run(play)


def test_a_driver_that_was_heard_is_dialled_for_a_minute_and_no_firewall_is_blamed() -> None:
    async def story(loop: VirtualLoop) -> tuple[MeshError, float]:
        redial = a_redial(loop)
        redial.heard()
        return await dialled_in_vain(redial), loop.time()

    error, took_s = in_simulated_time(story)
    assert isinstance(error, TransportError) and not isinstance(error, StageLostError)
    assert "overloaded" in str(error) and "firewall" not in str(error)
    assert WELL_S <= took_s <= WELL_S + 5


def test_an_answer_goes_on_at_a_driver_that_is_silent_for_half_a_minute() -> None:
    async def story(loop: VirtualLoop) -> int:
        redial = a_redial(loop)
        redial.heard()
        dials = 0
        while loop.time() < 30:
            await redial.wait(7)
            dials += 1
        redial.heard()
        await redial.wait(8)
        return dials

    assert in_simulated_time(story) <= 30, "a machine that is overloaded is not dialled more than once a second"


def test_a_request_knows_that_an_earlier_one_has_reached_the_driver() -> None:
    async def story(loop: VirtualLoop) -> tuple[MeshError, float]:
        reached = ReachedDrivers()
        a_redial(loop, reached).heard()
        return await dialled_in_vain(a_redial(loop, reached)), loop.time()

    error, took_s = in_simulated_time(story)
    assert "firewall" not in str(error) and took_s >= WELL_S


def test_a_driver_that_was_never_reached_is_given_up_soon_and_the_firewall_named() -> None:
    async def story(loop: VirtualLoop) -> tuple[MeshError, float]:
        return await dialled_in_vain(a_redial(loop)), loop.time()

    error, took_s = in_simulated_time(story)
    assert isinstance(error, TransportError) and "firewall" in str(error)
    assert REDIAL_S <= took_s <= REDIAL_S + 1


def test_a_driver_that_breaks_off_again_and_again_without_a_token_is_given_up() -> None:
    async def story(loop: VirtualLoop) -> int:
        redial = a_redial(loop)
        for number in range(1000):
            redial.heard()
            try:
                await redial.wait(7)
            except TransportError as exc:
                assert "broke off" in str(exc)
                return number
        raise AssertionError("it is never given up")

    assert in_simulated_time(story) == MAX_REDIALS


def test_so_many_rings_are_remembered_and_no_more() -> None:
    reached = ReachedDrivers()
    plans = [an_instance(number, "x", "a").plan for number in range(MAX_REACHED + 1)]
    for plan in plans:
        reached.note(plan)
    assert plans[0] not in reached and plans[1] in reached and plans[-1] in reached


@pytest.mark.parametrize("answers", [True, False])
def test_a_ring_that_is_lost_is_not_waited_for(answers: bool) -> None:
    async def story(loop: VirtualLoop) -> float:
        redial = a_redial(loop)
        if answers:
            redial.heard()
        members: Any = redial._members
        members.is_alive = lambda peer_id: False
        with pytest.raises(StageLostError, match="is gone"):
            await redial.wait(7)
        await asyncio.sleep(0)
        return loop.time()

    assert in_simulated_time(story) <= 0.2
