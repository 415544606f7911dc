"""Handles requests to stop or restart a node, from its peers and from API clients."""

from __future__ import annotations

import asyncio

from exo_mesh.domain.peer_names import peer_named
from exo_mesh.errors import StopPendingError
from exo_mesh.mesh.membership.calls import stop_node
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.mesh.membership.roster import Roster


class StopDesk:
    """Stop requests. `asked` is set when this node has to stop; `wants_restart` says whether it restarts."""

    def __init__(self, roster: Roster, calls: Calls) -> None:
        self._roster = roster
        self._calls = calls
        self.asked = asyncio.Event()
        self.wants_restart = False

    def ask(self, restart: bool) -> None:
        """Start stopping this node; its streams may finish first. A stop wins over a restart. Raises StopPendingError
        for a restart of a node that stops or restarts already."""
        if restart and self.asked.is_set():
            again = (
                "restarting already; wait until it is back"
                if self.wants_restart
                else "stopping already; start it again"
            )
            raise StopPendingError(f"node {self._roster.own.name} is {again}")
        self.wants_restart = restart
        self.asked.set()

    async def tell(self, peer: str, *, restart: bool) -> str:
        """Stop or restart a node; "" means this node. Returns its id at once. Raises as ask and peer_named."""
        found = peer_named(peer, self._roster.everybody()) if peer else self._roster.own
        await stop_node(self._calls, found.id, restart=restart)
        return found.id
