"""Who is alive: a transition table, transcripts with hand-made times, and floods."""

from __future__ import annotations

import random
from itertools import product

import pytest

from exo_mesh.mesh.membership.detector import Timing
from exo_mesh.mesh.membership.gossip import MAX_ITEMS, GossipQueue, retransmissions
from exo_mesh.mesh.membership.swim import (
    GONE_S,
    MAX_ACCUSERS,
    MAX_GONE,
    MAX_HEALTH,
    NUM_HELPERS,
    SMALL,
    Life,
    Swim,
    SwimState,
    Update,
    is_news,
    suspicion_s,
)

TIMING = Timing(period_s=1.0, probe_s=0.5, suspicion_s=2.0, stall_s=1.0)
ALIVE, SUSPECT, DEAD, LEFT = SwimState
OLD, SAME, NEW = Life(4, 9), Life(5, 1), Life(5, 2)


def swim(*others: str) -> Swim:
    one = Swim("me", 1, TIMING, random.Random(7))
    for peer_id in others:
        one.learn(Update(peer_id, ALIVE, Life(1)), 0.0)
    return one


def run_ticks(one: Swim, begin: float, end: float) -> list[Update]:
    """Tick every 0.25 s; all verdicts."""
    verdicts = []
    now = begin
    while now <= end:
        verdicts += one.tick(now).dead
        now += 0.25
    return verdicts


# held, told: taken with an older, the same, a newer life?
TABLE = {
    (ALIVE, ALIVE): (False, False, True),
    (ALIVE, SUSPECT): (False, True, True),
    (ALIVE, DEAD): (False, True, True),
    (ALIVE, LEFT): (False, True, True),
    (SUSPECT, ALIVE): (False, False, True),
    (SUSPECT, SUSPECT): (False, False, True),
    (SUSPECT, DEAD): (False, True, True),
    (SUSPECT, LEFT): (False, True, True),
    (DEAD, ALIVE): (False, False, True),
    (DEAD, SUSPECT): (False, False, False),
    (DEAD, DEAD): (False, False, True),
    (DEAD, LEFT): (False, False, True),
    (LEFT, ALIVE): (False, False, True),
    (LEFT, SUSPECT): (False, False, False),
    (LEFT, DEAD): (False, False, True),
    (LEFT, LEFT): (False, False, True),
}


def test_every_pair_of_states_is_decided_and_what_is_illegal_changes_nothing() -> None:
    assert TABLE.keys() == set(product(SwimState, SwimState))
    for (held, told), expected in TABLE.items():
        got = tuple(is_news(held, SAME, Update("p", told, life)) for life in (OLD, SAME, NEW))
        assert got == expected, (held, told)
        for life, is_taken in zip((OLD, SAME, NEW), expected, strict=True):
            one = swim()
            one.learn(Update("p", ALIVE, SAME), 0.0)
            if held is DEAD:
                one.learn(Update("p", SUSPECT, SAME), 0.0)  # else it would be doubted
            one.learn(Update("p", held, SAME), 0.0)
            before = one.updates()
            assert one.learn(Update("p", told, life), 1.0) is is_taken
            assert (one.updates() != before) is is_taken


def test_news_in_any_order_ends_in_the_same_state() -> None:
    news = [Update("p", state, Life(1, number)) for state in SwimState for number in range(3)]
    ends = set()
    for seed in range(50):
        one = swim("p")
        random.Random(seed).shuffle(news)
        for told in [*news, *news]:  # gossip repeats
            one.learn(told, 0.0)
        held = one.member("p")
        assert held is not None
        ends.add(held.life)
        assert held.published in (DEAD, LEFT), "nothing newer has refuted the last verdict"
    assert ends == {Life(1, 2)}


def test_a_suspicion_of_a_start_that_is_not_known_here_waits_until_that_start_is() -> None:
    one = swim("p")
    assert not one.learn(Update("p", SUSPECT, Life(2)), 0.0) and not one.learn(Update("q", SUSPECT, Life(1)), 0.0)
    assert one.updates() == [Update("p", ALIVE, Life(1))]
    one.learn(Update("p", DEAD, Life(1, 2**32)), 1.0)  # what the membership does when a peer has restarted
    assert one.learn(Update("p", ALIVE, Life(2)), 1.0)
    assert one.learn(Update("p", SUSPECT, Life(2)), 2.0)


def test_a_silent_peer_is_suspected_and_then_dead_and_not_before_its_time() -> None:
    one = swim("p")
    assert one.tick(0.0).probes == ["p"]
    assert one.failed("p", 0.0, 0.5, asked=0, answered=()) == Update("p", SUSPECT, Life(1), ("me",))
    assert run_ticks(one, 0.75, 2.25) == []
    assert run_ticks(one, 2.5, 2.5) == [Update("p", DEAD, Life(1))]
    assert one.living == []


def test_a_suspect_whom_nobody_else_accuses_has_twice_the_time() -> None:
    one = swim("p", "q")
    one.tick(0.0)
    one.failed("p", 0.0, 0.5, asked=0)
    assert run_ticks(one, 0.75, 4.25) == []
    assert run_ticks(one, 4.5, 4.5) == [Update("p", DEAD, Life(1))]


def test_others_that_could_not_reach_it_either_shorten_the_time_of_a_suspect_and_are_passed_on() -> None:
    one = swim("p", "q")
    one.tick(0.0)
    assert one.learn(Update("p", SUSPECT, Life(1), ("q",)), 0.5)
    assert one.failed("p", 0.0, 1.0, asked=1, answered=["q"]) == Update("p", SUSPECT, Life(1), ("q", "me"))
    assert one.failed("p", 1.0, 2.0, asked=1, answered=["q"]) is None, "one is one accuser, however often one asks"
    assert not one.learn(Update("p", SUSPECT, Life(1), ("q",)), 2.0)
    assert not one.learn(Update("p", SUSPECT, Life(1, 0), ()), 2.0)
    assert run_ticks(one, 2.25, 2.5) == [Update("p", DEAD, Life(1))], "2 s after it was suspected first"


def test_a_flood_of_accusers_is_bounded() -> None:
    one = swim("p", *(f"q{index}" for index in range(100)))
    one.learn(Update("p", SUSPECT, Life(1), ("q0",)), 0.0)
    news = [one.learn(Update("p", SUSPECT, Life(1), (f"q{index}",)), 0.1) for index in range(100)]
    held = one.member("p")
    assert held is not None and len(held.accusers) == MAX_ACCUSERS and sum(news) == MAX_ACCUSERS - 1


def test_a_death_that_others_tell_of_a_peer_alive_here_is_doubted_and_passed_on() -> None:
    one = swim("p", "q")
    assert one.learn(Update("p", DEAD, Life(1)), 0.0)
    assert "p" in one.living and one.update_of("p") == Update("p", DEAD, Life(1))
    assert not one.learn(Update("p", DEAD, Life(1)), 0.1), "said twice is no more true"
    one.acked("p", 3.0)
    assert run_ticks(one, 3.0, 6.75) == [], "it answers here, so it is given time to answer the verdict"
    assert one.learn(Update("p", ALIVE, Life(1, 1)), 6.8)
    assert run_ticks(one, 7.0, 20.0) == [] and one.update_of("p") == Update("p", ALIVE, Life(1, 1))


def test_a_doubted_death_is_believed_if_the_peer_does_not_answer_here_either() -> None:
    one = swim("p", "q")
    one.learn(Update("p", DEAD, Life(1)), 0.0)
    assert one.failed("p", 0.0, 0.5, asked=1, answered=["h"]) == Update("p", DEAD, Life(1))
    assert one.living == ["q"]
    two = swim("p", "q")
    two.learn(Update("p", DEAD, Life(1)), 0.0)
    assert run_ticks(two, 0.25, 3.75) == []
    assert run_ticks(two, 4.0, 4.0) == [Update("p", DEAD, Life(1))], "nor for ever"


def test_no_death_is_doubted_that_follows_a_suspicion_or_is_of_a_later_start_and_no_goodbye_is() -> None:
    one = swim("p", "q", "r")
    one.learn(Update("p", SUSPECT, Life(1)), 0.0)
    assert one.learn(Update("p", DEAD, Life(1)), 0.1) and one.learn(Update("q", DEAD, Life(2)), 0.1)
    one.learn(Update("r", DEAD, Life(1)), 0.1)
    assert one.living == ["r"]
    assert one.learn(Update("r", LEFT, Life(1)), 0.2) and one.living == []


def test_a_suspect_that_rises_above_the_suspicion_lives() -> None:
    one = swim("p")
    one.tick(0.0)
    one.failed("p", 0.0, 0.5, asked=0, answered=())
    assert not one.learn(Update("p", ALIVE, Life(1, 0)), 1.0), "an old sign of life is none"
    assert one.learn(Update("p", ALIVE, Life(1, 1)), 1.0)
    assert run_ticks(one, 0.75, 10.0) == [] and one.living == ["p"]


def test_one_rises_above_what_is_said_of_oneself_once() -> None:
    one = swim("p")
    verdict = Update("me", DEAD, Life(1, 0))
    assert one.is_accused(verdict)
    assert one.refute(verdict) == Update("me", ALIVE, Life(1, 1))
    assert not one.is_accused(verdict), "that was answered"
    assert one.refute(verdict) == Update("me", ALIVE, Life(1, 1))
    assert one.refute(Update("me", LEFT, Life(1, 5))).life == Life(1, 6)
    assert not one.is_accused(Update("me", ALIVE, Life(1, 99)))


def test_a_node_that_stood_still_asks_before_it_judges() -> None:
    one = swim("p", "q")
    one.tick(0.0)
    one.failed("q", 0.0, 0.5, asked=0)
    # stopped from 1 to 100: the suspicion of q ran out meanwhile, and a probe of p that was under way has failed
    run_ticks(one, 0.75, 1.0)
    assert one.failed("p", 0.9, 100.0, asked=1, answered=()) is None
    assert one.tick(100.1).dead == [] and set(one.living) == {"p", "q"}
    assert run_ticks(one, 100.25, 111.9) == []
    assert one.health == 2, "it stood still, and its helper did not answer"
    assert run_ticks(one, 112.0, 112.25) == [Update("q", DEAD, Life(1))], "q had its whole time once more, three times"


def test_local_health_falls_when_nobody_answers_and_stretches_the_period() -> None:
    one = swim("p", "q", "r")
    one.tick(0.0)
    for _ in range(2 * MAX_HEALTH):
        one.failed("p", 0.0, 0.1, asked=2, answered=())
    assert one.health == MAX_HEALTH and one.probe_timeout_s == pytest.approx(0.5 * (1 + MAX_HEALTH))
    one.acked("q", 0.2)
    assert one.health == MAX_HEALTH - 1
    assert one.failed("q", 0.0, 0.3, asked=2, answered=["h", "i"])
    assert one.health == MAX_HEALTH - 1, "helpers say it is not us"


def test_answers_that_nearly_come_too_late_make_local_health_worse_and_prompt_ones_better() -> None:
    one = swim("p")
    one.acked("p", 0.4, took_s=0.4)
    assert one.health == 1
    one.acked("p", 0.5, took_s=0.3)
    assert one.health == 1, "neither late by the longer time that it had nor prompt"
    one.acked("p", 0.6, took_s=0.01)
    assert one.health == 0


def test_bad_local_health_gives_a_suspect_up_to_four_times_as_long() -> None:
    def dead_after(health: int) -> float:
        one = swim("p")
        one.tick(0.0)
        one.failed("p", 0.0, 0.0, asked=0, answered=())
        one.health = health
        now = 0.0
        while not one.tick(now).dead:
            now += 0.25
        return now

    assert [dead_after(health) for health in (0, 1, 3, MAX_HEALTH)] == [2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("count", [SMALL + 2, 101])
def test_in_a_large_mesh_each_peer_is_asked_by_the_one_before_it_every_second_period(count: int) -> None:
    ids = [f"p{index:03d}" for index in range(count)]
    asked = {}
    for own in ids:
        one = Swim(own, 1, TIMING, random.Random(own))
        for other in ids:
            one.learn(Update(other, ALIVE, Life(1)), 0.0)
        asked[own] = [one.tick(float(second)).probes for second in range(2)]
        assert [len(probes) for probes in asked[own]] == [1, 1]
    assert [asked[own][0][0] for own in ids] == [*ids[1:], ids[0]]


@pytest.mark.parametrize("count", [SMALL + 1, 100])
def test_and_in_the_other_periods_each_peer_asks_everybody_once(count: int) -> None:
    others = [f"p{index}" for index in range(count)]
    one = swim(*others)
    asked = [one.tick(float(second)).probes for second in range(2 * count)][1::2]
    assert all(len(probes) == 1 for probes in asked)
    assert sorted(probe for probes in asked for probe in probes) == sorted(others)


@pytest.mark.parametrize("count", [1, 2, 8, SMALL])
def test_a_small_mesh_has_a_bounded_number_of_probes(count: int) -> None:
    """Each peer is probed in each period by the one before it, and by every other peer in turn."""
    ids = [f"p{index:03d}" for index in range(count + 1)]
    asked = {}
    for own in ids:
        one = Swim(own, 1, TIMING, random.Random(own))
        for other in ids:
            one.learn(Update(other, ALIVE, Life(1)), 0.0)
        asked[own] = [one.tick(float(second)).probes for second in range(2 * count)]
        assert {len(probes) for probes in asked[own][::2]} == {1}
        assert all(len(probes) <= 2 for probes in asked[own])
        assert {probe for probes in asked[own][1::2] for probe in probes} == set(ids) - {own}
    for second in range(2 * count):
        assert [asked[own][second][0] for own in ids] == [*ids[1:], ids[0]]


def test_peers_that_this_node_depends_on_are_probed_in_each_period() -> None:
    one = swim(*(f"p{index}" for index in range(100)))
    for second in range(10):
        assert {"p7", "p8"} <= set(one.tick(float(second), lambda: ["p7", "p8", "nobody"]).probes)


def test_helpers_that_could_not_reach_it_confirm_a_suspicion() -> None:
    one = swim("p", "q", "r")
    one.tick(0.0)
    assert one.failed("p", 0.0, 0.5, asked=2, answered=["q", "r"]) == Update("p", SUSPECT, Life(1), ("me", "q", "r"))
    assert run_ticks(one, 0.75, 2.25) == []
    assert run_ticks(one, 2.5, 2.5) == [Update("p", DEAD, Life(1))], "the shortest time"


@pytest.mark.parametrize("state", [SUSPECT, DEAD])
def test_a_reported_suspect_is_probed_at_once_in_a_small_mesh(state: SwimState) -> None:
    one = swim("p", "q", "r")
    one.tick(0.0)
    assert one.tick(0.1).probes == []
    one.learn(Update("q", state, Life(1), ("p",)), 0.2)
    assert one.tick(0.2).probes == ["q"] and one.tick(0.3).probes == []
    large = swim(*(f"p{index}" for index in range(SMALL + 1)))
    large.tick(0.0)
    large.learn(Update("p1", state, Life(1), ("p2",)), 0.2)
    assert large.tick(0.2).probes == [], "too many would probe one peer at a time"


def test_a_tick_is_due_once_a_period_and_more_often_while_there_are_suspects() -> None:
    one = swim("p", "q")
    assert one.tick(5.0).next_at == 6.0
    one.learn(Update("p", SUSPECT, Life(1), ("q",)), 5.5)
    assert one.tick(5.5).next_at == 5.75


def test_a_node_that_is_called_when_it_is_due_has_not_stood_still() -> None:
    one = swim("p", "q")
    for second in range(5):
        one.tick(second * 1.5)
    assert one.health == 0, "half a second late each time"
    one.tick(8.0 + TIMING.stall_s)
    assert one.health == 1


def test_a_suspect_is_asked_each_period_in_a_large_mesh_too() -> None:
    one = swim(*(f"p{index}" for index in range(100)))
    one.failed("p50", 0.0, 0.1, asked=3, answered=["h", "i", "j"])
    assert "p50" in one.tick(0.2).probes


def test_helpers_are_few_alive_and_not_the_one_in_question() -> None:
    one = swim(*(f"p{index}" for index in range(40)))
    one.learn(Update("p1", SUSPECT, Life(1)), 0.0)
    for _ in range(50):
        chosen = one.helpers("p2")
        assert len(set(chosen)) == NUM_HELPERS and not {"p1", "p2"} & set(chosen)


def test_suspicion_lasts_longer_in_a_larger_mesh_by_its_logarithm_and_less_with_each_accuser() -> None:
    assert [suspicion_s(1.5, 1, 0, 1), suspicion_s(1.5, 2, 1, 2), suspicion_s(1.5, 15, 14, 4)] == [1.5, 1.5, 1.5]
    assert suspicion_s(1.5, 255, 254, 1) == pytest.approx(6.0) and suspicion_s(1.5, 255, 254, 4) == pytest.approx(1.5)
    assert suspicion_s(1.5, 1023, 1022, 1) == pytest.approx(7.5)
    assert suspicion_s(1.5, 1023, 1022, 4) == pytest.approx(1.875)
    assert suspicion_s(1.5, 255, 254, 2) == pytest.approx(6.0 - 4.5 / 2), "log 2 / log 4"
    assert suspicion_s(1.5, 15, 0, 1) == 1.5, "nobody is left to confirm it"


def test_the_gone_are_remembered_for_a_while_and_never_too_many() -> None:
    one = swim()
    for index in range(MAX_GONE + 100):
        one.learn(Update(f"p{index}", DEAD, Life(1)), float(index) / 1000)
    assert len(one.updates()) == MAX_GONE and one.member(f"p{MAX_GONE + 99}") is not None
    one.learn(Update("late", DEAD, Life(1)), 10.0 + GONE_S)
    assert [update.peer_id for update in one.updates()] == ["late"]


def test_suspicion_of_a_stranger_is_no_news() -> None:
    one = swim()
    assert not one.learn(Update("p", SUSPECT, Life(1)), 0.0) and one.updates() == []


def test_news_is_told_a_limited_number_of_times_the_least_told_first() -> None:
    queue: GossipQueue[str] = GossipQueue()
    queue.put("a", 2)
    assert queue.take(5) == ["a"]
    queue.put("b", 2)
    assert queue.take(1) == ["b"]
    assert sorted(queue.take(5)) == ["a", "b"]
    assert queue.take(5) == [] and len(queue) == 0
    queue.put("c", 0)
    assert len(queue) == 0


def test_a_flood_of_news_is_bounded_and_pushes_out_what_was_told_most() -> None:
    queue: GossipQueue[int] = GossipQueue()
    queue.put(-1, 1000)
    queue.take(1)
    for number in range(MAX_ITEMS + 100):
        queue.put(number, 3)
        assert len(queue) <= MAX_ITEMS
    assert -1 not in queue.take(MAX_ITEMS)


def test_retransmissions_grow_with_the_logarithm() -> None:
    assert [retransmissions(count) for count in (0, 14, 254, 1022)] == [3, 12, 24, 30]
