"""At which address of a driver a request dials again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.rings.placing.members import Members
from exo_mesh.rings.serving import redial
from exo_mesh.rings.serving.redial import Redial, RingVerdict

PLAN = Plan(
    "i", Ballot(1, "a"), "m", "", (StagePlan("peer", "dummy", Shard("m", 0, 4, 4), 0),), 64, PlanInputs((), "memory", 1)
)


class MembersOfOne:
    """The members as far as a redial asks them. best: the addresses of the driver's peer, best first."""

    def __init__(self, *best: str) -> None:
        self.best = list(best)

    def addresses(self, endpoint: str, peer_id: str) -> list[str]:
        return self.best

    def unanswered_s(self, peer_id: str) -> float:
        return 0.0

    def newer_plan(self, plan: Plan) -> None:
        return None


@pytest.fixture(autouse=True)
def ring_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def well(*_: Any) -> tuple[RingVerdict, str]:
        return RingVerdict.WELL, ""

    monkeypatch.setattr(redial, "look_at", well)
    monkeypatch.setattr(redial, "REDIAL_FIRST_S", 0.0)


async def test_the_address_that_the_membership_changes_to_is_dialled_next() -> None:
    members = MembersOfOne("cable", "cable6", "other6", "wifi")
    one = Redial(PLAN, cast(Members, members), clock=lambda: 0.0)
    assert one.address("") == "cable"
    await one.wait(0)
    members.best = ["wifi", "cable", "cable6", "other6"]
    assert one.address("") == "wifi"
    one.heard()
    assert one.address("") == "wifi"


async def test_without_an_answer_all_addresses_have_their_turn() -> None:
    one = Redial(PLAN, cast(Members, MembersOfOne("a", "b", "c")), clock=lambda: 0.0)
    dialled = []
    for _ in range(5):
        dialled.append(one.address(""))
        await one.wait(0)
    assert dialled == ["a", "b", "c", "a", "b"]
