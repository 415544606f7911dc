"""The scheduler's decisions, without a ring."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.frame import Row
from exo_mesh.domain.request import FLEX_PRIORITY
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.queue import FLEX_TURNS
from exo_mesh.rings.runner.scheduling.scheduler import EVICTION_TURNS, Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence, Work


def scheduler_of(num_stages: int, **limits: int) -> Scheduler:
    return Scheduler(SchedulerLimits(num_stages, **limits), Pace(num_stages))


def admitted(scheduler: Scheduler, *prompts: int) -> list[Sequence]:
    sequences = [Sequence(number, list(range(size))) for number, size in enumerate(prompts, start=1)]
    for sequence in sequences:
        assert scheduler.submit(sequence)
    assert list(scheduler.admit()) == sequences
    return sequences


def rows(work: Work | None) -> list[tuple[int, int, int, int]]:
    return [(row.sequence, row.pos0, row.n, row.num_logits) for row in work.rows] if work else []


def test_a_prompt_is_prefilled_in_chunks_and_its_last_token_is_the_first_decode_row() -> None:
    scheduler = scheduler_of(4, prefill_chunk=4)
    (sequence,) = admitted(scheduler, 10)
    assert rows(scheduler.next_work()) == [(1, 0, 4, 0)]
    assert rows(scheduler.next_work()) == [(1, 4, 4, 0)]
    assert rows(scheduler.next_work()) == [(1, 8, 1, 0)]
    assert rows(scheduler.next_work()) == [(1, 9, 1, 1)]
    assert scheduler.next_work() is None, "the next token is not known before the row comes round"
    scheduler.came_round(Work((Row(1, 9, 1, 1),), (9,), drawing=(sequence,)))
    scheduler.token_drawn(sequence, 77)
    assert rows(scheduler.next_work()) == [(1, 10, 1, 1)]


def test_short_prompts_share_a_chunk() -> None:
    scheduler = scheduler_of(2, prefill_chunk=10)
    admitted(scheduler, 4, 1, 6, 9)
    assert rows(scheduler.next_work()) == [(1, 0, 3, 0), (3, 0, 5, 0), (4, 0, 2, 0)]
    assert rows(scheduler.next_work()) == [(1, 3, 1, 1), (2, 0, 1, 1)], "two of the three that decode by now"


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    scheduler = scheduler_of(1)
    admitted(scheduler, 1)
    assert rows(scheduler.next_work()) == [(1, 0, 1, 1)]


def test_running_sequences_are_spread_over_the_frames_in_flight() -> None:
    scheduler = scheduler_of(4)
    admitted(scheduler, 1, 1, 1, 1, 1, 1, 1, 1)
    assert [len(rows(scheduler.next_work())) for _ in range(4)] == [2, 2, 2, 2]
    assert scheduler.next_work() is None


def test_a_long_prompt_takes_turns_with_running_streams() -> None:
    scheduler = scheduler_of(1, prefill_chunk=4)
    short, _long = admitted(scheduler, 1, 100)
    kinds = []
    ring: list[Work] = []
    for _ in range(6):
        while (work := scheduler.next_work()) is not None:
            kinds.append("prefill" if work.is_prefill else "decode")
            ring.append(work)
        scheduler.came_round(ring[0])
        if not ring.pop(0).is_prefill:
            scheduler.token_drawn(short, 5)
    assert kinds[:6] == ["prefill", "decode"] * 3


def test_beside_streams_one_chunk_is_on_its_way_and_alone_as_many_as_stages() -> None:
    scheduler = scheduler_of(3, prefill_chunk=4)
    admitted(scheduler, 1, 100)
    sent = [scheduler.next_work() for _ in range(3)]
    assert [work.is_prefill for work in sent if work] == [True, False], "a second chunk would be one gap more"
    scheduler = scheduler_of(3, prefill_chunk=4)
    admitted(scheduler, 100)
    assert [work.is_prefill for work in (scheduler.next_work() for _ in range(4)) if work] == [True] * 3


class DrawnPace(Pace):
    """One that changes its mind at any time."""

    def __init__(self, batches: list[int]) -> None:
        super().__init__(1)
        self._drawn = itertools.cycle(batches)

    def batches(self, rows: int) -> int:
        return next(self._drawn)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(2, 6), st.integers(1, 8))
def test_between_two_steps_of_a_stream_at_most_one_chunk_is_sent(
    batches: list[int], streams: int, max_rows: int
) -> None:
    scheduler = Scheduler(SchedulerLimits(4, prefill_chunk=4, max_rows=max_rows), DrawnPace(batches))
    sequences = {sequence.id: sequence for sequence in admitted(scheduler, *[1] * streams, 120)}
    chunks_since = dict.fromkeys(sequences, 0)
    ring: list[Work] = []
    while sequences[streams + 1].prefill_left:
        while (work := scheduler.next_work()) is not None:
            ring.append(work)
            for number in sequences if work.is_prefill else {row.sequence for row in work.rows}:
                chunks_since[number] = chunks_since[number] + 1 if work.is_prefill else 0
            assert all(chunks_since[number] <= 1 for number in range(1, streams + 1)), chunks_since
        scheduler.came_round(ring[0])
        for row in ring.pop(0).rows:
            if row.num_logits:
                scheduler.token_drawn(sequences[row.sequence], 0)


def test_the_waiting_queue_is_bounded_and_a_removed_sequence_makes_room() -> None:
    scheduler = scheduler_of(1, max_waiting=2)
    assert scheduler.submit(Sequence(1, [0])) and scheduler.submit(Sequence(2, [0]))
    assert not scheduler.submit(Sequence(3, [0]))
    assert scheduler.remove(1) is False, "it was waiting, no stage has heard of it"
    assert scheduler.submit(Sequence(3, [0]))
    list(scheduler.admit())
    assert scheduler.remove(2) is True
    assert scheduler.num_running == 1


def test_admission_stops_where_the_kv_pool_ends_but_one_request_always_runs() -> None:
    scheduler = scheduler_of(1, max_tokens=10)
    for number, size in enumerate((20, 5), start=1):
        scheduler.submit(Sequence(number, [0] * size))
    assert [sequence.id for sequence in scheduler.admit()] == [1]
    scheduler.remove(1)
    assert [sequence.id for sequence in scheduler.admit()] == [2]


def test_when_the_running_outgrow_the_pool_the_youngest_waits_and_is_computed_anew() -> None:
    scheduler = scheduler_of(1, max_tokens=10)
    old, young, last = (Sequence(number, [0] * size) for number, size in ((1, 4), (2, 5), (3, 2)))
    for sequence in (old, young, last):
        scheduler.submit(sequence)
    assert [sequence.id for sequence in scheduler.admit()] == [1, 2]
    young.computed, young.on_way = 5, 1
    scheduler.token_drawn(old, 0)
    assert list(scheduler.evict()) == []
    scheduler.token_drawn(old, 0)
    assert list(scheduler.evict()) == [young] and list(scheduler.admit()) == []
    scheduler.token_drawn(young, 0)  # it was on its way
    assert (young.computed, len(young.tokens), list(scheduler.waiting)) == (0, 6, [young, last])
    assert scheduler.remove(1) is True
    assert list(scheduler.admit()) == [young, last]


def test_who_was_evicted_for_want_of_room_comes_back_when_another_has_left_or_there_is_twice_the_room() -> None:
    scheduler = scheduler_of(1, max_tokens=100)
    for number in (1, 2):
        scheduler.submit(Sequence(number, [0] * 20))
    old, young = scheduler.admit()
    scheduler.room = 39  # buffers take more than their positions
    assert list(scheduler.evict()) == [young]
    scheduler.room = 40  # the memory of the evicted one shows as free
    assert list(scheduler.admit()) == [], "it would be evicted again"
    scheduler.room = 60
    assert list(scheduler.admit()) == [young]
    scheduler.room = 39
    assert list(scheduler.evict()) == [young]
    scheduler.remove(old.id)
    assert list(scheduler.admit()) == [young]


def test_running_sequences_grow_into_memory_that_they_have_already_and_new_ones_do_not_take_it() -> None:
    scheduler = scheduler_of(1, max_tokens=100)
    for number in (1, 2):
        scheduler.submit(Sequence(number, [0] * 20))
    old, young = scheduler.admit()
    scheduler.room, scheduler.slack = 40, 2
    scheduler.submit(Sequence(3, [0]))
    assert list(scheduler.admit()) == []
    scheduler.token_drawn(old, 0)
    scheduler.token_drawn(young, 0)
    assert list(scheduler.evict()) == []
    scheduler.token_drawn(old, 0)
    assert list(scheduler.evict()) == [young]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 9))
def test_every_position_of_every_sequence_is_computed_once_and_in_order(
    prompts: list[int], in_flight: int, chunk: int
) -> None:
    scheduler = scheduler_of(in_flight, prefill_chunk=chunk)
    sequences = {sequence.id: sequence for sequence in admitted(scheduler, *prompts)}
    reached = dict.fromkeys(sequences, 0)
    ring: list[Work] = []
    while sequences:
        while work := scheduler.next_work():
            for row in work.rows:
                assert row.pos0 == reached[row.sequence]
                reached[row.sequence] += row.n
            ring.append(work)
        assert ring, "with a running sequence there is always something to do"
        scheduler.came_round(ring[0])
        for row in ring.pop(0).rows:
            if row.num_logits:
                scheduler.token_drawn(sequences[row.sequence], 1)
                if len(sequences[row.sequence].tokens) >= prompts[row.sequence - 1] + 5:
                    scheduler.remove(row.sequence)
                    del sequences[row.sequence]


def test_a_parked_sequence_gets_no_rows_and_keeps_its_place() -> None:
    scheduler = scheduler_of(1)
    slow, fast = admitted(scheduler, 1, 1)
    slow.parked = True
    assert rows(scheduler.next_work()) == [(fast.id, 0, 1, 1)]
    scheduler.came_round(Work((), ()))
    assert scheduler.num_running == 2


def test_parked_sequences_make_room_when_nothing_else_could_move() -> None:
    scheduler = scheduler_of(1, max_running=2)
    one, two = admitted(scheduler, 1, 1)
    late = Sequence(3, [0])
    assert scheduler.submit(late)
    one.parked = True
    assert list(scheduler.evict()) == [], "the other one moves, and will make room"
    two.parked = True
    assert list(scheduler.evict()) == [one] and list(scheduler.admit()) == [late]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_parked) == (2, 0, 2)
    scheduler.unpark(one)
    assert [place for place, sequence in scheduler.places() if sequence is one] == [1]
    assert scheduler.remove(late.id) and list(scheduler.admit()) == [one] and one.computed == 0


def test_a_parked_sequence_gives_up_its_place_to_others_after_a_while() -> None:
    scheduler = scheduler_of(1, max_running=2)
    slow, fast = admitted(scheduler, 1, 1)
    slow.parked = True
    assert scheduler.submit(Sequence(3, [0]))
    turns = 0
    while not (evicted := list(scheduler.evict())):
        work = scheduler.next_work()
        assert work is not None and [row.sequence for row in work.rows] == [fast.id]
        scheduler.came_round(work)
        scheduler.token_drawn(fast, 0)
        turns += 1
    assert evicted == [slow] and turns == EVICTION_TURNS
    assert not scheduler.remove(slow.id) and scheduler.num_parked == 0, "no stage holds anything of it"


def test_where_the_pool_is_outgrown_parked_sequences_go_first() -> None:
    scheduler = scheduler_of(1, max_tokens=9)
    one, _, three = admitted(scheduler, 3, 3, 3)
    one.parked = True
    scheduler.token_drawn(three, 0)
    assert list(scheduler.evict()) == [one] and list(scheduler.admit()) == [], "it waits for its reader, not for room"


def test_a_machine_short_of_memory_first_gets_nobody_new_then_loses_the_youngest_then_refuses() -> None:
    scheduler = scheduler_of(1)
    one, two, three = admitted(scheduler, 3, 3, 3)
    scheduler.pressure = 1
    late = Sequence(4, [0])
    assert scheduler.submit(late)
    assert list(scheduler.admit()) == [] and list(scheduler.evict()) == []
    scheduler.pressure = 2
    assert list(scheduler.evict()) == [three] and list(scheduler.evict()) == [], "one, and then a while to see"
    for _ in range(200):
        work = scheduler.next_work()
        assert work is not None
        scheduler.came_round(work)
        for row in work.rows:
            if row.num_logits:
                scheduler.token_drawn({1: one, 2: two}[row.sequence], 0)
        list(scheduler.evict())
    assert scheduler.num_running == 1, "the last one always goes on"
    assert not scheduler.submit(Sequence(5, [0])) and "short of memory" in scheduler.why_refused
    assert scheduler.submit(Sequence(6, [0], resumed=True)), "it was promised an answer"
    scheduler.pressure = 0
    assert [sequence.id for sequence in scheduler.admit()] == [2, 3, 6, 4], "whoever ran before is first"


def test_the_only_request_there_is_ends_where_memory_stays_critically_short() -> None:
    scheduler = scheduler_of(1)
    (one,) = admitted(scheduler, 3)
    scheduler.pressure = 2
    assert [scheduler.lone_at_critical(n / 10) for n in range(30)] == [None] * 30, "one reading may be a moment's"
    assert scheduler.lone_at_critical(3.0) is one
    scheduler.pressure = 1
    assert scheduler.lone_at_critical(9.0) is None
    assert scheduler.submit(Sequence(2, [0]))
    scheduler.pressure = 2
    assert [n for n in range(10, 60) if scheduler.lone_at_critical(float(n))] == [25, 41, 57], "who waits holds nothing"


def test_a_parked_request_that_runs_alone_gives_way_at_critical() -> None:
    scheduler = scheduler_of(1)
    (one,) = admitted(scheduler, 3)
    one.parked = True
    scheduler.pressure = 2
    assert list(scheduler.evict()) == [one] and scheduler.num_running == 0 and scheduler.num_parked == 1
    scheduler.unpark(one)
    assert list(scheduler.admit()) == [one] and list(scheduler.evict()) == [], "one that is read goes on"


def test_at_critical_prompts_that_are_computed_give_way_one_after_the_other() -> None:
    scheduler = scheduler_of(1, prefill_chunk=4)
    _, two, three = admitted(scheduler, 99, 99, 99)
    scheduler.pressure = 2
    evicted = list(scheduler.evict())
    for _ in range(4):
        work = scheduler.next_work()
        assert work is not None and work.is_prefill
        scheduler.came_round(work)
        evicted += scheduler.evict()
    assert evicted == [three, two], "no token is drawn meanwhile"


def test_a_new_request_ends_at_the_first_report_of_critical_memory() -> None:
    scheduler = scheduler_of(1)
    scheduler.pressure = 2  # the last report, of an hour ago
    new = [Sequence(number, [0] * 3) for number in (1, 2)]
    resumed = Sequence(3, [0] * 3, resumed=True)
    assert all(map(scheduler.submit, [*new, resumed]))
    assert list(scheduler.admit()) == [resumed, *new], "nobody knows yet"
    scheduler.pressure = 2
    assert scheduler.take_untried() == new and scheduler.take_untried() == []
    late = Sequence(4, [0])
    assert not scheduler.submit(late) and "short of memory" in scheduler.why_refused
    scheduler.pressure = 0
    assert scheduler.submit(late) and scheduler.take_untried() == []


def test_a_request_that_begins_at_critical_after_all_others_ended_is_tried_first() -> None:
    scheduler = scheduler_of(1, max_running=1)
    (one,) = admitted(scheduler, 3)
    assert scheduler.take_untried() == []
    late = Sequence(9, [0] * 3)
    assert scheduler.submit(late)
    scheduler.pressure = 2
    assert scheduler.take_untried() == [] and scheduler.remove(one.id)
    assert list(scheduler.admit()) == [late] and scheduler.take_untried() == [late]


def test_of_equal_age_the_lowest_priority_is_evicted() -> None:
    scheduler = scheduler_of(1, max_tokens=10)
    for number, priority in ((1, 0), (2, -1), (3, 0)):
        scheduler.submit(Sequence(number, [0] * 3, priority=priority))
    running = {sequence.id: sequence for sequence in scheduler.admit()}
    for _ in range(2):
        scheduler.token_drawn(running[1], 0)
    assert [sequence.id for sequence in scheduler.evict()] == [2]


def flex_of(number: int, size: int = 2) -> Sequence:
    return Sequence(number, list(range(size)), "batch", FLEX_PRIORITY)


def test_flex_requests_fill_a_ring_that_nobody_else_uses_and_give_way() -> None:
    scheduler = scheduler_of(2, max_running=3)
    flexes = [flex_of(number) for number in (1, 2, 3, 4)]
    assert all(map(scheduler.submit, flexes))
    assert list(scheduler.evict()) == [] and list(scheduler.admit()) == flexes[:3]
    normal = Sequence(9, [1, 2])
    assert scheduler.submit(normal)
    assert list(scheduler.evict()) == [flexes[2]], "the youngest, and no more than necessary"
    assert list(scheduler.admit()) == [normal]
    assert [one.id for _, one in scheduler.places()] == [3, 4]
    assert scheduler.remove(9) and list(scheduler.evict()) == []
    assert list(scheduler.admit()) == [flexes[2]], "it goes on before the others"


def test_flex_requests_stay_where_leaving_would_help_nobody() -> None:
    scheduler = scheduler_of(1, max_running=2, max_tokens=20)
    normal, flex, large = Sequence(1, [0] * 15), flex_of(2), Sequence(3, [0] * 10)
    assert scheduler.submit(normal) and scheduler.submit(flex)
    assert list(scheduler.admit()) == [normal, flex]
    assert scheduler.submit(large)
    assert list(scheduler.evict()) == [], "large would not fit beside normal either"


def test_a_flex_request_ends_under_a_load_that_never_does() -> None:
    scheduler = scheduler_of(1, max_running=1)
    flex = flex_of(1)
    assert scheduler.submit(flex)
    list(scheduler.admit())
    ended: list[int] = []
    for number in range(10, 10 + FLEX_TURNS + 2):
        assert scheduler.submit(Sequence(number, [0]))
        list(scheduler.evict())
        (begun,) = scheduler.admit()
        ended.append(begun.id)
        scheduler.remove(begun.id)
    assert 1 in ended and ended.index(1) == FLEX_TURNS
