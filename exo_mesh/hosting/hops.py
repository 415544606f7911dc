"""By which address each stage here reaches the next one: that of the best way there is, also long after placement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exo_mesh.errors import MeshError
from exo_mesh.hosting.supervisor import Runner

LOOK_EVERY_S = 0.5
"""A hop may be down for 5 s before its stage is lost; the membership needs about two to find another address."""

DOWN_LOOKS = 4
"""A hop that has been down at so many looks is dialled at the next address of its peer: a firewall may block the data
port at the best one. A healthy dial takes 20 ms, with TLS on a slow board half a second."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hop:
    runner: Runner
    next_peer: str
    endpoint: str
    down: int = 0
    """Looks in a row at which the stream was not up."""
    tried: int = 0
    """Addresses tried since it was up last."""


class Hops:
    """The hops of the runners here. hosts_of: where this node may reach a peer, best first; empty if unknown."""

    def __init__(self, hosts_of: Callable[[str], Sequence[str]]) -> None:
        self._hosts_of = hosts_of
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
        """Tell the stages whose next peer is reached by another address now, or not by the one that they dial. A stream
        that works stays as it is: only the next dial goes there."""
        for instance_id, hop in list(self._hops.items()):
            hosts = self._hosts_of(hop.next_peer)
            if not hosts:
                continue
            endpoint = f"{hosts[_way(hop) % len(hosts)]}:{hop.endpoint.rpartition(':')[2]}"
            if endpoint == hop.endpoint:
                continue
            try:
                await hop.runner.link(endpoint, keep_stream=True)
            except MeshError as exc:  # it ends just now
                _log.debug("%s: %s", instance_id, exc)
                continue
            _log.info("the next dial from a stage of %s goes to %s instead of %s", instance_id, endpoint, hop.endpoint)
            hop.endpoint = endpoint


def _way(hop: _Hop) -> int:
    """Which of the peer's addresses is to be dialled: the best one, and while the hop stays down each in turn."""
    beat = hop.runner.beat
    if beat is None or beat.linked:
        hop.down = hop.tried = 0
        return 0
    hop.down += 1
    if hop.down >= DOWN_LOOKS:
        hop.down, hop.tried = 0, hop.tried + 1
    return hop.tried
