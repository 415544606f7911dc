"""Remembers which rings failed a request on this node, so that new requests avoid them for a while."""

from __future__ import annotations

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.view import InstanceInfo

DISTRUST_S = 60.0
"""The failure may have been in the path to the ring, which often recovers, so the ring gets another chance after this
time. A ring that is really lost has ended long before: its owner detects the loss within seconds."""


class Distrust:
    """Keeps, by instance id, the highest ballot that failed a request here, until DISTRUST_S after the last failure."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[Ballot, float]] = {}

    def note(self, instance: InstanceInfo, now: float) -> None:
        """Record that the instance failed a request at time `now`."""
        self._forget(now)
        instance_id = instance.plan.instance_id
        known = self._failed.get(instance_id)
        ballot = instance.ballot if known is None else max(instance.ballot, known[0])
        self._failed[instance_id] = (ballot, now + DISTRUST_S)

    def includes(self, instance: InstanceInfo, now: float) -> bool:
        """Whether the instance failed a request within the last DISTRUST_S by its current ballot or a higher one. An
        instance with a higher ballot has a new owner since then, and that owner has reached all its stages."""
        self._forget(now)
        known = self._failed.get(instance.plan.instance_id)
        return known is not None and instance.ballot <= known[0]

    def _forget(self, now: float) -> None:
        for instance_id in [name for name, (_, until) in self._failed.items() if until <= now]:
            del self._failed[instance_id]
