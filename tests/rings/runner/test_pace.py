"""What the scheduler makes of measured stages and links, on a ring whose clock is a formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exo_mesh.domain.frame import Row
from exo_mesh.rings.runner.scheduling.pace import FORGET_AFTER, MAX_BATCHES_PER_STAGE, Curve, Pace
from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work
from tests.rings.runner.ring_model import Cost, RingModel


class Fixed(Pace):
    """The simpler schedule: a number of batches that nothing changes."""

    def __init__(self, num_stages: int, count: int) -> None:
        super().__init__(num_stages)
        self.count = count

    def batches(self, rows: int) -> int:
        return max(1, min(rows, self.count))


def costs(base_s: float, row_s: float, token_s: float = 0.0) -> Cost:
    return lambda work: base_s + (token_s * len(work.token_ids) if work.is_prefill else row_s * len(work.rows))


def decode_rate(stages: list[Cost], hop_s: float, streams: int, pace: Pace | None = None) -> tuple[float, RingModel]:
    """Tokens per second of so many endless streams, after a time to learn; busy times are of the second part."""
    ring = RingModel(stages, hop_s, pace)
    for number in range(1, streams + 1):
        ring.submit(Sequence(number, [0]), 10**9)
    share = Work(tuple(Row(number, 0, 1, num_logits=1) for number in range(-(-streams // len(stages)))), ())
    learn = 60 * sum(stage(share) + hop_s for stage in stages) + 40 * max(stage(share) for stage in stages)
    ring.run(learn)
    before, since = sum(map(len, ring.drawn.values())), ring.now
    ring.busy = [0.0] * len(stages)
    ring.run(since + 3 * learn)
    return (sum(map(len, ring.drawn.values())) - before) / (ring.now - since), ring


def test_one_stream_takes_one_lap_for_a_token() -> None:
    rate, _ = decode_rate([costs(0.010, 0)] * 4, 0.0005, 1)
    assert rate == pytest.approx(1 / (4 * 0.0105), rel=0.01)


@pytest.mark.parametrize("streams", [4, 5, 8, 16, 32])
def test_four_streams_or_more_fill_four_stages(streams: int) -> None:
    """95 % of what stages that never wait could do, and no stage idle for more than a tenth of the time."""
    rate, ring = decode_rate([costs(0.010, 0)] * 4, 0.0002, streams)
    assert rate > 0.95 * streams / (4 * 0.010)
    assert min(ring.busy) / (ring.now * 3 / 4) > 0.9


def test_slow_links_get_more_frames_than_there_are_stages() -> None:
    """3 ms of computing and 5 ms of link: with four frames each stage is idle half of the time. More are smaller;
    that is all there is to win, as rate(24, 8) / rate(24, 4) = 1.1 says."""
    stages = [costs(0.003, 0.0003)] * 4
    adaptive, _ = decode_rate(stages, 0.005, 24)
    plain, _ = decode_rate(stages, 0.005, 24, Fixed(4, 4))
    assert adaptive > 1.08 * plain


def test_a_ring_with_one_slow_stage_does_not_cut_its_batches_small() -> None:
    """Where rows cost nothing and one stage is the bottleneck, many frames only queue in front of it."""
    stages = [costs(0.001, 0), costs(0.020, 0), costs(0.001, 0), costs(0.001, 0)]
    adaptive, _ = decode_rate(stages, 0.0002, 8)
    plain, _ = decode_rate(stages, 0.0002, 8, Fixed(4, 4))
    assert adaptive > 1.8 * plain


rings = st.tuples(
    # milliseconds of a stage for a frame and for each of its rows, from a hundredth of the other to a hundred times it
    st.lists(st.tuples(st.floats(1, 30), st.floats(0.01, 10)), min_size=2, max_size=6)
    | st.tuples(st.integers(2, 6), st.floats(1, 30), st.floats(0.01, 10)).map(lambda ring: [ring[1:]] * ring[0]),
    st.sampled_from([0.2, 1.0]) | st.floats(0, 10),
    st.integers(1, 32),
)
"""Stages (any, or all alike), milliseconds of a hop, streams."""


def share_of_the_best(ring: tuple[list[tuple[float, float]], float, int], counts: list[int]) -> float:
    """What the scheduler makes of a ring, against the best of the schedules that always have so many batches."""
    milliseconds, hop_ms, streams = ring
    stages = [costs(base / 1000, row / 1000) for base, row in milliseconds]
    adaptive, _ = decode_rate(stages, hop_ms / 1000, streams)
    plain = [decode_rate(stages, hop_ms / 1000, streams, Fixed(len(stages), count))[0] for count in counts]
    return adaptive / max(plain)


@settings(max_examples=2, deadline=None)
@given(rings)
@example(([(1.0, 1.0)] * 6, 0.2, 21))  # batches of 3 and 4 rows were one point of a curve
@example(([(1.0, 1.0)] * 2, 0.2, 9))  # and here those of 5 and 6 rows
@example(([(9.5, 7.0)] * 5, 1.0, 32))  # once the point of 5 rows was forgotten, they were never tried again
@example(([(1.0, 1.0)] * 5, 1.0, 30))  # the only point left was one of 5 and 6 rows
def test_it_never_loses_to_a_simpler_schedule(ring: tuple[list[tuple[float, float]], float, int]) -> None:
    """Neither to one big batch, nor to a frame for each stage, nor to one more."""
    num_stages = len(ring[0])
    assert share_of_the_best(ring, [1, num_stages, num_stages + 1]) >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=150, deadline=None)
@given(rings)
def test_it_never_loses_to_any_number_of_batches(ring: tuple[list[tuple[float, float]], float, int]) -> None:
    most = min(ring[2], MAX_BATCHES_PER_STAGE * len(ring[0]))
    assert share_of_the_best(ring, list(range(1, most + 1))) >= 0.97


@pytest.mark.parametrize(("rows", "batches", "sizes"), [(14, 4, [4, 4, 3, 3]), (8, 4, [2, 2, 2, 2]), (5, 2, [3, 2])])
def test_batches_are_as_equal_as_can_be(rows: int, batches: int, sizes: list[int]) -> None:
    """The largest sets the time of a lap: 4, 4, 4 and 2 rows take as long as 16."""
    ring = RingModel([costs(0.01, 0)] * batches, 0.0, Fixed(batches, batches), max_rows=32)
    for number in range(rows):
        ring.submit(Sequence(number, [0]), 10**9)
    ring.run(until=1.0)
    assert sorted(ring.scheduler._decodes, reverse=True) == sizes


def test_a_long_prompt_holds_streams_up_by_one_chunk_and_one_lap() -> None:
    stages = [costs(0.010, 0.0, token_s=0.0008)] * 4
    ring = RingModel(stages, 0.0005)
    for number in range(1, 5):
        ring.submit(Sequence(number, [0]), 600)
    ring.run(arrivals=[(2.0, Sequence(9, [0] * 3000), 5)])
    lap_s = 4 * 0.0105
    # the first chunk is of a size that nobody has measured yet
    first_s = 4 * (0.010 + 64 * 0.0008 + 0.0005)
    for number in range(1, 5):
        gaps = [after - before for before, after in pairwise(ring.drawn[number])]
        assert max(gaps) <= max(0.25, first_s) + lap_s + 1e-9
    assert len(ring.drawn[9]) == 5, "the prompt comes through beside them"


def test_a_chunk_is_of_the_size_that_its_budget_allows() -> None:
    pace = Pace(2)
    assert pace.chunk(0.25, 512) == 64, "nothing is known"
    for _ in range(10):
        pace.prefilled(64, 0.5, 0.0)
    assert pace.chunk(0.25, 512) == 32
    for _ in range(30):
        pace.prefilled(64, 0.01, 0.0)
    assert pace.chunk(0.25, 512) == 512
    assert pace.chunk(0.25, 100) == 96, "no longer than the longest"
    assert pace.chunk(1e-9, 512) == 16, "some progress there must be"


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        (lambda tokens: 3.0, [64, 16, 128, 256, 512, 512]),  # weights are read, whatever the chunk holds
        (lambda tokens: max(3.0, tokens / 50), [64, 16, 128, 256, 128, 128]),  # and from 150 tokens on it computes
        (lambda tokens: tokens / 5, [64, 16, 16, 16]),
    ],
)
def test_where_no_chunk_keeps_the_budget_it_is_as_large_as_costs_nothing(
    seconds: Callable[[int], float], sizes: list[int]
) -> None:
    pace, chosen = Pace(2), []
    for _ in sizes:
        chosen.append(pace.chunk(0.25, 512))
        for _ in range(5):
            pace.prefilled(chosen[-1], seconds(chosen[-1]), 0.0)
    assert chosen == sizes


def test_chunks_beside_streams_share_the_budget() -> None:
    """Four chunks that go round at the same time are four times as fast as one that is alone."""
    pace = Pace(4)
    assert pace.chunks(0.25, 512) == (1, 64), "nothing is known"
    for size in (32, 64, 128, 256):
        for _ in range(30):
            pace.prefilled(size, size * 0.001, 0.0, [size * 0.0002] * 4)
    assert pace.chunk(0.25, 512) == 192
    assert pace.chunks(0.25, 512) == (4, 192), "all four take a stage four fifths of a lap"
    for _ in range(30):
        pace.prefilled(64, 0.064, 0.0, [0.0] * 4)
    assert pace.chunks(0.25, 512) == (1, 192), "a slow link passes one after the other"
    slow = Pace(4)
    for size in (16, 512):
        for _ in range(30):
            slow.prefilled(size, 0.2, 0.0)  # whatever its size: small ones would be a waste
    assert slow.chunks(0.25, 512) == (1, 512)


def test_a_bad_moment_at_a_large_size_does_not_make_smaller_ones_expensive() -> None:
    """Twice the tokens take at most twice the time, and so a line to a point far above that is not believed."""
    pace = Pace(1)
    pace.prefilled(64, 0.08, 0.0, [0.08])
    pace.prefilled(330, 2.0, 0.0, [2.0])
    assert pace.chunk(0.25, 512) == 192


@pytest.mark.parametrize(("num_stages", "within"), [(1, 1.001), (2, 0.85), (4, 0.6)])
def test_a_prompt_that_is_alone_goes_through_all_stages_at_once(num_stages: int, within: float) -> None:
    """Its time to the first token, against one chunk that leaves all stages but one idle. The ring gets 40 prompts of
    several lengths to learn from."""
    base_s, token_s = 0.004 / num_stages, 0.0001 / num_stages
    ring = RingModel([costs(base_s, 0.0, token_s)] * num_stages, 0.0002)
    for number in range(1, 41):
        ring.submit(Sequence(number, [0] * (500, 30, 2000, 120)[number % 4]), 1)
        ring.run()
    start_s = ring.now
    ring.submit(Sequence(41, [0] * 500), 1)
    ring.run()
    in_one_chunk_s = 0.004 + 500 * 0.0001 + 0.004 + 2 * num_stages * 0.0002
    assert ring.drawn[41][0] - start_s <= within * in_one_chunk_s


class FixedChunks(Pace):
    """So many prefill chunks beside streams, of so many tokens."""

    def __init__(self, num_stages: int, count: int, size: int) -> None:
        super().__init__(num_stages)
        self._fixed = count, size

    def chunks(self, budget_s: float, longest: int) -> tuple[int, int]:
        return self._fixed


@pytest.mark.parametrize("seed", range(40))
def test_chunks_hold_a_stream_up_for_what_pace_reckons_or_little_more(seed: int) -> None:
    """Random rings, prompts at random times. What is reckoned: the lap of one chunk, or what all of them take at the
    slowest stage. One alone never holds up longer."""
    rng = random.Random(seed)
    num_stages, hop_s, size = rng.randint(1, 5), rng.choice([0.0005, 0.002, 0.02]), rng.choice([16, 64, 128])
    count, streams = rng.randint(1, num_stages), rng.randint(1, 8)
    drawn = [(rng.uniform(0.002, 0.03), rng.uniform(0, 0.003), rng.uniform(0.0002, 0.002)) for _ in range(num_stages)]
    ring = RingModel([costs(*one) for one in drawn], hop_s, FixedChunks(num_stages, count, size))
    for number in range(1, streams + 1):
        ring.submit(Sequence(number, [0]), 10**9)
    times = list(accumulate((rng.expovariate(0.7) for _ in range(20)), initial=1.0))
    prompts = [(at, Sequence(100 + n, [0] * rng.randint(1, 1500)), 1) for n, at in enumerate(times)]
    ring.run(until=times[-1] + 10, arrivals=prompts)
    gaps = [b - a for number in range(1, streams + 1) for a, b in pairwise(ring.drawn[number]) if b > 1]
    chunk_s = [base_s + token_s * size for base_s, _, token_s in drawn]
    reckoned_s = max(sum(chunk_s) + hop_s * num_stages, count * max(chunk_s))
    step_s = [base_s + row_s * (streams + 2) for base_s, row_s, _ in drawn]
    own_s = sum(step_s) + hop_s * num_stages + max(step_s)  # the other streams' frame may be before it
    assert max(gaps) <= own_s + (1.0 if count == 1 else 1.6) * reckoned_s + 1e-9


def test_prompts_beside_streams_fill_the_ring() -> None:
    """One chunk at a time would leave all stages but one waiting for it."""
    stages = [costs(0.001, 0.0, token_s=0.0002)] * 4
    ring = RingModel(stages, 0.0002)
    ring.submit(Sequence(1, [0]), 10**9)
    ring.run(arrivals=[(0.1, Sequence(9, [0] * 20_000), 1)], until=1.0)
    ring.busy = [0.0] * 4
    ring.run(until=2.0)
    assert min(ring.busy) > 0.8
    gaps = [after - before for before, after in pairwise(ring.drawn[1])]
    assert max(gaps) <= 0.25 + 4 * 0.0012


def test_a_curve_goes_through_what_was_measured() -> None:
    curve = Curve()
    assert not curve and curve.at(5) == 0.0
    curve.add(2, 4.0)
    assert [curve.at(1), curve.at(2), curve.at(8)] == [4.0, 4.0, 4.0]
    curve.add(8, 10.0)
    assert [curve.at(1), curve.at(5), curve.at(8), curve.at(14)] == [4.0, 7.0, 10.0, 16.0]
    assert [curve.proportional(1), curve.proportional(16)] == [2.0, 20.0]
    for _ in range(60):
        curve.add(8, 2.0)
    assert curve.at(8) == pytest.approx(4.0, abs=0.01), "more rows are never quicker"


def test_a_bad_moment_is_not_the_reason_for_small_batches() -> None:
    """Steps of four rows took long when the machine was busy, but a ring never splits rows that a stage could take one
    by one in the same time: with single rows it would not learn that it need not."""
    pace = Pace(4)

    def laps(count: int, rows: int, step_s: float) -> None:
        for _ in range(count):
            pace.decoded(rows, 4 * step_s, [step_s] * 4, 0.0)

    laps(100, 1, 0.01)
    laps(100, 4, 0.01)
    laps(1, 4, 1.0)
    laps(8, 4, 0.01)
    assert pace.batches(16) == 4, "one bad step changes nothing"
    laps(100, 4, 0.1)
    assert pace.batches(16) == 4


def test_slow_first_steps_of_a_size_do_not_split_the_rows_of_one_stage() -> None:
    pace = Pace(1)
    for _ in range(20):
        pace.decoded(4, 0.042, [0.040], 0.0)
    for step_s in (0.099, 0.091):  # buffers are allocated, and the requests of all other rows arrive
        pace.decoded(8, step_s + 0.004, [step_s], 0.0)
    assert pace.batches(8) == 1


def test_one_stage_gets_two_frames_where_most_of_a_lap_is_between_frames() -> None:
    pace = Pace(1)
    for rows in (4, 8):
        for _ in range(20):
            pace.decoded(rows, 0.006 + rows * 0.0005, [rows * 0.0005], 0.0)
    assert pace.batches(8) > 1


def test_frames_that_the_driver_read_late_do_not_count_as_slow_steps() -> None:
    """After a chunk of texts for vectors the driver is busy with its results, and a frame that is back waits for it."""
    pace = Pace(1)
    pace.prefilled(16, 0.010, 0.0, [0.010])
    for lap in range(200):
        pace.decoded(1, 0.3 if lap % 40 == 0 else 0.0005, [0.0004], 0.0)
    assert 0.75 * 4 * 20 <= pace.steps_between(16) <= 4 * 20


def test_texts_for_vectors_take_small_chunks_unless_larger_ones_are_much_faster() -> None:
    for base_s, token_s, expected in ((0.0, 0.0006, 16), (0.010, 0.0001, 192)):
        pace = Pace(1)
        for size in (16, 64, 128, 192, 256, 384, 512):
            pace.prefilled(size, base_s + size * token_s, 0.0, [base_s + size * token_s])
        chosen = pace.vector_chunk(256)
        assert chosen == expected
        assert pace.vector_chunk(chosen) == chosen


def test_a_size_that_is_no_longer_tried_is_forgotten() -> None:
    curve = Curve()
    for _ in range(10):
        curve.add(1, 0.01)
        curve.add(4, 0.1)
    assert curve.at(4) == pytest.approx(0.1)
    for _ in range(2 * FORGET_AFTER):
        curve.add(1, 0.01)
    assert curve.at(4) == pytest.approx(0.01)


def test_joining_and_leaving_at_random_loses_nobody() -> None:
    random_ = random.Random(7)
    ring = RingModel([costs(0.004, 0.001, 0.0002)] * 3, 0.001, max_running=8, max_waiting=100)
    arrivals = []
    for number in range(1, 60):
        prompt = random_.choice((1, 5, 40, 700))
        arrivals.append((random_.uniform(0, 3), Sequence(number, [0] * prompt), random_.randint(1, 40)))
    ring.run(arrivals=sorted(arrivals, key=lambda arrival: arrival[0]))
    assert {number: len(times) for number, times in ring.drawn.items()} == {s.id: n for _, s, n in arrivals}
    assert (ring.scheduler.num_running, ring.scheduler.num_waiting) == (0, 0)
