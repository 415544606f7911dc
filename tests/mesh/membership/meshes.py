"""Memberships with real gRPC on the loopback, without a node around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.mesh.membership import wiring
from exo_mesh.mesh.membership.calls import PROBE, answer_datagram, answer_probe
from exo_mesh.mesh.membership.detector import Timing
from exo_mesh.mesh.membership.peer_filter import PeerFilter
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.wire.call_access import OwnCalls
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.peer_call import AnyAnswer, answer
from exo_mesh.wire.probes.port import ProbePort
from exo_mesh.wire.proto import control_pb2 as pb

FAST = Timing(period_s=0.05, probe_s=0.5, suspicion_s=0.4, gossip_s=0.02, call_s=1.0)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Poll until the condition holds; the test fails if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def peer_info(peer_id: str, **changes: Any) -> PeerInfo:
    return replace(PeerInfo(peer_id, 1, f"name-{peer_id}", "0.1", 1, "default", ()), **changes)


class Peer:
    """One membership behind a control server. `crash` closes the server without a goodbye."""

    def __init__(
        self,
        info: PeerInfo,
        only_peers: tuple[str, ...] = (),
        only_links: tuple[str, ...] = (),
        timing: Timing | None = None,
    ) -> None:
        self.left: list[str] = []
        self.own_calls = OwnCalls(info.id)
        self.num_returns = 0
        self.num_calls = 0
        """Probes that came as calls so far."""
        self.probe_port: ProbePort | None = None
        """Set before `start`, to probe by datagrams too."""
        self.prefixes: dict[str, bytes] = {}
        self.reading = Telemetry(info.id, 1, 100, 200, 0)
        self.membership = Membership(
            info,
            SimpleNamespace(
                reading=lambda: self.reading,
                prefixes=lambda: dict(self.prefixes),
                is_calm=lambda instance_id: False,
                peer_left=lambda peer, records: self.left.append(peer.id),
                before_refute=self.before_refute,
            ),
            lambda address: ControlClient(address, probe_port=self.probe_port, own_calls=self.own_calls),
            peer_filter=PeerFilter(only_peers, only_links),
            answers=self.answers,
            timing=timing or FAST,
        )
        self.server = ControlServer(self.answers())
        self.address = ""

    def answers(self) -> list[AnyAnswer]:
        own = [one for one in wiring.answers(self.membership, self.own_calls) if one.row is not PROBE]
        return [*own, answer(PROBE, self._probe)]

    async def _probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        self.num_calls += 1
        return await answer_probe(self.membership.probing.answer, request)

    async def before_refute(self) -> None:
        self.num_returns += 1

    async def start(self, port: int = 0) -> Peer:
        port = await self.server.start("127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"
        if self.probe_port is not None and await self.probe_port.start(
            "127.0.0.1", port, partial(answer_datagram, self.membership.probing.answer_datagram)
        ):
            self.membership.take_datagrams()
        self.membership.start(replace(self.membership.own, addresses=(self.address,)))
        return self

    async def stop(self) -> None:
        await self.membership.stop()
        await self.server.stop(0)
        if self.probe_port is not None:
            self.probe_port.stop()

    async def crash(self) -> None:
        await self.server.stop(0)
        if self.probe_port is not None:
            self.probe_port.stop()
        await self.membership._tasks.close()
        for peer in self.membership.peers:
            await peer.client.close()

    @property
    def sees(self) -> list[str]:
        return [peer.id for peer in self.membership.peers]


@asynccontextmanager
async def mesh(*ids: str, before_start: Callable[[Peer], None] = lambda peer: None) -> AsyncIterator[list[Peer]]:
    """Peers that all know each other."""
    peers = [Peer(peer_info(peer_id)) for peer_id in ids]
    for peer in peers:
        before_start(peer)
        await peer.start()
    for peer in peers[1:]:
        peer.membership.suggest(peers[0].address)
    try:
        await until(lambda: all(len(peer.sees) == len(ids) - 1 for peer in peers))
        yield peers
    finally:
        for peer in peers:
            await peer.stop()
