"""Measures the paths to each peer, and makes calls over the best one.

One peer is measured at a time: shortly after it joined, after its addresses have changed or one has failed, and
otherwise ever more rarely as long as the result stays the same. `domain.addresses.best_path` makes the decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.wakeups import until_wakeup
from exo_mesh.domain.addresses import MAX_PROBE_BYTES, Interface, Path, best_path, dialable, link_kind
from exo_mesh.errors import MeshError
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.mesh.membership.peers import Peer, is_answered_by
from exo_mesh.mesh.membership.port import ControlPort
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.wire.calls import PROBE_PATH, path_request

TICK_S = 0.5
SETTLE_S = 1.0
"""Delay before the first measurement of a new peer, which is busy exchanging records and loading."""
AGAIN_S = 60.0
"""Time to the second measurement of a peer whose addresses have not changed. It doubles with each measurement that
changes nothing: a measurement costs both nodes a few hundred wake-ups. Probes notice an address that fails, and the
round trip to the peer, all the time."""
PACE_S = 60.0
"""Time for each peer in which no other peer is measured again: otherwise the calls of a mesh of 16 would keep idle
nodes awake."""
CALM_S = 600.0
"""Longest time between two measurements, or twice PACE_S for each peer if that is longer: a better address may work
again that did not answer before."""
SOON_S = 5.0
"""Shortest time between two measurements of a peer, however often its addresses change."""
GOODPUT_AGAIN_S = 600.0
SMALL_MESH_PEERS = 16
"""In a larger mesh the transfers would add up: goodput is not measured at all, and round trips are measured rarely."""
PEERS_PER_S = 8
"""In a larger mesh: seconds between two measurements = peers / this. With 200 peers that is one in 25 s, or 0.5
KB/s."""
MOST_ALIKE = 16
"""Measurements in a row that are counted; the longest pause is reached earlier."""
NUM_PROBES = 4
PROBE_S = 1.0
TRANSFER_S = 3.0

_log = logging.getLogger(__name__)


class PathKeeper:
    """Measures paths until `run` is cancelled. read: returns the interfaces of this machine."""

    def __init__(
        self,
        membership: Membership,
        *,
        read: Callable[[], list[Interface]] = recent_interfaces,
        clock: Clock = monotonic,
        wall_clock: Clock = time.time,
        settle_s: float = SETTLE_S,
        soon_s: float = SOON_S,
    ) -> None:
        self._membership = membership
        self._read = read
        self._clock = clock
        self._wall_clock = wall_clock
        self._settle_s = settle_s
        self._soon_s = soon_s
        self._measured_at: dict[str, float] = {}
        self._transferred_at: dict[str, float] = {}
        self._num_alike: dict[str, int] = {}
        """Measurements in a row after which the same address of a peer was used, and the same ones had failed."""

    async def run(self) -> None:
        pause_s = TICK_S
        while True:
            await asyncio.sleep(until_wakeup(TICK_S) if pause_s == TICK_S else pause_s)
            pause_s = TICK_S
            peers = self._membership.peers
            for known in (self._measured_at, self._transferred_at, self._num_alike):
                for gone in known.keys() - {peer.id for peer in peers}:
                    del known[gone]
            for peer in peers:
                await peer.close_retired()
            due = [peer for peer in peers if self._is_due(peer)]
            if due:
                await self.measure(min(due, key=lambda peer: self._measured_at[peer.id]))
                pause_s = TICK_S if len(peers) <= SMALL_MESH_PEERS else len(peers) / PEERS_PER_S

    def _is_due(self, peer: Peer) -> bool:
        now = self._clock()
        # A new peer counts as measured at such a time that it is due after settle_s.
        since_s = now - self._measured_at.setdefault(peer.id, now + self._settle_s - self._soon_s)
        changed = peer.paths.keys() != set(peer.addresses)
        return since_s >= (self._soon_s if changed else self._pause_s(peer))

    def _pause_s(self, peer: Peer) -> float:
        """Time to the next measurement of a peer whose addresses have not changed."""
        paced_s = PACE_S * len(self._membership.peers)
        return min(max(AGAIN_S, paced_s) * float(1 << self._num_alike.get(peer.id, 0)), max(CALM_S, 2 * paced_s))

    async def measure(self, peer: Peer) -> None:
        """Measure every address of a peer, and use the best one from now on."""
        self._measured_at[peer.id] = self._clock()
        before = _choice(peer)
        clients = {address: self._client(peer, address) for address in list(peer.addresses)}
        try:
            paths = await self._paths(peer, clients)
            if self._membership.peer(peer.id) is not peer:
                return
            peer.paths = {path.address: path for path in paths}
            self._forget_failed(peer)
            best = best_path(paths, peer.client.address)
            if best is not None and best.address != peer.client.address:
                _log.info("peer %s (%s): using address %s, %.1f ms away", peer.info.name, peer.id[:8], best.address,
                          best.rtt_ms)  # fmt: skip
                peer.use(clients.pop(best.address))
            num_alike = self._num_alike.get(peer.id, 0) + 1 if _choice(peer) == before else 0
            self._num_alike[peer.id] = min(num_alike, MOST_ALIKE)
        finally:
            mine = (peer.client, *peer.retired)
            await asyncio.gather(*(client.close() for client in clients.values() if client not in mine))

    def _client(self, peer: Peer, address: str) -> ControlPort:
        """The client of the address in use while calls run on it; otherwise a new one, whose connection is closed after
        the measurement and not some seconds later."""
        return peer.client if address == peer.client.address and not peer.client.is_idle else peer.client.at(address)

    async def _paths(self, peer: Peer, clients: dict[str, ControlPort]) -> list[Path]:
        interfaces = self._read()
        answers = await asyncio.gather(*(self._is_answered(peer, client) for client in clients.values()))
        paths = []
        for (address, client), answered in zip(clients.items(), answers, strict=True):
            path = Path(address, link_kind(address, interfaces), failed=not answered)
            paths.append(await self._with_rtt(path, client) if answered else path)
        if not self._transfer_is_due(peer):
            known = peer.paths
            return [_with_goodput_of(known[path.address], path) if path.address in known else path for path in paths]
        self._transferred_at[peer.id] = self._clock()
        worth_it = any(path.works and not path.kind.comes_last for path in paths)
        return [
            path if path.kind.comes_last and worth_it else await self._with_goodput(path, clients[path.address])
            for path in paths
        ]

    async def _is_answered(self, peer: Peer, client: ControlPort) -> bool:
        """Whether the peer answers. If not at the address in use, its client makes a call, and so notices that."""
        if await is_answered_by(peer.id, client):
            return True
        return client.address == peer.client.address and await is_answered_by(peer.id, peer.client)

    def _transfer_is_due(self, peer: Peer) -> bool:
        last = self._transferred_at.get(peer.id)
        few = len(self._membership.peers) <= SMALL_MESH_PEERS
        new = any(address not in peer.paths for address in peer.addresses)
        return few and (last is None or new or self._clock() - last >= GOODPUT_AGAIN_S)

    async def _with_rtt(self, path: Path, client: ControlPort) -> Path:
        """The path with the shortest of a few round trips; longer ones include delays on the machines."""
        try:
            return replace(path, rtt_ms=min([await self._probe_ms(client, 0, PROBE_S) for _ in range(NUM_PROBES)]))
        except MeshError:
            return replace(path, failed=True)

    async def _with_goodput(self, path: Path, client: ControlPort) -> Path:
        if not path.works or path.rtt_ms is None:
            return path
        now = round(self._wall_clock())
        try:
            took_ms = await self._probe_ms(client, MAX_PROBE_BYTES, TRANSFER_S)
        except MeshError:  # slower than 0.1 MB/s
            return replace(path, mb_per_s=MAX_PROBE_BYTES / TRANSFER_S / 1e6, mb_per_s_at=now)
        return replace(path, mb_per_s=MAX_PROBE_BYTES / 1000 / max(took_ms - path.rtt_ms, 0.05), mb_per_s_at=now)

    async def _probe_ms(self, client: ControlPort, reply_bytes: int, timeout_s: float) -> float:
        sent = self._clock()
        await client.call(PROBE_PATH, path_request(reply_bytes), timeout_s)
        return 1000 * (self._clock() - sent)

    def _forget_failed(self, peer: Peer) -> None:
        """Drop addresses that failed and that the peer does not advertise. An address learned during this measurement
        is measured next time."""
        advertised = {way for address in peer.info.addresses for way in dialable(address, self._read())}
        for address, path in list(peer.paths.items()):
            if path.failed and address not in advertised and address != peer.client.address:
                if address in peer.addresses:
                    peer.addresses.remove(address)
                del peer.paths[address]


def _with_goodput_of(before: Path, path: Path) -> Path:
    return replace(path, mb_per_s=before.mb_per_s, mb_per_s_at=before.mb_per_s_at)


def _choice(peer: Peer) -> tuple[str, frozenset[str]] | None:
    """The address in use, and the addresses that failed when they were last measured; None before a measurement."""
    if not peer.paths:
        return None
    return peer.client.address, frozenset(path.address for path in peer.paths.values() if path.failed)
