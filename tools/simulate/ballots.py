"""Runs whole control planes (placer, ring monitor, stage host, reservations, instances) through seeded failures.

Only the runner processes are simulated. A ledger sees every stage that starts and ends, and checks at each start what
must never happen: two stages of one instance on one peer at once (two plans in force would share a member), or a plan
that starts after a higher one was in force there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from exo_mesh.domain.view import InstanceState
from exo_mesh.rings.placing.spec import InstanceSpec
from tools.simulate.control_plane import MODEL, Ledger, SimNode
from tools.simulate.mesh import address_of
from tools.simulate.network import Network
from tools.simulate.virtual_loop import VirtualLoop, run

QUIET_S = 35.0
"""Quiet time after the last failure: leases expire after 30 s, orphans end after 10 s."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one schedule. problems: what must never happen, and what is left QUIET_S after the last
    failure."""

    seed: int
    peers: int
    rings: int
    stages: int
    settled_s: float
    problems: tuple[str, ...]


class Schedule:
    """One seeded sequence of events for a few nodes."""

    def __init__(self, loop: VirtualLoop, seed: int, count: int, busy_s: float) -> None:
        self.loop = loop
        self.rng = random.Random(seed)
        self.seed = seed
        self.busy_s = busy_s
        self.over = False
        slow = self.rng.random() < 0.3
        self.network = Network(loop, random.Random(seed + 1), delay_s=(0.001, 0.4 if slow else 0.01))
        self.network.loss = self.rng.choice((0.0, 0.0, 0.01, 0.05))
        self.ledger = Ledger(loop)
        self.addresses = [address_of(index) for index in range(count)]
        self.nodes = [SimNode(self.network, self.ledger, index, 1) for index in range(count)]

    async def play(self) -> Outcome:
        for node in self.nodes:
            node.begin([address for address in self.addresses[:3] if address != node.address])
        await asyncio.sleep(1.0)
        end = self.loop.time() + self.busy_s
        while self.loop.time() < end:
            self._something()
            await asyncio.sleep(self.rng.expovariate(1.0))
        self.network.split()
        self.network.loss = 0.0
        for node in self.nodes:
            node.runner_death = 0.0
            if node.process.alive:
                self.loop.wake_process(node.process.name)
        quiet_at = self.loop.time()
        while (left := self._left_over()) and self.loop.time() - quiet_at < QUIET_S:  # noqa: ASYNC110 - it is the clock
            await asyncio.sleep(0.5)
        problems = [*self.ledger.violations, *left]
        settled_s = self.loop.time() - quiet_at
        self.over = True
        rings = len({(runner.plan.instance_id, runner.plan.ballot) for runner in self.ledger.by_endpoint.values()})
        return Outcome(self.seed, len(self.nodes), rings, self.ledger.started, settled_s, tuple(problems))

    @property
    def up(self) -> list[SimNode]:
        return [
            node for node in self.nodes if node.process.alive and not self.loop.is_stopped(node.process.name)
        ]  # fmt: skip

    def _something(self) -> None:
        node = self.rng.choice(self.up or self.nodes)
        match self.rng.choice(("place", "place", "place", "kill", "stop", "stop", "split", "delete", "runner")):
            case "place":
                wish = InstanceSpec(MODEL, min_peers=self.rng.randint(1, min(3, len(self.nodes))))
                for one in self.rng.sample(self.up, min(len(self.up), self.rng.choice((1, 1, 2, 3)))):
                    self.network.start(one.process, one.place(wish))
            case "kill":
                self._kill(node)
            case "stop":
                self.loop.stop_process(node.process.name)
                self.loop.call_later(self.rng.uniform(0.5, 10.0), self._wake, node)
            case "split":
                self.network.split(self.rng.sample(self.addresses, self.rng.randint(1, len(self.nodes) - 1)))
                self.loop.call_later(self.rng.uniform(0.5, 8.0), self.network.split)
            case "delete":
                ids = sorted({one.plan.instance_id for _, one in node.membership.view.instances()})
                if ids:
                    self.network.start(node.process, node.delete(self.rng.choice(ids)))
            case "runner":
                node.runner_death = self.rng.choice((0.0, 0.02))

    def _wake(self, node: SimNode) -> None:
        if node.process.alive:
            self.loop.wake_process(node.process.name)

    def _kill(self, node: SimNode) -> None:
        if not node.process.alive:
            return
        self.network.kill(node.process)
        for runner in self.ledger.alive:
            if runner.peer is node:
                runner.alive = False  # its pipe to the node ends
        if self.rng.random() < 0.7:
            self.loop.call_later(self.rng.uniform(0.2, 6.0), self._restart, node)

    def _restart(self, node: SimNode) -> None:
        if self.over:
            return
        again = SimNode(self.network, self.ledger, node.index, node.incarnation + 1)
        self.nodes[self.nodes.index(node)] = again
        again.begin([address for address in self.addresses if address != again.address])

    def _left_over(self) -> list[str]:
        """Lists what must not exist after a quiet time."""
        found = []
        if any(one.instances._flights for one in self.nodes if one.process.alive):
            found.append("still placing")
        alive = [node for node in self.nodes if node.process.alive]
        if len({node.membership.view.sum for node in alive}) > 1:
            found.append("views differ: " + str([len(node.membership.peers) for node in alive]))
        if not alive:
            return found
        records = alive[0].membership.view.records_of_instances()
        ids = [one.plan.instance_id for _, one in records]
        if len(ids) != len(set(ids)):
            found.append(f"two records of one instance: {ids}")
        ready = {(one.plan.instance_id, one.plan.ballot) for _, one in records if one.state is not InstanceState.FAILED}
        for runner in self.ledger.alive:
            if (runner.plan.instance_id, runner.plan.ballot) not in ready:
                found.append(f"orphan {runner.label} of {runner.plan.ballot} on {runner.peer.address}")
        for _, one in records:
            held = [runner for runner in self.ledger.alive if runner.plan.ballot == one.plan.ballot
                    and runner.plan.instance_id == one.plan.instance_id]  # fmt: skip
            if one.state is InstanceState.READY and len(held) != len(one.plan.stages):
                found.append(f"ghost: {one.plan.instance_id} {one.plan.ballot} has {len(held)} stages")
        for node in alive:
            running = {runner.plan.instance_id for runner in self.ledger.alive if runner.peer is node}
            leaked = [lease.plan.instance_id for lease in node.host.leases if lease.plan.instance_id not in running]
            if leaked:
                found.append(f"leases without a stage on {node.address}: {leaked}")
        return found


def play(seed: int, count: int | None = None, busy_s: float = 10.0) -> Outcome:
    """Plays one schedule in its own world."""
    peers = count or random.Random(seed).randint(3, 5)
    outcome: Outcome = run(lambda loop: Schedule(loop, seed, peers, busy_s).play())
    return outcome
