"""What peers tell each other of plans and of themselves arrives as it was."""

from __future__ import annotations

import pytest

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.transport import control_codec as codec
from exo_mesh.transport.plan_codec import plan_from_proto, plan_to_proto

STAGES = (StagePlan("a", "mlx", Shard("m", 0, 3, 8), 5), StagePlan("b", "mlx", Shard("m", 3, 8, 8), 7))
PLAN = Plan("m-1", Ballot(4, "a"), "m", "d", STAGES, 2048, PlanInputs((("a", 9), ("b", 8)), "memory", 2), 8192)


def test_a_plan_keeps_its_pool_and_its_digest() -> None:
    there = plan_from_proto(plan_to_proto(PLAN))
    assert there == PLAN and there.digest == PLAN.digest and there.pool_tokens == 8192


@pytest.mark.parametrize("adopted", [NO_BALLOT, Ballot(5, "b")])
def test_an_instance_keeps_the_ballot_by_which_it_was_adopted(adopted: Ballot) -> None:
    info = InstanceInfo(PLAN, InstanceState.READY, ("x:1", "y:2"), (10, 11), "", adopted)
    there = codec.instance_from_proto(codec.instance_to_proto(info))
    assert there == info and there.ballot == max(PLAN.ballot, adopted)


def test_telemetry_keeps_speeds_and_tokens() -> None:
    reading = Telemetry("a", 3, 10, 20, 5, 0.5, {"mlx": 0.25}, {"m-1": 77})
    assert codec.telemetry_from_proto(codec.telemetry_to_proto(reading)) == reading


def test_a_peer_cannot_fill_another_with_readings() -> None:
    many = {f"m-{n}": n for n in range(3 * codec.MAX_ITEMS)}
    there = codec.telemetry_from_proto(codec.telemetry_to_proto(Telemetry("a", 1, 1, 1, 0, 0.0, {}, many)))
    assert len(there.tokens) == codec.MAX_ITEMS
