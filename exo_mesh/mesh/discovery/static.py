"""Suggests the addresses that the operator gave (`--bootstrap-peers`) repeatedly, with back-off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.mesh.discovery.port import Announcement, Suggest

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 5.0
"""Longest pause between two suggestions: a bootstrap peer that starts later or returns is found within this time."""


class StaticDiscovery:
    """Suggests the given "host:port" addresses as long as it runs, because a peer may start much later than this
    node."""

    name = "static"

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._tasks = TaskOwner()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        self._tasks.keep(lambda: self._keep_suggesting(suggest), "static discovery")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()

    async def _keep_suggesting(self, suggest: Suggest) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            for address in self._addresses:
                suggest(address)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
