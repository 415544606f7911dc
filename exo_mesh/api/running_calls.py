"""Ends the calls that run with a key or session when that is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from exo_mesh.api.access import CALLER, AccessPolicy
from exo_mesh.api.context import REQUEST_ID
from exo_mesh.base.tasks import TaskOwner, Watchdog

LOOK_EVERY_S = 1.0
"""How often the keys of running calls are checked. A call first has its requests cancelled, so that a stream ends with
an event that says so; if it still runs at the next check, its connection is closed."""


class _RunningCall(msgspec.Struct):
    key_id: str
    request_id: str
    is_ending: bool = False


class RunningCalls:
    """The running calls of all keys and sessions. cancel(request_id, key_id): cancels the requests of a call at any
    peer."""

    def __init__(self, policy: AccessPolicy, cancel: Callable[[str, str], Awaitable[object]]) -> None:
        self._policy = policy
        self._cancel = cancel
        self._calls: dict[asyncio.Task[object], _RunningCall] = {}
        self._watchdog = Watchdog(LOOK_EVERY_S)
        self._tasks = TaskOwner()

    def middleware(self) -> Middleware:
        """Notes each call with a key or session while it runs. It belongs behind the check of access."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            key_id, task = request[CALLER].key_id, asyncio.current_task()
            if task is None or not self._policy.can_end(key_id):
                return await handler(request)
            self._calls[task] = _RunningCall(key_id, request[REQUEST_ID])
            self._watchdog.watch(self._look)
            try:
                return await handler(request)
            finally:
                del self._calls[task]
                if not self._calls:
                    self._watchdog.forget(self._look)

        return note

    async def close(self) -> None:
        """Stop checking."""
        self._watchdog.forget(self._look)
        await self._tasks.close()

    def _look(self, now: float) -> float:
        """End the calls whose key was revoked. Returns when to look again."""
        ended = {key_id for key_id in {one.key_id for one in self._calls.values()} if self._policy.has_ended(key_id)}
        for task, call in list(self._calls.items()) if ended else ():
            if call.key_id not in ended:
                continue
            if call.is_ending:
                task.cancel()
            else:
                call.is_ending = True
                self._tasks.start(self._end(call), f"end {call.request_id}, whose key was revoked")
        return now + LOOK_EVERY_S

    async def _end(self, call: _RunningCall) -> None:
        await self._cancel(call.request_id, call.key_id)
