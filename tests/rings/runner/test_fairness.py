"""How requests share a ring: the four ratios of `exo-mesh bench fairness`, on a ring whose clock is a formula."""

from __future__ import annotations

from itertools import pairwise

import pytest

from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work
from tests.rings.runner.ring_model import Cost, RingModel
from tests.rings.runner.test_pace import costs

HOP_S = 0.0005
OUTPUT = 64
DUMMY = costs(0.010, 0.0)
"""The dummy engine with cost_ms=10: a frame takes as long whatever it holds."""
COMPUTING = costs(0.004, 0.0003, token_s=0.0004)
"""An engine that computes a prompt token in the time of a row."""
RINGS = pytest.mark.parametrize(("cost", "prompt"), [(DUMMY, 32), (DUMMY, 512), (COMPUTING, 32), (COMPUTING, 512)])


def taught(cost: Cost, num_stages: int, prompt: int, **limits: float) -> RingModel:
    """A ring that has served requests of this size."""
    ring = RingModel([cost] * num_stages, HOP_S, **limits)
    for number in range(20):
        ring.submit(Sequence(1000 + number, [0] * prompt), 16)
        ring.run()
    return ring


def times(ring: RingModel, count: int, prompt: int, output: int = OUTPUT) -> tuple[list[float], float]:
    """(seconds to the first token of each of `count` requests that come together, seconds until all are answered)."""
    begun = ring.now
    numbers = range(1, count + 1)
    for number in numbers:
        ring.submit(Sequence(number, [0] * prompt), output)
    ring.run()
    return [ring.drawn[number][0] - begun for number in numbers], max(ring.drawn[n][-1] for n in numbers) - begun


@RINGS
def test_one_stream_loses_nothing_where_batching_is_allowed(cost: Cost, prompt: int) -> None:
    allowed = times(taught(cost, 4, prompt), 1, prompt)[1]
    alone = times(taught(cost, 4, prompt, max_running=1), 1, prompt)[1]
    assert alone / allowed >= 0.98


@RINGS
def test_the_first_tokens_of_two_requests_come_within_twice_the_time(cost: Cost, prompt: int) -> None:
    for num_stages in (2, 4):
        ring = taught(cost, num_stages, prompt)
        (alone_s,), _ = times(ring, 1, prompt)
        assert max(times(ring, 2, prompt)[0]) <= 2.2 * alone_s


@RINGS
def test_eight_requests_over_four_stages_take_little_more_than_two(cost: Cost, prompt: int) -> None:
    ring = taught(cost, 4, prompt)
    _, alone_s = times(ring, 1, prompt)
    assert times(ring, 8, prompt)[1] <= 8 / 4 * 1.25 * alone_s


def reads_weights(work: Work) -> float:
    """A device that reads all weights in 20 ms, and computes 250 prompt tokens in that time."""
    return max(0.020, len(work.token_ids) * 0.00008)


@pytest.mark.parametrize(
    ("cost", "num_stages", "streams"),
    [(DUMMY, 2, 1), (DUMMY, 4, 1), (DUMMY, 4, 4), (reads_weights, 4, 1), (reads_weights, 8, 4)],
)
def test_a_long_prompt_leaves_streams_most_of_their_speed(cost: Cost, num_stages: int, streams: int) -> None:
    """Where a small chunk takes a stage hardly longer than a token does."""
    assert beside_long_prompt(cost, num_stages, streams) >= 0.79


def test_a_prompt_that_would_lose_most_of_its_speed_delays_a_stream_by_its_budget() -> None:
    """Each prompt token takes as long as a row: a fifth of the ring would be all that the prompt gets."""
    ring = RingModel([COMPUTING] * 4, HOP_S)
    assert beside_long_prompt(COMPUTING, 4, 1, ring) < 0.5
    assert max(after - before for before, after in pairwise(ring.drawn[1])) <= 0.25 + 4 * (0.0043 + HOP_S)


def beside_long_prompt(cost: Cost, num_stages: int, streams: int, ring: RingModel | None = None) -> float:
    """The speed of streams while a long prompt enters, against their speed before."""
    ring = ring or RingModel([cost] * num_stages, HOP_S)
    for number in range(1, streams + 1):
        ring.submit(Sequence(number, [0]), 10**9)
    begun = 3.0
    ring.run(arrivals=[(begun, Sequence(99, [0] * 50_000), 1)], until=begun + 0.2)
    while not ring.drawn[99]:
        ring.run(until=ring.now + 0.01)
    end = ring.drawn[99][0]
    came = [at for number in range(1, streams + 1) for at in ring.drawn[number]]
    before = sum(1.0 < at <= begun for at in came) / (begun - 1.0)
    return sum(begun < at <= end for at in came) / (end - begun) / before
