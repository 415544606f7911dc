"""Whose word counts for a stage, or a rank, whose node cannot be asked."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot, Plan, Seat
from exo_mesh.domain.stage import StageStatus
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.errors import TransportError
from exo_mesh.rings.placing.liveness import StageLook, look_at
from tests.rings.placing.test_ownership import an_instance


def a_plan() -> Plan:
    """Stage 0 at a; stage 1 is the group of b, who leads it, and c."""
    plan = an_instance(1, "x", "a", "b").plan
    group = TensorGroup("ring", ("b", "c"))
    return replace(plan, stages=(plan.stages[0], replace(plan.stages[1], group=group)))


PLAN = a_plan()
LEADER, RANK = PLAN.seats[1:]


class Others:
    """Members that answer as they are told. running: peers whose stage runs, as their own nodes say. open: doors at
    which a runner answers; refusing: those at which the machine says that nobody listens."""

    def __init__(
        self, running: str = "", *, linked: bool = False, open: str = "", refusing: str = "", asks: str = "z"
    ) -> None:
        self.running, self.linked, self.open, self.refusing = running, linked, open, refusing
        self.own_id = asks

    def member(self, peer_id: str) -> Any:
        if peer_id not in self.running:
            raise TransportError(f"peer {peer_id} is gone")
        return self

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        return ""

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        assert shows_hop
        return StageStatus(range(1), 0, linked=self.linked)

    async def connects(self, address: str, timeout_s: float) -> bool:
        return address in self.open

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        return address in self.refusing


@pytest.mark.parametrize(
    ("seat", "doors", "others", "expected"),
    [
        (RANK, [], Others("b"), True),  # its leader runs
        (RANK, [], Others("a", linked=True), False),  # that there is a way to the leader says nothing of it
        (RANK, ["c:1"], Others(open="c:1"), True),
        (RANK, ["c:1"], Others("b", refusing="c:1"), False),  # its leader has not noticed yet
        (LEADER, ["b:1"], Others("c"), False),  # what the other ranks run is not the way into the stage
        (LEADER, ["b:1"], Others("a", linked=True), True),
        # what it sends goes to stage 0: if nothing arrives there, no frame does
        (LEADER, ["b:1"], Others("a", linked=True, asks="a"), False),
        (LEADER, ["b:1"], Others("a", open="b:1", asks="a"), True),
    ],
)
async def test_a_seat_lives_as_far_as_others_can_tell(
    seat: Seat, doors: list[str], others: Any, expected: bool
) -> None:
    assert (await look_at(PLAN, seat, doors, others) is StageLook.LIVES) is expected
