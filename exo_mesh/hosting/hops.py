"""By which address each stage here reaches the next one: that of the best way there is, also long after placement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exo_mesh.clock import next_beat
from exo_mesh.errors import MeshError
from exo_mesh.hosting.supervisor import Runner

LOOK_EVERY_S = 0.5
"""A runner gives up a hop after 5 s; the membership needs about two to find another address."""

LOST_LOOKS = 2
"""A hop that has been down at so many looks is lost if this node cannot reach its peer either."""

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
    is_lost: bool = False
    """The loss is reported to the owner of the ring."""


class Hops:
    """The hops of the runners here. hosts_of: where this node may reach a peer, best first; empty if unknown.
    is_out_of_reach: has a peer that others reach not answered this node for long?"""

    def __init__(
        self, hosts_of: Callable[[str], Sequence[str]], is_out_of_reach: Callable[[str], bool] = lambda peer_id: False
    ) -> None:
        self._hosts_of = hosts_of
        self._is_out_of_reach = is_out_of_reach
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
        """Until cancelled, look whether peers are reached by another address now, or by none."""
        while True:
            await next_beat(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Note which hops are down, give up those that nothing will mend, and `tell` the others."""
        for hop in self._hops.values():
            _note(hop)
            if not hop.is_lost and hop.down >= LOST_LOOKS and self._is_out_of_reach(hop.next_peer):
                hop.is_lost = True
                hop.runner.lose_hop(f"nor does its node reach peer {hop.next_peer[:8]}", is_out_of_reach=True)
        await self.tell()

    async def tell(self) -> None:
        """Tell the stages whose next peer is reached by another address now. While a hop stays down, it is dialled at
        each address of its peer in turn. A stream that works stays as it is: only the next dial goes there."""
        for instance_id, hop in list(self._hops.items()):
            hosts = self._hosts_of(hop.next_peer)
            if not hosts:
                continue
            endpoint = f"{hosts[hop.down // DOWN_LOOKS % len(hosts)]}:{hop.endpoint.rpartition(':')[2]}"
            if endpoint == hop.endpoint:
                continue
            try:
                await hop.runner.link(endpoint, keep_stream=True)
            except MeshError as exc:  # it ends just now
                _log.debug("%s: %s", instance_id, exc)
                continue
            _log.info("the next dial from a stage of %s goes to %s instead of %s", instance_id, endpoint, hop.endpoint)
            hop.endpoint = endpoint


def _note(hop: _Hop) -> None:
    """Whether the stream is up, as the runner last said."""
    beat = hop.runner.beat
    if beat is None or beat.linked:
        hop.down, hop.is_lost = 0, False
    else:
        hop.down += 1
