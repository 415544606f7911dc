"""Background work: an owner of tasks, a limit on calls, a signal for waiters, and one timer for many waits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, Generic, TypeVar

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import reason_of
from exo_mesh.base.telemetry.logs import current_request, current_trace
from exo_mesh.errors import MeshError, OverloadError

LEAST_PAUSE_S = 0.05
"""Shortest pause between two rounds of a watchdog."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""Pause of a long-lived task after a failure; it doubles with each consecutive failure up to the maximum."""

SETTLED_S = 60.0
"""A long-lived task that ran this long counts as recovered: its next failure starts a new series."""

_log = logging.getLogger(__name__)

MOST_WOKEN_A_ROUND = 4
"""Callers of a shared call that go on in one round of the event loop: a request takes up to half a millisecond until it
waits again, and a thousand may have waited for the same model."""

T = TypeVar("T")


def was_cancelled() -> bool:
    """Whether this task was cancelled, for a handler of CancelledError. If not, the exception is grpc's: a call was
    cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Bound:
    """Limits how many calls of a kind run at once, and refuses further ones. what: the end of the refusal's
    sentence."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._num_taken = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Counts one call while it runs. Raises OverloadError if `most` calls run already."""
        if self._num_taken >= self._most:
            raise OverloadError(f"{self._num_taken} {self._what} already; try again later")
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1


class TaskOwner:
    """Starts tasks and awaits every one of them in `close`. A failed task is logged at once, with its name."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.ended: dict[str, str] = {}
        """The long-lived tasks that a bug has ended, with the type of the exception; /health shows them."""

    def start(self, work: Coroutine[Any, Any, Any], name: str, *, for_request: bool = False) -> asyncio.Task[Any]:
        """Runs `work` until it ends or the owner closes. After close nothing starts any more.

        Its log lines carry the id of the request that started it only if `for_request` is set: most tasks outlive that
        request.
        """
        context = contextvars.copy_context()
        if not for_request:
            context.run(current_request.set, "")
            context.run(current_trace.set, "")
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[Any]:
        """Runs long-lived work until it returns or the owner closes.

        After an OSError (too many open files, a network that is gone) or a MeshError, `work` is called again after a
        pause. Any other exception is a bug: it ends the task, and `ended` names it.
        """
        return self.start(self._keep(work, name), name)

    async def _keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        pause_s, logged = FIRST_RETRY_S, set[tuple[type, int | None]]()
        while True:
            began = monotonic()
            try:
                return await work()
            except (OSError, MeshError) as exc:
                if monotonic() - began > SETTLED_S:
                    pause_s = FIRST_RETRY_S
                    logged.clear()
                kind = type(exc), getattr(exc, "errno", None)
                if kind not in logged:
                    logged.add(kind)
                    _log.warning("%s failed and will be retried: %s", name, reason_of(exc))
            except Exception as exc:
                self.ended[name] = type(exc).__name__
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancels all tasks and waits for each to end."""
        self._closed = True
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (exc := task.exception()) is None:
            return
        if isinstance(exc, MeshError):
            _log.info("task %s ended: %s", task.get_name(), exc)
        else:
            _log.error("task %s failed: %s", task.get_name(), exc, exc_info=exc)


class Turns:
    """Lets `most` callers go on in each round of the event loop, in the order in which they came.

    Without it, a thousand tasks that become ready together all run in one round, and everybody else waits for the end
    of that round.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_taken = 0
        self._waiting: deque[Callable[[], bool]] = deque()
        self._is_scheduled = False

    async def take(self) -> None:
        """Returns at once, or in a later round if enough callers went on in this one."""
        if not self._is_free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(lambda: _complete(turn))
            await turn
            return
        self._count()

    def call(self, work: Callable[[], bool]) -> None:
        """Calls `work` at once, or in a later round. It returns whether it had anything to do; otherwise the next
        caller goes on in its place."""
        if not self._is_free:
            self._waiting.append(work)
        elif work():
            self._count()

    @property
    def _is_free(self) -> bool:
        return self._num_taken < self._most and not self._waiting

    def _count(self) -> None:
        self._num_taken += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_scheduled = False
        self._num_taken = 0
        try:
            while self._waiting and self._num_taken < self._most:
                if self._waiting.popleft()():
                    self._count()
        finally:
            if self._waiting:  # also after an error of the work, which the loop reports
                self._schedule()


def _complete(turn: asyncio.Future[None]) -> bool:
    """Wakes the task that waits for a turn; False if it was cancelled."""
    if turn.done():
        return False
    turn.set_result(None)
    return True


class SharedCalls(Generic[T]):
    """Runs one call for all who ask for the same thing while it runs, such as a thousand requests for one model. The
    call goes on if some of them are cancelled. They go on in turns when it has ended or failed."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[T]] = {}
        self._turns = Turns(MOST_WOKEN_A_ROUND)

    async def get(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the call that runs for this key, or else of a new one. Raises what the call raises."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(call())
            running.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.shield(running)
        finally:
            if not was_cancelled():
                await self._turns.take()

    def _ended(self, key: Hashable, done: asyncio.Future[T]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # marks an error as seen, in case all callers were cancelled


class ChangeSignal:
    """Wakes all waiters each time something changed. It keeps no state, so check the condition before waiting."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] = {}  # ordered, so that a simulation is repeatable

    def beat(self) -> None:
        """Wakes all current waiters."""
        for waiter in self._waiters:
            _resolve(waiter, True)

    async def wait(self, timeout_s: float) -> bool:
        """Waits for the next beat. Returns False after timeout_s without one."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(max(0.0, timeout_s), _resolve, waiter, False)  # half the work of asyncio.wait
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)
            waiter.cancel()


def _resolve(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)


Check = Callable[[float], float]
"""A check of a watchdog. It is called with the watchdog's time, and returns when it next has something to do, math.inf
if never."""


class Watchdog:
    """Watches many waits with one timer; a timer per wait would cost more than the wait while tokens stream.

    Each check is called once a period, or sooner if it asks for that; there is no timer while nothing is watched. A
    check must be short, must not block or raise, and may remove itself and others.
    """

    def __init__(self, period_s: float = 1.0, clock: Clock = monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._checks: set[Check] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, check: Check) -> None:
        """Calls the check within a period, and then until `forget`. Needs a running event loop."""
        self._checks.add(check)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._round)

    def forget(self, check: Check) -> None:
        """Stops calling the check; nothing happens if it is not watched."""
        self._checks.discard(check)
        if not self._checks and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _round(self) -> None:
        now = self._clock()
        next_at = min([check(now) for check in list(self._checks)], default=math.inf)
        pause_s = min(self._period_s, max(next_at - now, LEAST_PAUSE_S))
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._round) if self._checks else None
