"""Chooses among the ready instances of a model by the expected time of a request; see domain/routing."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.footprint import MOST_SEQUENCES
from exo_mesh.domain.routing.choice import Job, Option, better_than, choose
from exo_mesh.domain.routing.digest import kept_tokens
from exo_mesh.domain.routing.prefixes import KnownPrompts
from exo_mesh.domain.routing.speed import Speed, Speeds
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.mesh.membership.service import Membership

OwnJobs = Mapping[str, Sequence[Job]]
"""The live requests of this entry peer by instance, oldest first."""


NO_WORK = Job(0, 0)


def _no_jobs() -> OwnJobs:
    return {}


class Load(msgspec.Struct, frozen=True):
    """The facts about a request when an instance is chosen for it. own: returns the requests of this entry peer, and is
    called only if there is a choice. job: what the request needs. tokens: the most tokens, prompt and output together,
    that it may use. full: instances that have refused it. hashes: returns the block hashes of its prompt
    (domain/routing/prefixes.py); called only if there is a choice."""

    own: Callable[[], OwnJobs] = msgspec.field(default=_no_jobs)
    job: Job = NO_WORK
    tokens: int = 0
    full: frozenset[str] = frozenset()
    hashes: Callable[[], Sequence[bytes]] = tuple


class InstanceChoice:
    """Knows how busy and how fast each instance is, and chooses by it. speeds: what this entry peer measures."""

    def __init__(self, membership: Membership, rng: random.Random, clock: Clock) -> None:
        self.speeds = Speeds()
        self.prompts = KnownPrompts()
        self._membership = membership
        self._rng = rng
        self._clock = clock

    def speed(self, instance: InstanceInfo) -> Speed:
        """The measured speed of an instance with the peers that it has now."""
        return self.speeds.of(instance.plan.instance_id, _members(instance))

    def computed(self, instance: InstanceInfo, hashes: Sequence[bytes]) -> None:
        """Note that an instance has computed a prompt for this entry peer."""
        self.prompts.note(instance.plan.instance_id, _members(instance), hashes)

    def best(self, ready: Sequence[InstanceInfo], load: Load) -> InstanceInfo:
        """The instance where the request is expected to be done first; see domain.routing.choice."""
        if len(ready) == 1:
            return ready[0]
        readings, own = self._membership.telemetry, load.own()
        hashes = load.hashes()
        options = [self._option(one, own.get(one.plan.instance_id, ()), readings, hashes) for one in ready]
        return ready[choose(options, load.job, self._rng)]

    def better(
        self, ready: Sequence[InstanceInfo], held: InstanceInfo, ahead: Sequence[Job], load: Load
    ) -> InstanceInfo | None:
        """The instance that a request should move to while it waits in the queue of `held`, where these own requests
        are ahead of it; None if it should stay."""
        readings, own = self._membership.telemetry, load.own()
        others = [one for one in ready if one.plan.instance_id not in {held.plan.instance_id, *load.full}]
        hashes = load.hashes()
        options = [self._option(one, own.get(one.plan.instance_id, ()), readings, hashes) for one in others]
        best = better_than([self._option(held, ahead, readings, hashes), *options], 0, load.job)
        return None if best is None else others[best - 1]

    def num_running(self, instance: InstanceInfo, num_own: int) -> int:
        """Requests that run at an instance now: at most its slots. num_own: requests of this entry peer there."""
        slots = slots_of(instance, self._membership.reading_of(instance.plan.peer_ids[-1]))
        return max(1, min(slots, num_own + self.num_others(instance.plan.instance_id)))

    def num_others(self, instance_id: str) -> int:
        """Requests of the other entry peers at an instance, as they last reported them. Cheap: it makes no reading of
        this node."""
        readings = (self._membership.reading_of(peer.id) for peer in self._membership.peers)
        reports = (reading.entry_requests for reading in readings if reading is not None)
        return sum(report.running.get(instance_id, 0) for report in reports if report is not None)

    def _option(
        self, instance: InstanceInfo, own: Sequence[Job], readings: Mapping[str, Telemetry], hashes: Sequence[bytes]
    ) -> Option:
        instance_id, driver = instance.plan.instance_id, instance.plan.peer_ids[-1]
        speed = self.speed(instance)
        peer = self._membership.peer(driver)
        return Option(
            speed,
            own,
            self._others(instance_id, driver, len(own), readings),
            slots_of(instance, readings.get(driver)),
            (peer.rtt_ms or 0.0) / 1000 if peer is not None else 0.0,
            speed.trust(self._clock()),
            self._num_kept(instance, driver, hashes),
        )

    def _num_kept(self, instance: InstanceInfo, driver: str, hashes: Sequence[bytes]) -> int:
        """How many first tokens of a prompt an instance has probably kept: as this entry peer remembers, or as the
        driver says."""
        instance_id = instance.plan.instance_id
        digest = self._membership.prefixes_of(driver).get(instance_id, b"")
        return max(
            self.prompts.num_tokens(instance_id, _members(instance), hashes),
            kept_tokens(digest, hashes),
        )

    def _others(self, instance_id: str, driver: str, num_own: int, readings: Mapping[str, Telemetry]) -> int:
        """Up to 1 s old. The driver's own count replaces the reports of peers of an older version."""
        others = [reading for peer_id, reading in readings.items() if peer_id != self._membership.own.id]
        known = sum(one.entry_requests.running.get(instance_id, 0) for one in others if one.entry_requests is not None)
        if any(one.entry_requests is None for one in others) and driver in readings:
            return max(known, readings[driver].outstanding.get(instance_id, 0) - num_own)
        return known


def _members(instance: InstanceInfo) -> tuple[str, ...]:
    """The peers of an instance with their layers, which identify its measurements and kept KV."""
    return tuple(f"{stage.peer_id} {len(stage.shard)}" for stage in instance.plan.stages)


def slots_of(instance: InstanceInfo, reading: Telemetry | None) -> int:
    """The number of requests that an instance runs at once, as its driver's peer last reported: fewer than its slots if
    requests wait although not all slots are taken, because its KV memory is used up."""
    instance_id = instance.plan.instance_id
    slots = instance.plan.pool_sequences or MOST_SEQUENCES
    if reading is None:
        return slots
    slots = reading.slots.get(instance_id, slots)
    waiting = reading.waiting.get(instance_id, 0)
    return min(slots, max(1, reading.outstanding.get(instance_id, 0) - waiting)) if waiting else slots
