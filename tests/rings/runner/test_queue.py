"""Whose turn it is."""

from __future__ import annotations

from collections import Counter

from exo_mesh.domain.request import FLEX_PRIORITY
from exo_mesh.rings.runner.scheduling.queue import FLEX_TURNS, MAX_CLIENTS, FairQueue
from exo_mesh.rings.runner.scheduling.sequence import Sequence


def one(number: int, client: str = "", priority: int = 0, resumed: bool = False) -> Sequence:
    return Sequence(number, [0], client, priority, resumed)


def drained(queue: FairQueue[Sequence]) -> list[int]:
    return [queue.pop().id for _ in range(len(queue))]


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    queue: FairQueue[Sequence] = FairQueue(8)
    for number in (3, 1, 2):
        assert queue.push(one(number))
    assert drained(queue) == [3, 1, 2]


def test_who_asks_a_lot_does_not_keep_others_out() -> None:
    queue: FairQueue[Sequence] = FairQueue(100)
    for number in range(20):
        queue.push(one(number, "greedy"))
    queue.push(one(100, "modest"))
    queue.push(one(101, "modest"))
    served = []
    for _ in range(6):
        sequence = queue.pop()
        queue.charge(sequence.client, 10)
        served.append(sequence.client)
    assert Counter(served) == {"greedy": 4, "modest": 2}
    assert served.index("modest") < 2


def test_a_pause_earns_no_claim() -> None:
    """Without that, a client that comes back could have the ring for itself until it has caught up."""
    queue: FairQueue[Sequence] = FairQueue(100)
    queue.push(one(0, "early"))
    queue.pop()
    queue.left("early")
    for number in range(1, 40):
        queue.push(one(number, "busy"))
    for _ in range(20):
        queue.charge(queue.pop().client, 10)
    for number in range(50, 60):
        queue.push(one(number, "early"))
    served = []
    for _ in range(10):
        sequence = queue.pop()
        queue.charge(sequence.client, 10)
        served.append(sequence.client)
    assert Counter(served) == {"busy": 5, "early": 5}


def test_a_higher_priority_and_whoever_was_interrupted_go_first() -> None:
    queue: FairQueue[Sequence] = FairQueue(8)
    for sequence in (one(1), one(2, priority=5), one(3, priority=-5), one(4, resumed=True), one(5, resumed=True)):
        queue.push(sequence)
    evicted = one(6)
    queue.push_back(evicted)
    assert drained(queue) == [6, 4, 5, 2, 1, 3]


def test_the_bound_is_for_new_ones_only() -> None:
    queue: FairQueue[Sequence] = FairQueue(2)
    assert queue.push(one(1)) and queue.push(one(2))
    assert not queue.push(one(3))
    assert queue.push(one(4, resumed=True))
    assert queue.remove(1) is not None and queue.remove(1) is None
    assert queue.push(one(3))
    assert drained(queue) == [4, 2, 3]


def test_clients_that_left_are_forgotten_in_the_end() -> None:
    queue: FairQueue[Sequence] = FairQueue(8)
    for number in range(3 * MAX_CLIENTS):
        queue.push(one(number, f"c{number}"))
        queue.pop()
        queue.charge(f"c{number}", 5)
        queue.left(f"c{number}")
    assert len(queue._used) <= MAX_CLIENTS + 1


def flex(number: int, client: str = "batch", resumed: bool = False) -> Sequence:
    return one(number, client, FLEX_PRIORITY, resumed)


def test_flex_requests_come_last_whoever_sends_them() -> None:
    queue: FairQueue[Sequence] = FairQueue(8)
    for sequence in (flex(1), flex(2, resumed=True), one(3, priority=-10), one(4)):
        assert queue.push(sequence)
    assert drained(queue) == [4, 3, 1, 2]


def test_a_flood_of_flex_requests_keeps_nobody_out_of_the_queue() -> None:
    queue: FairQueue[Sequence] = FairQueue(4)
    assert [queue.push(flex(number)) for number in range(6)] == [True] * 4 + [False] * 2
    assert [queue.push(one(number)) for number in range(10, 16)] == [True] * 4 + [False] * 2
    assert len(queue) == 8


def test_a_flex_request_that_was_interrupted_goes_before_those_of_its_client_only() -> None:
    queue: FairQueue[Sequence] = FairQueue(8)
    for sequence in (flex(1), one(2)):
        queue.push(sequence)
    queue.push_back(flex(3))
    assert queue.remove(3) is not None
    queue.push_back(flex(3))
    assert drained(queue) == [2, 3, 1]


def test_a_flex_request_has_its_turn_after_a_bounded_number_of_others() -> None:
    """Under a load that never ends; from then on it is like any other, so nothing interrupts it again."""
    queue: FairQueue[Sequence] = FairQueue(8)
    first, second = flex(1), flex(2)
    assert queue.push(first) and queue.push(second)
    turns: list[int] = []
    for number in range(100, 100 + 3 * FLEX_TURNS):
        assert queue.push(one(number))
        turns.append(queue.pop().id)
    assert turns.index(1) == FLEX_TURNS and turns.index(2) == 2 * FLEX_TURNS + 1
    assert first.priority == second.priority == 0


def test_the_queue_may_change_while_its_items_are_given() -> None:
    """The heartbeat lists them from another thread."""
    queue: FairQueue[Sequence] = FairQueue(8)
    for number, client in ((1, "a"), (2, "a"), (3, "b")):
        queue.push(one(number, client))
    given = iter(queue)
    seen = [next(given).id]
    queue.push(one(4, "c"))
    queue.remove(1)
    queue.remove(3)
    assert seen + [item.id for item in given] == [1, 2], "a line that comes later is not among them"
