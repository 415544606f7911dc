"""When a model gets one more instance, for its queue or because peers drain, and when one is given back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.routing.replicas import (
    FIRST_RETRY_S,
    HOLD_S,
    IDLE_S,
    LAST_IDLE_S,
    LAST_RETRY_S,
    LEAVING_S,
    QUEUE_S,
    ModelLoad,
    ReplicaAction,
    ReplicaPolicy,
    ReplicaUse,
)
from tools.simulate import router

FULL = ReplicaUse("m-1", 3, 7, 4)
AUTO = ReplicaUse("m-2", 0, 0, 4, is_auto=True)
LEAVING = ReplicaUse("m-1", 0, 1, 4, is_leaving=True)


def use(*instances: ReplicaUse, **fields: object) -> ModelLoad:
    return replace(ModelLoad(instances, may_place=True, is_changing=False, max_instances=4), **fields)  # type: ignore[arg-type]


def first(policy: ReplicaPolicy, given: ModelLoad, seconds: float, start: float = 0.0) -> tuple[float, str] | None:
    """The first action, with its time, if the policy looks once a second."""
    for second in range(int(seconds) + 1):
        action = policy.step(given, start + second)
        if action is not None:
            return start + second, action
    return None


def test_one_more_is_placed_after_all_instances_were_full_for_a_while() -> None:
    assert first(ReplicaPolicy(), use(FULL), 60) == (QUEUE_S, ReplicaAction.PLACE)


@pytest.mark.parametrize(
    "given",
    [
        use(FULL, replace(AUTO, outstanding=3)),
        use(replace(FULL, waiting=0)),
        use(FULL, may_place=False),
        use(FULL, is_changing=True),
        use(FULL, max_instances=1),
        use(),
    ],
    ids=["another has room", "nobody waits", "another peer places", "one is loading", "no peer is left", "none"],
)
def test_nothing_is_placed_while(given: ModelLoad) -> None:
    assert first(ReplicaPolicy(), given, 600) is None


def test_a_queue_that_empties_starts_the_time_again() -> None:
    policy = ReplicaPolicy()
    assert first(policy, use(FULL), QUEUE_S - 1) is None
    assert policy.step(use(replace(FULL, waiting=0)), QUEUE_S) is None
    assert first(policy, use(FULL), QUEUE_S - 1, QUEUE_S + 1) is None


def test_a_failed_placement_is_tried_again_after_longer_and_longer_pauses() -> None:
    policy, now, pauses = ReplicaPolicy(), 0.0, []
    for _ in range(8):
        found = first(policy, use(FULL), 2 * LAST_RETRY_S, now)
        assert found is not None
        pauses.append(found[0] - now)
        now = found[0]
        policy.failed(now)
    assert pauses[:3] == [QUEUE_S, FIRST_RETRY_S, 2 * FIRST_RETRY_S] and pauses[-1] == LAST_RETRY_S


def test_a_model_of_a_server_gets_its_instances_at_once() -> None:
    assert first(ReplicaPolicy(), use(FULL, is_free=True), 60) == (0, ReplicaAction.PLACE)


def test_requests_that_keep_all_rings_of_a_model_from_draining_get_another_ring() -> None:
    assert first(ReplicaPolicy(), use(LEAVING), 60) == (LEAVING_S, ReplicaAction.REPLACE)
    policy = ReplicaPolicy()
    assert first(policy, use(LEAVING), 60) is not None
    policy.failed(LEAVING_S)
    assert first(policy, use(LEAVING), 60, LEAVING_S) == (LEAVING_S + FIRST_RETRY_S, ReplicaAction.REPLACE)


@pytest.mark.parametrize(
    "given",
    [
        use(LEAVING, AUTO),
        use(replace(LEAVING, outstanding=0)),
        use(LEAVING, may_place=False),
        use(LEAVING, is_changing=True),
    ],
    ids=["another one serves", "nobody uses it", "another peer places", "one is loading"],
)
def test_no_ring_is_replaced_while(given: ModelLoad) -> None:
    assert first(ReplicaPolicy(), given, 100) is None


def test_an_instance_is_not_given_back_while_the_others_drain() -> None:
    assert first(ReplicaPolicy(), use(replace(LEAVING, outstanding=0), AUTO), 3 * IDLE_S) is None
    idle = ReplicaUse("m-0", 0, 0, 4)
    assert first(ReplicaPolicy(), use(idle, LEAVING, AUTO), 2 * IDLE_S) == (IDLE_S, ReplicaAction.GIVE_BACK)


def test_an_automatic_instance_is_given_back_after_a_long_time_of_low_load() -> None:
    assert first(ReplicaPolicy(), use(ReplicaUse("m-1", 0, 2, 4), AUTO), 2 * IDLE_S) == (
        IDLE_S,
        ReplicaAction.GIVE_BACK,
    )


@pytest.mark.parametrize(
    "given",
    [
        use(ReplicaUse("m-1", 0, 3, 4), AUTO),
        use(ReplicaUse("m-1", 0, 0, 4), replace(AUTO, outstanding=1)),
        use(ReplicaUse("m-1", 0, 0, 4), replace(AUTO, is_auto=False)),
        use(ReplicaUse("m-1", 0, 0, 4), replace(AUTO, is_mine=False)),
        use(AUTO),
    ],
    ids=["the load is not low", "it works", "somebody asked for it", "another peer owns it", "it is the last one"],
)
def test_nothing_is_given_back_while(given: ModelLoad) -> None:
    assert first(ReplicaPolicy(), given, 3 * IDLE_S) is None


def test_of_two_automatic_instances_one_is_given_back_and_the_other_much_later() -> None:
    policy, one = ReplicaPolicy(), ReplicaUse("m-1", 0, 0, 4)
    both = use(one, AUTO, replace(AUTO, instance_id="m-3"))
    assert both.last_auto is not None and both.last_auto.instance_id == "m-3"
    assert first(policy, both, 2 * IDLE_S) == (IDLE_S, ReplicaAction.GIVE_BACK)
    found = first(policy, use(one, AUTO), 2 * IDLE_S, IDLE_S + 1)
    assert found == (2 * IDLE_S + 1, ReplicaAction.GIVE_BACK)


def test_after_a_give_back_nothing_is_placed_for_a_while() -> None:
    policy = ReplicaPolicy()
    first(policy, use(ReplicaUse("m-1", 0, 0, 4), AUTO), IDLE_S)
    assert first(policy, use(FULL), 2 * HOLD_S, IDLE_S + 1) == (IDLE_S + 1 + HOLD_S, ReplicaAction.PLACE)


def test_an_instance_that_is_missed_soon_is_given_back_after_twice_the_time_up_to_a_limit() -> None:
    policy, low, now, times = ReplicaPolicy(), use(ReplicaUse("m-1", 0, 0, 4), AUTO), 0.0, []
    for _ in range(6):
        found = first(policy, low, 2 * LAST_IDLE_S, now)
        assert found is not None and found[1] is ReplicaAction.GIVE_BACK
        times.append(found[0] - now)
        missed = first(policy, use(FULL), 2 * HOLD_S, found[0] + 1)
        assert missed is not None and missed[1] is ReplicaAction.PLACE
        now = missed[0] + 1
    assert times == [IDLE_S, 2 * IDLE_S, 4 * IDLE_S, 8 * IDLE_S, LAST_IDLE_S, LAST_IDLE_S]


def test_an_instance_that_is_missed_much_later_is_given_back_after_the_usual_time() -> None:
    policy, low = ReplicaPolicy(), use(ReplicaUse("m-1", 0, 0, 4), AUTO)
    first(policy, low, IDLE_S)
    first(policy, use(FULL), 2 * HOLD_S, IDLE_S + 1)
    assert first(policy, low, 2 * IDLE_S, 1000) == (1000 + 2 * IDLE_S, ReplicaAction.GIVE_BACK)
    assert first(policy, use(replace(FULL, waiting=0)), 2 * IDLE_S, 2000) is None
    assert first(policy, use(FULL), QUEUE_S, 3000) == (3000 + QUEUE_S, ReplicaAction.PLACE)
    assert first(policy, low, IDLE_S, 4000) == (4000 + IDLE_S, ReplicaAction.GIVE_BACK)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 999))
@example(500148)
@example(500287)
def test_no_history_of_load_and_losses_makes_the_mesh_oscillate_or_lose_a_request(seed: int) -> None:
    """`python -m tools.simulate router --histories 1000` plays all of these seeds, and others with --first-seed."""
    assert router.play(seed).problems == []
