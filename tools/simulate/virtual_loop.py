"""An event loop whose time advances only when all tasks wait, so that an hour of a mesh takes seconds.

Every simulated process runs in its own context. A process can be stopped as by SIGSTOP: none of its callbacks runs
until it is woken, while the clock goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("PROCESS", default="")

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _Selector(selectors.DefaultSelector):
    """Advances the time instead of waiting."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation is stuck: nothing is ready, and no task waits for a time")
        self.passed_s += max(0.0, timeout)
        return []


class _Callback(asyncio.Handle):
    """A callback that waits while its process is stopped. A callback that is cancelled meanwhile does not run later."""

    __slots__ = ("process",)
    process: str

    def _run(self) -> None:
        if not self._loop.is_held_back(self):  # type: ignore[attr-defined]
            super()._run()


class _Timer(asyncio.TimerHandle):
    """The same, at a time."""

    __slots__ = ("process",)
    process: str
    _when: float

    def __lt__(self, other: Any) -> bool:
        return bool(self._when < other._when)

    def _run(self) -> None:
        if not self._loop.is_held_back(self):  # type: ignore[attr-defined]
            super()._run()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. It starts no threads: work for a thread runs at once."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._stopped: dict[str, list[_Callback | _Timer]] = {}
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual.passed_s

    def stop_process(self, process: str) -> None:
        """Runs no callback of this process until `wake_process`."""
        self._stopped.setdefault(process, [])

    def wake_process(self, process: str) -> None:
        self._ready.extend(self._stopped.pop(process, []))

    def wake_all(self) -> None:
        for process in list(self._stopped):
            self.wake_process(process)

    def is_stopped(self, process: str) -> bool:
        return process in self._stopped

    def is_held_back(self, callback: _Callback | _Timer) -> bool:
        """Holds a due callback until its process is woken, if the process is stopped."""
        held = self._stopped.get(callback.process)
        if held is None:
            return False
        held.append(callback)
        return True

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        handle = _Callback(callback, args, self, context)
        handle.process = context.get(PROCESS, "")
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        timer = _Timer(when, callback, args, self, context)
        timer.process = context.get(PROCESS, "")
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - like the executor
            future.set_exception(exc)
        return future


def run(work: Callable[[VirtualLoop], Any]) -> Any:
    """Runs a coroutine function in a new world, and ends every task of it."""
    loop = VirtualLoop()
    asyncio.set_event_loop(None)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_to_the_end(loop, work))
    finally:
        loop.close()


async def _to_the_end(loop: VirtualLoop, work: Callable[[VirtualLoop], Any]) -> Any:
    try:
        return await work(loop)
    finally:
        loop.wake_all()  # so that its tasks can be cancelled
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # messages in transit still start new tasks
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
