"""Where a request is expected to be done first, with numbers that can be checked by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from exo_mesh.domain.routing.choice import Job, Option, better_than, choose, expected_times
from exo_mesh.domain.routing.digest import prompt_hashes
from exo_mesh.domain.routing.prefixes import MAX_BLOCKS, KnownPrompts
from exo_mesh.domain.routing.prefixes import MAX_INSTANCES as MAX_KNOWN
from exo_mesh.domain.routing.speed import HALF_LIFE_S, MAX_INSTANCES, Speed, Speeds, StepLine


def a_speed(step_s: float, prompt_token_s: float = 0.001) -> Speed:
    """A step takes as long with 1 as with 1,000 requests."""
    speed = Speed()
    speed.took_step(1, step_s, 0.0)
    speed.took_step(1000, step_s, 0.0)
    speed.took_first(1000, 1000 * prompt_token_s + step_s, 0.0)
    return speed


def cheapest(options: list[Option], job: Job, draws: int = 20) -> set[int]:
    return {choose(options, job, random.Random(seed)) for seed in range(draws)}


def test_an_instance_that_keeps_the_beginning_is_preferred_unless_its_queue_costs_more() -> None:
    job, other = Job(1000, 20), Option(a_speed(0.02), slots=1)
    keeps = Option(a_speed(0.02), slots=1, cached=960)
    (expected,) = expected_times([keeps], job)
    assert expected.first_s == pytest.approx(0.04 + 0.02, rel=1e-3)
    assert cheapest([keeps, other], job) == {0}
    assert cheapest([replace(keeps, own=[Job(0, 10)]), other], job) == {0}, "0.2 s in its queue"
    assert cheapest([replace(keeps, own=[Job(0, 100)]), other], job) == {1}, "2 s in its queue"


def test_the_known_beginning_of_a_prompt_is_found_by_blocks() -> None:
    known, prompt = KnownPrompts(), list(range(300))
    known.note("m-1", ("a",), prompt_hashes(prompt))
    assert known.num_tokens("m-1", ("a",), prompt_hashes([*prompt, 7])) == 256
    assert known.num_tokens("m-1", ("a",), prompt_hashes([*prompt[:130], *prompt])) == 128
    assert known.num_tokens("m-1", ("a",), prompt_hashes([9, *prompt])) == 0
    assert known.num_tokens("m-1", ("a",), prompt_hashes(prompt, b"other scope")) == 0
    assert known.num_tokens("m-2", ("a",), prompt_hashes(prompt)) == 0
    assert known.num_tokens("m-1", ("b",), prompt_hashes(prompt)) == 0, "it was placed again, elsewhere"


def test_what_is_known_of_prompts_is_bounded() -> None:
    known = KnownPrompts()
    for number in range(3 * MAX_KNOWN):
        known.note(f"m-{number}", ("a",), prompt_hashes([number] * 64))
    assert len(known._known) == MAX_KNOWN
    for number in range(600):
        known.note("m", ("a",), prompt_hashes([number] * 64 * 30))
    assert len(known._known["m"].blocks) == MAX_BLOCKS
    assert known.num_tokens("m", ("a",), prompt_hashes([599] * 64 * 30)) == 64 * 30
    assert known.num_tokens("m", ("a",), prompt_hashes([0] * 64 * 30)) == 0


def test_an_idle_instance_takes_the_prompt_and_then_a_step_for_each_token() -> None:
    (expected,) = expected_times([Option(a_speed(0.02), slots=4, rtt_s=0.01)], Job(500, 11))
    assert expected.first_s == pytest.approx(0.01 + 0.5 + 0.02, rel=1e-3)
    assert expected.total_s == pytest.approx(expected.first_s + 10 * 0.02, rel=1e-3)


def test_a_request_waits_until_the_first_of_the_slots_is_free() -> None:
    jobs = [Job(0, 100), Job(0, 30)]
    (expected,) = expected_times([Option(a_speed(0.02), jobs, slots=2)], Job(0, 1))
    assert expected.first_s == pytest.approx(30 * 0.02 + 0.02, rel=1e-3)
    jobs = [Job(0, 100), Job(0, 30), Job(0, 50)]
    (expected,) = expected_times([Option(a_speed(0.02), jobs, slots=2)], Job(0, 1))
    assert expected.first_s == pytest.approx((30 + 50) * 0.02 + 0.02, rel=1e-3), (
        "the third takes the place of the second"
    )


def test_requests_of_other_entry_peers_count_as_long_as_this_one_and_half_done() -> None:
    (expected,) = expected_times([Option(a_speed(0.02), others=1, slots=1)], Job(0, 10))
    assert expected.first_s == pytest.approx(0.5 * 10 * 0.02 + 0.02, rel=1e-3)


def test_prompts_that_are_being_computed_come_first() -> None:
    (expected,) = expected_times([Option(a_speed(0.02), [Job(300, 5), Job(0, 5)], slots=4)], Job(100, 1))
    assert expected.first_s == pytest.approx(0.4 + 0.02, rel=1e-3)


def test_the_faster_of_two_idle_instances_gets_the_request() -> None:
    assert cheapest([Option(a_speed(0.02), slots=4), Option(a_speed(0.05), slots=4)], Job(10, 100)) == {0}


def test_the_slower_one_gets_it_once_the_faster_one_queues_for_longer_than_it_gains() -> None:
    job, slow = Job(0, 100), Option(a_speed(0.05), slots=1)
    assert cheapest([Option(a_speed(0.02), [Job(0, 10)], slots=1), slow], job) == {0}
    assert cheapest([Option(a_speed(0.02), [Job(0, 200)], slots=1), slow], job) == {1}


def test_equal_instances_get_requests_in_turns_and_the_first_one_is_drawn() -> None:
    idle = [Option(a_speed(0.02), slots=4) for _ in range(3)]
    assert cheapest(idle, Job(10, 10)) == {0, 1, 2}
    own = [Option(a_speed(0.02), [Job(0, 5)] * number, slots=4) for number in (2, 1, 2)]
    assert cheapest(own, Job(10, 10)) == {1}


def test_a_new_instance_is_tried_with_one_request_at_a_time() -> None:
    known, job = Option(a_speed(0.02), [Job(0, 10)], slots=32), Job(10, 50)
    assert cheapest([known, Option(Speed(), slots=32)], job) == {1}
    assert cheapest([known, Option(Speed(), [job], slots=32)], job) == {0}, "the first request has not come back yet"


def test_a_new_instance_counts_as_fast_as_a_measured_one_that_was_not_used_for_long() -> None:
    measured, job = a_speed(0.1, 0.01), Job(100, 50)
    stale, fresh = Option(measured, slots=1, trust=0.25), Option(Speed(), slots=1)
    times = expected_times([stale, fresh], job)
    assert times[0] == times[1]
    assert better_than([replace(stale, others=1), fresh], 0, job) == 1


def test_an_instance_without_a_measured_step_counts_with_the_step_of_the_fastest_one() -> None:
    only_first = Speed()
    only_first.took_first(1000, 1.0, 0.0)
    options = [Option(a_speed(0.1), trust=0.5), Option(only_first, trust=0.5)]
    times = expected_times(options, Job(0, 11))
    assert [one.total_s for one in times] == pytest.approx([0.55, 0.55], rel=1e-3)


def test_a_burst_on_instances_of_which_nothing_is_known_is_spread_evenly() -> None:
    own: list[list[Job]] = [[] for _ in range(4)]
    for seed in range(20):
        options = [Option(Speed(), list(jobs), slots=32) for jobs in own]
        own[choose(options, Job(10, 50), random.Random(seed))].append(Job(10, 50))
    assert [len(jobs) for jobs in own] == [5, 5, 5, 5]


def test_a_slow_measure_is_trusted_less_and_less() -> None:
    speed = a_speed(0.1)
    assert speed.trust(0.0) == 1.0 and speed.trust(HALF_LIFE_S) == 0.5
    assert Speed().trust(1e9) == 1.0
    stale = Option(speed, slots=4, trust=0.1)
    assert cheapest([stale, Option(a_speed(0.02), slots=4)], Job(10, 100)) == {0}


def test_a_step_line_finds_what_each_further_request_costs() -> None:
    line, draws = StepLine(), random.Random(1)
    for _ in range(300):
        requests = draws.randint(1, 16)
        line.add(requests, (0.02 + 0.001 * requests) * draws.uniform(0.9, 1.1))
    assert line.at(1) == pytest.approx(0.021, rel=0.15)
    assert line.at(16) == pytest.approx(0.036, rel=0.15)


def test_a_step_line_is_not_misled_by_one_interruption_or_by_one_number_of_requests() -> None:
    line = StepLine()
    for _ in range(50):
        line.add(4, 0.02)
    assert line.at(4) == pytest.approx(0.02) and line.at(8) == pytest.approx(0.02 * 1.2), "the usual slope"
    line.add(4, 60.0)
    assert line.at(4) < 0.022
    for _ in range(100):
        line.add(4, 0.04)
    assert line.at(4) == pytest.approx(0.04, rel=0.05), "a change of speed is learnt"


def test_a_burst_is_spread_over_instances_of_similar_speed() -> None:
    own: list[list[Job]] = [[], []]
    speeds = Speed(), Speed()
    for speed, step_s in zip(speeds, (0.020, 0.024), strict=True):
        speed.took_step(1, step_s, 0.0)
        speed.took_first(10, step_s, 0.0)
    for seed in range(20):
        options = [Option(speed, list(jobs), slots=32) for speed, jobs in zip(speeds, own, strict=True)]
        own[choose(options, Job(10, 50), random.Random(seed))].append(Job(10, 50))
    assert 6 <= len(own[1]) <= len(own[0]) <= 14


def test_an_instance_with_other_peers_is_measured_again() -> None:
    speeds = Speeds()
    speeds.of("m-1", ["a"]).took_first(10, 1.0, 0.0)
    assert speeds.of("m-1", ["a"]).is_known and not speeds.of("m-1", ["b"]).is_known


def test_the_usual_length_of_answers_bounds_what_is_expected() -> None:
    speeds = Speeds()
    for _ in range(50):
        speeds.answered("m", 100)
    assert speeds.output_tokens("m", 1000) == pytest.approx(100)
    assert speeds.output_tokens("m", 30) == 30
    assert speeds.output_tokens("m", 1000, 60) == pytest.approx(40)
    assert speeds.output_tokens("m", 1000, 500) == pytest.approx(25), "a long answer goes on for a while"
    assert speeds.output_tokens("m", 500, 500) == 0


def test_what_is_kept_of_instances_and_models_is_bounded() -> None:
    speeds = Speeds()
    for number in range(2 * MAX_INSTANCES):
        speeds.of(f"m-{number}", ["a"]).took_first(10, 1.0, 0.0)
        speeds.answered(f"m-{number}", 10)
    known = Counter(speeds.of(f"m-{number}", ["a"]).is_known for number in range(MAX_INSTANCES, 2 * MAX_INSTANCES))
    assert known == {True: MAX_INSTANCES}
    assert len(speeds._kept) == len(speeds._output_tokens) == MAX_INSTANCES


def test_a_waiting_request_moves_if_it_gains_enough_and_else_stays() -> None:
    job, busy = Job(0, 100), Option(a_speed(0.02), [Job(0, 100)], slots=1)
    assert better_than([busy, Option(a_speed(0.02), slots=1)], 0, job) == 1
    assert better_than([busy, Option(a_speed(0.02), [Job(0, 90)], slots=1)], 0, job) is None, "a tenth is too little"
    assert better_than([Option(a_speed(0.02), slots=1), Option(a_speed(0.001), slots=1)], 0, Job(0, 5)) is None, "0.5 s"


def test_prompts_in_the_queues_of_other_entry_peers_count() -> None:
    (expected,) = expected_times([Option(a_speed(0.02), others=5, slots=3)], Job(100, 1))
    assert expected.first_s == pytest.approx(2 * 0.1 + 0.1 + 0.02, rel=1e-2), "two of the five wait"
