"""Keeps each stage's hop on the best address of the next peer, also long after placement."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.errors import MeshError
from exo_mesh.rings.hosting.supervisor import Runner
from exo_mesh.rings.hosting.surroundings import StageSurroundings

LOOK_EVERY_S = 0.5
"""Seconds between checks. A runner gives up a hop after 5 s; the membership needs about 2 s to find another address."""

LOST_LOOKS = 2
"""A hop that was down at this many checks is lost if this node cannot reach its peer either."""

DOWN_LOOKS = 4
"""A hop that was down at this many checks is dialled at the next address of its peer: a firewall may block the data
port at the best one. A healthy dial takes 20 ms, with TLS on a slow board 0.5 s."""

SHOW_S, SHOW_STEP_S = 1.2, 0.05
"""Longest time that a hop which rested may take to connect when somebody asks whether it is up, and the time between
two looks. The caller waits for 1.5 s. The runner reports the hop within half a second."""

_log = logging.getLogger(__name__)


class _Hop(msgspec.Struct):
    runner: Runner
    next_peer: str
    endpoint: str
    down: int = 0
    """Checks in a row at which the stream was not up."""
    is_lost: bool = False
    """Whether the loss was reported to the owner of the ring."""


class Hops:
    """The hops of the runners here."""

    def __init__(self, around: StageSurroundings) -> None:
        self._around = around
        self._hops: dict[str, _Hop] = {}

    async def link(self, instance_id: str, runner: Runner, endpoint: str, next_peer: str) -> None:
        """Set where the next stage listens, now and whenever the way to it changes. Raises StageLostError."""
        self._hops[instance_id] = _Hop(runner, next_peer, endpoint)
        await runner.link(endpoint)

    def forget(self, instance_id: str, runner: Runner) -> None:
        """Forget the hop of a runner that is gone."""
        hop = self._hops.get(instance_id)
        if hop is not None and hop.runner is runner:
            del self._hops[instance_id]

    async def keep(self) -> None:
        """Check until cancelled whether peers are reached by another address now, or by none."""
        while True:
            await next_wakeup(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Note which hops are down, give up hops that cannot recover, and update the others by `tell`. A hop that rests
        is opened while its peer is silent: its loss must not wait for the next request."""
        for hop in list(self._hops.values()):
            _note(hop)
            if _rests(hop.runner) and self._around.is_silent(hop.next_peer):
                await hop.runner.open_hop()
            if not hop.is_lost and hop.down >= LOST_LOOKS and self._around.is_out_of_reach(hop.next_peer):
                hop.is_lost = True
                hop.runner.lose_hop(
                    f"the node of this stage cannot reach peer {hop.next_peer[:8]} either", is_out_of_reach=True
                )
        await self.tell()

    async def tell(self) -> None:
        """Send the new address to stages whose next peer is reached by another one now. While a hop stays down, each
        address of its peer is dialled in turn. A working stream stays as it is: only the next dial uses the new
        address."""
        for instance_id, hop in list(self._hops.items()):
            hosts = self._around.hosts_of(hop.next_peer)
            if not hosts:
                continue
            endpoint = f"{hosts[hop.down // DOWN_LOOKS % len(hosts)]}:{hop.endpoint.rpartition(':')[2]}"
            if endpoint == hop.endpoint:
                continue
            try:
                await hop.runner.link(endpoint, keep_stream=True)
            except MeshError as exc:  # the runner is ending
                _log.debug("%s: %s", instance_id, exc)
                continue
            _log.info("a stage of %s will dial its next stage at %s instead of %s", instance_id, endpoint, hop.endpoint)
            hop.endpoint = endpoint


async def is_up(runner: Runner, shown_by: float = 0.0) -> bool:
    """Whether the stage of a runner is connected to the next one; not if the hop rests, which proves nothing.

    shown_by: time of the event loop until which the hop of an idle ring, which may rest or be on its way to or from
    it, is opened and has time to connect.
    """
    now = asyncio.get_running_loop().time
    if now() < shown_by and runner.beat is not None and runner.beat.is_idle and not _is_linked(runner):
        await runner.open_hop()
        for _ in range(round(SHOW_S / SHOW_STEP_S)):
            if _is_linked(runner) or now() >= shown_by:
                break
            await asyncio.sleep(SHOW_STEP_S)
    return _is_linked(runner)


def _is_linked(runner: Runner) -> bool:
    return runner.beat is not None and runner.beat.linked and not runner.beat.hop_rests


def _rests(runner: Runner) -> bool:
    return runner.beat is not None and runner.beat.hop_rests


def _note(hop: _Hop) -> None:
    """Count whether the stream is up, by the runner's last heartbeat."""
    beat = hop.runner.beat
    if beat is None or beat.linked:
        hop.down, hop.is_lost = 0, False
    else:
        hop.down += 1
