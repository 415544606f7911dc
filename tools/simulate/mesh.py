"""Simulates meshes of memberships alone: how fast they agree, and what that costs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from exo_mesh.domain.device import Device, PeerInfo, Telemetry
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record
from exo_mesh.mesh.discovery.port import Announcement
from exo_mesh.mesh.discovery.static import StaticDiscovery
from exo_mesh.mesh.membership import wiring
from exo_mesh.mesh.membership.detector import LAN, Timing
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.wire.call_access import OwnCalls
from exo_mesh.wire.peer_call import AnyAnswer
from tools.simulate.network import Network, Process, SimClient
from tools.simulate.virtual_loop import VirtualLoop, run

MAX_DEATHS = 5
"""Deaths that are measured in sequence, of which the slowest one to be noticed counts."""

RUN_S, LONGEST_PAUSE_S = 0.02, 4.0
"""How long a starved process runs at a time, and the longest wait between runs. Assumed; with delays of up to 1.3 s
they give as many false verdicts as were seen at a load average of 60 (15 in two minutes)."""

NUM_SEEDS = 3
"""Number of peer addresses that every peer knows at its start."""


def quiet() -> None:
    """Silences the logs: thousands of deaths are expected here. Not in __main__, because a pool's processes cannot
    import that."""
    logging.getLogger("exo_mesh").setLevel(logging.CRITICAL)


def own_info(index: int, incarnation: int) -> PeerInfo:
    """Returns a peer record as large as a real one."""
    device = Device("cpu", "Generic 16-core processor", ("dummy", "mlx"), "mlx", 16)
    models = tuple(f"organisation/some-model-{number}-8B-4bit" for number in range(3))
    return PeerInfo(
        id=f"{index:08x}" * 4,
        incarnation=incarnation,
        name=f"machine-{index}",
        version="0.1.0",
        protocol=2,
        namespace="default",
        addresses=(address_of(index),),
        api_url=f"http://10.0.{index // 250}.{index % 250}:52415",
        devices=(device,),
        models=models,
    )


def address_of(index: int) -> str:
    return f"10.0.{index // 250}.{index % 250}:5000"


class SimPeer:
    """One start of one peer."""

    def __init__(self, network: Network, index: int, incarnation: int, timing: Timing = LAN) -> None:
        self.index = index
        self.incarnation = incarnation
        self.network = network
        self.left: list[str] = []
        info = self.describe()
        self.address = info.addresses[0]
        self.process: Process = network.begin(self.address)
        self._sequence = incarnation * 2**32
        self.membership = self.process.context.run(
            lambda: Membership(
                info,
                self,
                lambda address: SimClient(network, self.address, address),
                answers=self.answers,
                timing=timing,
                clock=network.loop.time,
                rng=random.Random(network.rng.random()),
            )
        )

    def describe(self) -> PeerInfo:
        return own_info(self.index, self.incarnation)

    def peer_left(self, peer: PeerInfo, records: list[Record]) -> None:
        self.left.append(peer.id)

    async def before_refute(self) -> None: ...

    def answers(self) -> list[AnyAnswer]:
        return wiring.answers(self.membership, OwnCalls(self.membership.own.id))

    def prefixes(self) -> dict[str, bytes]:
        return {}

    def is_calm(self, instance_id: str) -> bool:
        return False

    def reading(self) -> Telemetry:
        self._sequence += 1
        return Telemetry(self.membership.own.id, self._sequence, 64 * 2**30, 128 * 2**30, 0, 1.5)

    def begin(self, seeds: Iterable[str]) -> None:
        """Starts the peer, with the discovery of a node that has these bootstrap peers."""
        self.process.answers = {answer.row: answer for answer in self.answers()}
        self.network.start(self.process, self._begin(StaticDiscovery(list(seeds))))

    async def _begin(self, discovery: StaticDiscovery) -> None:
        own = self.membership.own
        self.membership.start(own)
        await discovery.start(Announcement(own.namespace, own.id, 5000), self.membership.suggest)

    def do(self, action: Callable[[], Any]) -> None:
        """Calls a function as this process."""
        self.network.loop.call_soon(action, context=self.process.context.copy())


@dataclass(slots=True)
class Report:
    """One row of the table. Times are simulated seconds; bytes and messages are sent, per peer and second."""

    peers: int
    seed: int
    join_s: float
    steady_messages: float
    steady_bytes: float
    busiest_bytes: float
    change_s: float = 0.0
    kill_s: float = 0.0
    silent_s: float = 0.0
    heal_s: float = 0.0
    heal_false: int = 0
    loss_false: int = 0
    stalled_false: int = 0
    disagreements: int = 0


class Mesh:
    """The running peers, and measurements over all of them."""

    def __init__(self, loop: VirtualLoop, count: int, seed: int) -> None:
        self.loop = loop
        self.network = Network(loop, random.Random(seed))
        self.rng = random.Random(seed + 1)
        self.peers = [SimPeer(self.network, index, 1) for index in range(count)]

    @property
    def seeds(self) -> list[str]:
        return [address_of(index) for index in range(min(NUM_SEEDS, len(self.peers)))]

    def agreed(self, peers: Iterable[SimPeer] | None = None, num_known: int | None = None) -> bool:
        """Whether these peers have one view, of `num_known` peers (themselves)."""
        chosen = list(self.peers if peers is None else peers)
        expected = len(chosen) if num_known is None else num_known
        first = chosen[0].membership.view.sum
        return all(
            peer.membership.num_peers == expected - 1 and peer.membership.view.sum == first for peer in chosen
        )  # fmt: skip

    async def until(self, condition: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Returns how long it took; infinity if it did not happen."""
        began = self.loop.time()
        while not condition():
            if self.loop.time() - began > limit_s:
                return float("inf")
            await asyncio.sleep(0.05)
        return self.loop.time() - began

    async def traffic(self, seconds: float) -> tuple[float, float, float]:
        """Measures (messages, bytes, bytes of the busiest peer) sent per peer and second from now on."""
        self.network.messages.clear()
        self.network.num_bytes.clear()
        await asyncio.sleep(seconds)
        per = len(self.peers) * seconds
        sent = self.network.num_bytes
        return sum(self.network.messages.values()) / per, sum(sent.values()) / per, max(sent.values()) / seconds

    def take_left(self) -> int:
        """Returns and clears the verdicts of death so far."""
        count = sum(len(peer.left) for peer in self.peers)
        for peer in self.peers:
            peer.left.clear()
        return count


def an_instance(peers: list[SimPeer]) -> InstanceInfo:
    """Returns a ring over some peers."""
    ids = [peer.membership.own.id for peer in peers]
    cuts = [round(index * 32 / len(ids)) for index in range(len(ids) + 1)]
    stages = tuple(
        StagePlan(one, "mlx", Shard("m", cuts[index], cuts[index + 1], 32), 10**9) for index, one in enumerate(ids)
    )
    inputs = PlanInputs(tuple((one, 10**10) for one in ids), "memory", 1)
    plan = Plan("m-1", Ballot(1, ids[0]), "m", "d" * 64, stages, 8192, inputs)
    endpoints = tuple(f"{peer.address.partition(':')[0]}:40000" for peer in peers)
    return InstanceInfo(plan, InstanceState.READY, endpoints, tuple(range(len(ids))))


async def measure(loop: VirtualLoop, count: int, seed: int, brief: bool) -> Report:
    """Runs all phases: all start at once; a quiet time; a new instance; unless brief, a partition, loss and suspended
    peers; a death."""
    mesh = Mesh(loop, count, seed)
    for peer in mesh.peers:
        peer.begin([address for address in mesh.seeds if address != peer.address])
    join_s = await mesh.until(mesh.agreed)
    await asyncio.sleep(5)
    messages, num_bytes, busiest = await mesh.traffic(10)
    row = Report(count, seed, join_s, messages, num_bytes, busiest)
    row.disagreements += not mesh.agreed()
    row.change_s = await change(mesh)
    if not brief:
        row.heal_s, row.heal_false = await partition(mesh)
        row.loss_false = await lose(mesh)
        row.stalled_false = await stall(mesh)
        row.disagreements += await mesh.until(mesh.agreed) == float("inf")
    row.kill_s = await kill(mesh)
    if len(mesh.peers) > 2:
        row.silent_s = await kill(mesh, silent=True)
    row.disagreements += float("inf") in (row.join_s, row.change_s, row.heal_s, row.kill_s, row.silent_s)
    return row


async def change(mesh: Mesh) -> float:
    """Returns the seconds from a new instance at one peer to one view at all peers."""
    owner = mesh.rng.choice(mesh.peers)
    ring = an_instance(mesh.rng.sample(mesh.peers, min(4, len(mesh.peers))))
    owner.do(lambda: owner.membership.put_instance("m-1", ring))
    return await mesh.until(
        lambda: mesh.agreed() and all(peer.membership.view.instances() for peer in mesh.peers)
    )  # fmt: skip


async def partition(mesh: Mesh) -> tuple[float, int]:
    """Returns (seconds from the end of ten in two halves to one view, verdicts against peers of the own half from then
    on)."""
    half = {peer.membership.own.id for peer in mesh.peers[: len(mesh.peers) // 2]}
    mesh.network.split({peer.address for peer in mesh.peers if peer.membership.own.id in half})
    await asyncio.sleep(10)
    mesh.take_left()
    mesh.network.split()
    heal_s = await mesh.until(mesh.agreed)
    lost = [(peer.membership.own.id in half) == (one in half) for peer in mesh.peers for one in peer.left]
    return heal_s, sum(lost)


async def lose(mesh: Mesh) -> int:
    """Returns verdicts of death in twenty seconds with every twentieth message lost."""
    await asyncio.sleep(5)
    mesh.take_left()
    mesh.network.loss = 0.05
    await asyncio.sleep(20)
    mesh.network.loss = 0.0
    count = mesh.take_left()
    await mesh.until(mesh.agreed)
    return count


async def stall(mesh: Mesh) -> int:
    """Returns verdicts against others when every twentieth peer is suspended for ten seconds and wakes."""
    mesh.take_left()
    stalled = mesh.rng.sample(mesh.peers, max(1, len(mesh.peers) // 20))
    for peer in stalled:
        mesh.loop.stop_process(peer.process.name)
    await asyncio.sleep(10)
    for peer in stalled:
        mesh.loop.wake_process(peer.process.name)
    await asyncio.sleep(10)
    ids = {peer.membership.own.id for peer in stalled}
    return sum(1 for peer in mesh.peers for one in peer.left if one not in ids)


async def starve(mesh: Mesh, seconds: float, mean_pause_s: float, longest_delay_s: float) -> int:
    """Returns verdicts of death while every process runs for RUN_S at a time and then waits, and a message takes up to
    longest_delay_s through the threads of both ends, as on an overloaded machine. No peer is gone meanwhile."""
    mesh.take_left()
    async with starved(mesh, mean_pause_s, longest_delay_s):
        await asyncio.sleep(seconds)
    return mesh.take_left()


@contextlib.asynccontextmanager
async def starved(mesh: Mesh, mean_pause_s: float, longest_delay_s: float) -> AsyncIterator[None]:
    """See `starve`."""
    usual, mesh.network.delay_s = mesh.network.delay_s, (longest_delay_s / 5, longest_delay_s)
    turns = [asyncio.create_task(_take_turns(mesh, peer, mean_pause_s)) for peer in mesh.peers]
    try:
        yield
    finally:
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        mesh.network.delay_s = usual


async def _take_turns(mesh: Mesh, peer: SimPeer, mean_pause_s: float) -> None:
    name = peer.process.name
    try:
        while True:
            mesh.loop.stop_process(name)
            await asyncio.sleep(min(LONGEST_PAUSE_S, mesh.rng.expovariate(1 / mean_pause_s)))
            mesh.loop.wake_process(name)
            await asyncio.sleep(RUN_S)
    finally:
        mesh.loop.wake_process(name)


async def kill(mesh: Mesh, *, silent: bool = False) -> float:
    """Returns the longest time from a death to one view without the dead peer, of MAX_DEATHS in sequence, while two
    peers are left. silent: as in a power failure, no port refuses."""
    longest_s = 0.0
    for _ in range(max(1, min(MAX_DEATHS, len(mesh.peers) // 8))):
        victim = mesh.peers.pop(mesh.rng.randrange(len(mesh.peers)))
        if silent:
            mesh.loop.stop_process(victim.process.name)
        else:
            mesh.network.kill(victim.process)
        longest_s = max(longest_s, await mesh.until(mesh.agreed))
        await asyncio.sleep(mesh.rng.uniform(1.0, 2.0))
    return longest_s


def report(count: int, seed: int, *, brief: bool = False) -> Report:
    """Measures one row in its own world."""
    result: Report = run(lambda loop: measure(loop, count, seed, brief))
    return result
