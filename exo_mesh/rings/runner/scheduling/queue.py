"""The queue of requests that wait for the ring, fair between clients, and how long they wait in it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from exo_mesh.domain.request import FLEX_PRIORITY

MAX_CLIENTS = 1024
"""Clients without requests whose use of the ring is remembered."""

KEPT_TURNS = 32
"""Intervals between turns that count: about the last 30 s of a busy ring."""

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Cost of a prompt token and of an output token; prefill computes many tokens at once, decoding one a lap. As in Sheng
et al., Fairness in Serving Large Language Models (OSDI 2024), whose virtual token counter this is."""


FLEX_TURNS = 32
"""After this many other requests have had their turn while flex requests waited, one flex request has its turn, and is
then no longer interrupted: so even under constant load a flex request is done after a bounded number of others."""


class Waiting(Protocol):
    """The fields of a sequence that the queue needs. resumed: it was running already, here or on an earlier ring."""

    id: int
    client: str
    priority: int
    resumed: bool


T = TypeVar("T", bound=Waiting)


def is_flex(item: Waiting) -> bool:
    """Whether a request runs only while no other request wants its place."""
    return item.priority <= FLEX_PRIORITY


class FairQueue(Generic[T]):
    """Orders waiting requests: first requests that resume after an interruption, oldest first; then the highest
    priority; among equals the client that has used the ring least; and of one client the oldest request.

    Flex requests (FLEX_PRIORITY) come last, but one has its turn after FLEX_TURNS others. They have max_waiting places
    of their own, so that a flood of them keeps nobody out of the queue.

    A client that comes back after a pause starts level with the least served of the active clients: idle time earns
    nothing.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._resumed: deque[T] = deque()
        self._fresh: dict[tuple[int, str], deque[T]] = {}
        self._used: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._passed = 0
        """Requests that had their turn while flex requests waited."""

    def __bool__(self) -> bool:
        """Whether some request waits. Each lap asks, so this is faster than the number of them."""
        return bool(self._resumed or self._fresh)

    def __len__(self) -> int:
        return len(self._resumed) + sum(map(len, self._fresh.values()))

    def __iter__(self) -> Iterator[T]:
        """All items; the resumed ones first, otherwise in no particular order. From any thread: each line is copied
        before its items are given, without a chance for another thread in between."""
        for line in (self._resumed, *self._fresh.values()):
            yield from tuple(line)

    def push(self, item: T) -> bool:
        """Add an item at its place; False, with nothing changed, if the queue is full. A resumed item is always
        taken."""
        if item.resumed and not is_flex(item):
            self._resumed.append(item)
        elif not item.resumed and self._num_waiting(is_flex(item)) >= self._max_waiting:
            return False
        else:
            self._fresh.setdefault((item.priority, item.client), deque()).append(item)
        self._enter(item.client)
        return True

    def push_back(self, item: T) -> None:
        """Put back an item that ran until now, before all others, or before all other flex requests of its client; the
        client never ceased to be active."""
        if is_flex(item):
            self._fresh.setdefault((item.priority, item.client), deque()).appendleft(item)
            return
        item.resumed = True
        self._resumed.appendleft(item)

    def first(self) -> T | None:
        """The next item, which stays in the queue."""
        if self._resumed:
            return self._resumed[0]
        line = self._best_line()
        return self._fresh[line][0] if line is not None else None

    def pop(self) -> T:
        """Take the next item. Its client counts as active until `left`. Raises IndexError if there is none.

        A flex request whose turn it is gets priority 0: from now on it is like any other."""
        if self._resumed:
            return self._resumed.popleft()
        line = self._best_line()
        if line is None:
            raise IndexError("the queue is empty")
        item = self._fresh[line].popleft()
        if not self._fresh[line]:
            del self._fresh[line]
        self._count_turn(item)
        return item

    def _count_turn(self, item: T) -> None:
        if not is_flex(item):
            self._passed = self._passed + 1 if self._num_waiting(True) else 0
        elif self._owes_flex:
            item.priority, self._passed = 0, 0

    @property
    def _owes_flex(self) -> bool:
        return self._passed >= FLEX_TURNS

    def _num_waiting(self, flex: bool) -> int:
        return sum(len(line) for (priority, _), line in self._fresh.items() if (priority <= FLEX_PRIORITY) == flex)

    def remove(self, item_id: int) -> T | None:
        """Take out an item that no longer waits."""
        for item in self:
            if item.id == item_id:
                if item.resumed and not is_flex(item):
                    self._resumed.remove(item)
                else:
                    line = item.priority, item.client
                    self._fresh[line].remove(item)
                    if not self._fresh[line]:
                        del self._fresh[line]
                self.left(item.client)
                return item
        return None

    def charge(self, client: str, tokens: float) -> None:
        """Add (weighted) tokens to what a client has used of the ring."""
        self._used[client] = self._used.get(client, 0.0) + tokens

    def left(self, client: str) -> None:
        """Note that one sequence of a client neither waits nor runs any longer."""
        self._active[client] = self._active.get(client, 0) - 1
        if self._active[client] <= 0:
            del self._active[client]
            if len(self._used) > MAX_CLIENTS:
                self._used = {name: used for name, used in self._used.items() if name in self._active}

    def _enter(self, client: str) -> None:
        if client not in self._active:
            least = min((self._used.get(name, 0.0) for name in self._active), default=0.0)
            self._used[client] = max(self._used.get(client, 0.0), least)
        self._active[client] = self._active.get(client, 0) + 1

    def _best_line(self) -> tuple[int, str] | None:
        if not self._fresh:  # this runs with every lap
            return None
        if self._owes_flex:
            flex = [line for line in self._fresh if line[0] <= FLEX_PRIORITY]
            return min(flex or self._fresh, key=lambda line: (-line[0], self._used.get(line[1], 0.0)))
        return min(self._fresh, key=lambda line: (-line[0], self._used.get(line[1], 0.0)), default=None)


class TurnClock:
    """Measures the seconds between two turns while requests wait. Times are seconds of any one clock.

    Time in which no request waits does not count: an unused turn does not show how fast the ring is.
    """

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=KEPT_TURNS)
        self._since: float | None = None

    @property
    def is_counting(self) -> bool:
        """Whether some request waited at the last `note`."""
        return self._since is not None

    def note(self, num_waiting: int, num_turns: int, now: float) -> None:
        """Note that `num_turns` waiting requests got their turns now, and that `num_waiting` still wait."""
        if self._since is not None and num_turns:
            self._intervals += [(now - self._since) / num_turns] * num_turns
            self._since = now
        if not num_waiting:
            self._since = None
        elif self._since is None:
            self._since = now

    def wait_s(self, place: int, now: float) -> float | None:
        """Seconds until the request at this place (1 is next) has its turn; None before the first turn."""
        if not self._intervals:
            return None
        interval_s = sum(self._intervals) / len(self._intervals)
        passed_s = 0.0 if self._since is None else now - self._since
        return (place - 1) * interval_s + max(0.0, interval_s - passed_s)
