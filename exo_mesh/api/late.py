"""Late references: names of classes whose modules are imported only when they are needed.

A late reference is "module:name"; a module that begins with a dot is below `exo_mesh.api`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.api.context import ApiContext

_ONE_AT_A_TIME = threading.Lock()
"""Two threads that import modules which import each other's could get them half done."""


def resolved(reference: str) -> Any:
    """The object that a late reference names. Imports its module, which may take a while: call it in a thread."""
    module, _, name = reference.partition(":")
    with _ONE_AT_A_TIME:
        return getattr(importlib.import_module(module, "exo_mesh.api"), name)


class LateHandlers:
    """The handlers of one group of routes: an object that is built at the first call of one of them."""

    def __init__(self, reference: str, context: ApiContext) -> None:
        self._reference = reference
        self._context = context
        self._handlers: Any = None

    def method(self, name: str, called: asyncio.Event | None = None) -> Handler:
        """A handler that calls this method. called: is set by each call."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if called is not None:
                called.set()
            handlers = self._handlers or await self.built()
            reply: web.StreamResponse = await getattr(handlers, name)(request)
            return reply

        return handle

    async def built_soon(self, called: asyncio.Event, most_s: float) -> None:
        """Build the object once `called` is set, at latest after `most_s`, so that the first call of one of its
        methods need not wait for the import. Errors are left to that call."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await called.wait()
        with contextlib.suppress(Exception):
            await self.built()

    async def built(self) -> Any:
        """The object. The event loop goes on while a thread imports its module."""
        return self._build(await asyncio.to_thread(resolved, self._reference))

    def built_now(self) -> Any:
        """The same, for a module so small that its import may block."""
        return self._build(resolved(self._reference))

    def _build(self, kind: Callable[[ApiContext], Any]) -> Any:
        if self._handlers is None:
            self._handlers = kind(self._context)
        return self._handlers
