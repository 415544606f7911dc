"""Addresses that the operator gave (`--bootstrap-peers`), suggested again and again with back-off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from exo_mesh.discovery.port import Announcement, Suggest

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 5.0
"""A bootstrap peer that starts later, or comes back, is found within this."""


class StaticDiscovery:
    """Suggests the given "host:port" addresses for as long as it runs: one may come up much later than we do."""

    name = "static"

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._task: asyncio.Task[None] | None = None

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        self._task = asyncio.create_task(self._keep_suggesting(suggest), name="static discovery")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep_suggesting(self, suggest: Suggest) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            for address in self._addresses:
                suggest(address)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
