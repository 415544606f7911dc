"""Handles requests to stop or restart a node, from its peers and from API clients."""

from __future__ import annotations

import asyncio

from exo_mesh.membership.roster import Roster


class StopDesk:
    """Stop requests. `asked` is set when this node has to stop; `wants_restart` says whether it restarts."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.asked = asyncio.Event()
        self.wants_restart = False

    def ask(self, *, restart: bool) -> None:
        """Start stopping this node; its streams may finish first."""
        self.wants_restart = restart
        self.asked.set()

    async def tell(self, peer: str, *, restart: bool) -> str:
        """Stop or restart a node, given by name or id; "" means this node. Returns its id at once, or "" if there is
        none."""
        own = self._roster.own
        if peer in ("", own.id, own.name):
            self.ask(restart=restart)
            return own.id
        found = next((one for one in self._roster.peers.values() if peer in (one.id, one.info.name)), None)
        if found is None:
            return ""
        await found.client.stop_node(found.id, restart=restart)
        return found.id
