"""By which address each stage here reaches the next one: that of the best way there is, also long after placement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from exo_mesh.errors import MeshError
from exo_mesh.node.supervisor import Runner

LOOK_EVERY_S = 0.5
"""A hop may be down for 5 s before its stage is lost; the membership needs about two to find another address."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hop:
    runner: Runner
    next_peer: str
    endpoint: str


class Hops:
    """The hops of the runners here. host_of: where this node reaches a peer now, None if it does not know."""

    def __init__(self, host_of: Callable[[str], str | None]) -> None:
        self._host_of = host_of
        self._hops: dict[str, _Hop] = {}

    async def link(self, instance_id: str, runner: Runner, endpoint: str, next_peer: str) -> None:
        """Tell a stage where the next one listens, now and whenever the way to it changes. Raises StageLostError."""
        self._hops[instance_id] = _Hop(runner, next_peer, endpoint)
        await runner.link(endpoint)

    def forget(self, instance_id: str, runner: Runner) -> None:
        """The runner is gone."""
        hop = self._hops.get(instance_id)
        if hop is not None and hop.runner is runner:
            del self._hops[instance_id]

    async def keep(self) -> None:
        """Until cancelled, look whether peers are reached by another address now."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.tell()

    async def tell(self) -> None:
        """Tell the stages whose next peer is reached by another address now. A stream that works stays as it is: only
        the next dial goes there."""
        for instance_id, hop in list(self._hops.items()):
            host = self._host_of(hop.next_peer)
            endpoint = f"{host}:{hop.endpoint.rpartition(':')[2]}"
            if host is None or endpoint == hop.endpoint:
                continue
            try:
                await hop.runner.link(endpoint, keep_stream=True)
            except MeshError as exc:  # it ends just now
                _log.debug("%s: %s", instance_id, exc)
                continue
            _log.info("the next dial from a stage of %s goes to %s instead of %s", instance_id, endpoint, hop.endpoint)
            hop.endpoint = endpoint
