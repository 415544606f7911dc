"""An owner for background tasks: keeps them, logs what they die of, and ends them all."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from exo_mesh.errors import MeshError
from exo_mesh.telemetry.logs import current_request

_log = logging.getLogger(__name__)


def was_cancelled() -> bool:
    """In a handler of CancelledError: was this task cancelled? If not, it is grpc's way to say that a call was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class TaskOwner:
    """Starts tasks and awaits every one of them in `close`. A failed task is logged at once, with its name."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Any], name: str, *, for_request: bool = False) -> asyncio.Task[Any]:
        """Run `work` until it ends or the owner closes. After close nothing starts any more.

        Its log lines carry the id of the request that started it only if it is `for_request`: most outlive that.
        """
        context = contextvars.copy_context()
        if not for_request:
            context.run(current_request.set, "")
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks and wait for each to end."""
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


class Pulse:
    """Wakes everybody who waits, each time something changed; keeps no state, so look before waiting."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order, so that a simulation repeats

    def beat(self) -> None:
        """Wake all who wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """True at the next beat, False after timeout_s without one."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            done, _ = await asyncio.wait((waiter,), timeout=timeout_s)
            return bool(done)
        finally:
            self._waiters.pop(waiter, None)
            waiter.cancel()
