"""What readings say of an instance when one is chosen for a request."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.device import EntryRequests, Telemetry
from exo_mesh.domain.footprint import MOST_SEQUENCES
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.routing.choice import Job
from exo_mesh.domain.routing.digest import prompt_hashes
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.rings.placing.choosing import InstanceChoice, Load, slots_of
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.prefix.digest import DigestMaker
from exo_mesh.rings.runner.scheduling.sequence import Sequence


def an_instance(name: str, *peers: str) -> InstanceInfo:
    count = len(peers)
    stages = tuple(StagePlan(one, "dummy", Shard("m", index, index + 1, count), 1) for index, one in enumerate(peers))
    plan = Plan(name, Ballot(1, peers[0]), "m", "d", stages, 64, PlanInputs((), "memory", 1))
    return InstanceInfo(plan, InstanceState.READY)


def a_reading(peer_id: str, **fields: Any) -> Telemetry:
    return replace(Telemetry(peer_id, 1, 0, 0, 0, entry_requests=EntryRequests()), **fields)


def a_choice(*readings: Telemetry, prefixes: dict[str, dict[str, bytes]] | None = None) -> InstanceChoice:
    membership: Any = SimpleNamespace(
        telemetry={one.peer_id: one for one in readings},
        own=SimpleNamespace(id="me"),
        peers=[SimpleNamespace(id=one.peer_id) for one in readings if one.peer_id != "me"],
        reading_of=lambda peer_id: next(one for one in readings if one.peer_id == peer_id),
        peer=lambda peer_id: SimpleNamespace(rtt_ms=1.0),
        prefixes_of=lambda peer_id: (prefixes or {}).get(peer_id, {}),
    )
    return InstanceChoice(membership, random.Random(1), lambda: 0.0)


ONE, OTHER = an_instance("m-1", "a"), an_instance("m-2", "b", "c")


def measured(choice: InstanceChoice, *seconds: float) -> InstanceChoice:
    for instance, step_s in zip((ONE, OTHER), seconds, strict=True):
        choice.speed(instance).took_step(1, step_s, 0.0)
        choice.speed(instance).took_first(10, step_s, 0.0)
    return choice


def test_the_faster_instance_is_chosen_until_others_have_filled_it() -> None:
    load = Load(job=Job(10, 50))
    assert measured(a_choice(a_reading("a"), a_reading("c")), 0.01, 0.02).best([ONE, OTHER], load) is ONE
    slots = {"m-1": 1}
    full = measured(
        a_choice(a_reading("a", slots=slots), a_reading("c"), a_reading("z", entry_requests=EntryRequests({"m-1": 9}))),
        0.01,
        0.02,
    )
    assert full.best([ONE, OTHER], load) is OTHER


def test_the_next_turn_goes_where_the_last_one_is_kept() -> None:
    choice, elsewhere = a_choice(a_reading("a"), a_reading("b"), a_reading("c")), an_instance("m-2", "c", "b")
    for instance in (ONE, OTHER):
        choice.speed(instance).took_first(1000, 1.0, 0.0)
    turn = prompt_hashes(range(640))
    load = Load(job=Job(700, 10), hashes=lambda: turn)
    choice.computed(OTHER, turn[:9])
    assert {choice.best([ONE, OTHER], load).plan.instance_id for _ in range(20)} == {"m-2"}
    choice.speed(elsewhere).took_first(1000, 1.0, 0.0)
    assert {choice.best([ONE, elsewhere], load).plan.instance_id for _ in range(20)} == {"m-1", "m-2"}, "placed again"


def test_a_prompt_that_came_in_at_another_peer_counts_too_unless_the_queue_costs_more() -> None:
    cache, prompt = PrefixCache(2), list(range(640))
    cache.ended(Sequence(1, prompt, computed=639), 0.0)
    digest = DigestMaker(cache, b"01234567").make(0.0)
    choice = a_choice(a_reading("a"), a_reading("b"), a_reading("c"), prefixes={"c": {"m-2": digest}})
    for instance in (ONE, OTHER):
        choice.speed(instance).took_first(1000, 1.0, 0.0)
        choice.speed(instance).took_step(1, 0.01, 0.0)
    turn = prompt_hashes([*prompt[:600], *range(100)])
    load = Load(job=Job(700, 10), hashes=lambda: turn)
    assert {choice.best([ONE, OTHER], load).plan.instance_id for _ in range(20)} == {"m-2"}
    slow = [Job(5000, 10)] * 40
    busy = Load(own=lambda: {"m-2": slow}, job=Job(700, 10), hashes=lambda: turn)
    assert {choice.best([ONE, OTHER], busy).plan.instance_id for _ in range(20)} == {"m-1"}


def test_own_requests_count_by_what_is_left_of_them_and_not_twice() -> None:
    mine = a_reading("me", entry_requests=EntryRequests({"m-1": 5}))
    driver = a_reading("a", slots={"m-1": 1}, outstanding={"m-1": 5})
    choice = measured(a_choice(mine, driver, a_reading("c")), 0.01, 0.02)
    assert choice.num_others("m-1") == 0
    nearly_done = Load(own=lambda: {"m-1": [Job(0, 1)]}, job=Job(10, 50))
    assert choice.best([ONE, OTHER], nearly_done) is ONE
    begun = Load(own=lambda: {"m-1": [Job(0, 500)]}, job=Job(10, 50))
    assert choice.best([ONE, OTHER], begun) is OTHER


def test_with_a_peer_of_an_older_version_the_count_of_the_driver_is_used() -> None:
    old = a_reading("z", entry_requests=None)
    choice = measured(a_choice(old, a_reading("a", slots={"m-1": 1}, outstanding={"m-1": 7})), 0.01, 0.02)
    assert choice.best([ONE, OTHER], Load(job=Job(10, 50))) is OTHER


def test_the_slots_of_an_instance_are_what_its_driver_reports() -> None:
    assert slots_of(ONE, None) == slots_of(ONE, a_reading("a")) == MOST_SEQUENCES
    assert slots_of(replace(ONE, plan=replace(ONE.plan, pool_sequences=8)), None) == 8
    assert slots_of(ONE, a_reading("a", slots={"m-1": 4})) == 4
    full = a_reading("a", slots={"m-1": 32}, outstanding={"m-1": 9}, waiting={"m-1": 6})
    assert slots_of(ONE, full) == 3, "its KV memory is used up by three"
