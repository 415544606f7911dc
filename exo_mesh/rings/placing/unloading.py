"""Chooses the rings of this node that are unloaded because nobody uses them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from exo_mesh.domain.plan import Plan
from exo_mesh.domain.view import InstanceState
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.idle import IdleClock
from exo_mesh.rings.placing.short_peers import draining_members, short_members

SHORT_IDLE_S = 10.0
"""How long a ring with a peer short of memory may be idle once another ring serves its model."""

DRAINING_IDLE_S = 2.0
"""The same for a ring with a peer that drains. Entry peers know of the drain within a second or two; a node that stops
with the ring would have it placed again elsewhere."""

_log = logging.getLogger(__name__)


class HasPlan(Protocol):
    """A ring, as far as its plan."""

    @property
    def plan(self) -> Plan: ...


class UnusedRings:
    """Finds the unused rings of this node. Sets no deletion fence: a request that arrives later places the model
    again."""

    def __init__(self, membership: Membership, rings: Mapping[str, HasPlan], idle_s: float) -> None:
        """rings: this node's, by instance id, read at each call. idle_s: how long they may be idle; 0: for ever."""
        self._membership = membership
        self._rings = rings
        self._idle = IdleClock(idle_s)
        self._short = IdleClock(SHORT_IDLE_S)
        self._draining = IdleClock(DRAINING_IDLE_S)

    def wish_idle(self, instance_id: str, idle_s: float) -> bool:
        """See IdleClock.wish. False if the ring is not one of this node."""
        if instance_id in self._rings:
            self._idle.wish(instance_id, idle_s)
        return instance_id in self._rings

    def is_kept(self, instance_id: str) -> bool:
        """See IdleClock.is_kept."""
        return self._idle.is_kept(instance_id)

    def left_s(self, instance_id: str, now: float) -> float | None:
        """See IdleClock.left_s; for a ring of another node, the time that this node's setting allows."""
        return self._idle.left_s(instance_id, now)

    def due(self, now: float) -> list[str]:
        """The instances to unload now; each is returned once."""
        idle = self._idle.due(self._work(self._rings), now) if self._idle.is_on else []
        for instance_id in idle:
            _log.info("unloading %s: unused for its idle time (--idle-unload or keep_alive)", instance_id)
        short, draining = self._spare()
        due = {
            **dict.fromkeys(self._short.due(self._work(short), now), "is short of memory"),
            **dict.fromkeys(self._draining.due(self._work(draining), now), "drains"),
        }
        for instance_id, why in due.items():
            _log.info("unloading %s: one of its peers %s, and another ring serves its model", instance_id, why)
        return list(dict.fromkeys([*idle, *due]))

    def _spare(self) -> tuple[dict[str, HasPlan], dict[str, HasPlan]]:
        """The rings with a peer that is short of memory, and those with one that drains, whose model another ring
        serves without such peers."""
        instances = self._membership.view.instances()
        if not self._rings or len(instances) < 2:
            return {}, {}
        readings = self._membership.telemetry
        roomy = {
            one.plan.model
            for _, one in instances
            if one.state is InstanceState.READY
            and not short_members(one.plan, readings)
            and not draining_members(one.plan, readings)
        }
        spare = {instance_id: ring for instance_id, ring in self._rings.items() if ring.plan.model in roomy}
        return (
            {instance_id: ring for instance_id, ring in spare.items() if short_members(ring.plan, readings)},
            {instance_id: ring for instance_id, ring in spare.items() if draining_members(ring.plan, readings)},
        )

    def _work(self, rings: Mapping[str, HasPlan]) -> dict[str, tuple[int, int]]:
        """The requests at the driver of each ring and the tokens generated so far, where they are known."""
        readings, work = self._membership.telemetry if rings else {}, {}
        for instance_id, ring in rings.items():
            if (reading := readings.get(ring.plan.peer_ids[-1])) is not None:
                work[instance_id] = reading.outstanding.get(instance_id, 0), reading.tokens.get(instance_id, 0)
        return work
