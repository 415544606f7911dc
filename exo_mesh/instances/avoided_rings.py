"""Remembers which rings failed a request on this node, so that new requests avoid them for a while."""

from __future__ import annotations

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.view import InstanceInfo

DISTRUST_S = 60.0
"""What failed a request may have been the way to the ring, and that gets mended. A ring that is really lost has ended
long before: its owner knows within some seconds."""


class Distrust:
    """Of each instance the highest ballot that failed, until DISTRUST_S after the last failure."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[Ballot, float]] = {}

    def note(self, instance: InstanceInfo, now: float) -> None:
        """It has failed a request now."""
        self._forget(now)
        instance_id = instance.plan.instance_id
        known = self._failed.get(instance_id)
        ballot = instance.ballot if known is None else max(instance.ballot, known[0])
        self._failed[instance_id] = (ballot, now + DISTRUST_S)

    def includes(self, instance: InstanceInfo, now: float) -> bool:
        """Has it failed of late, by this ballot or a higher one? By a higher ballot it has had a new owner since, who
        has reached all its stages."""
        self._forget(now)
        known = self._failed.get(instance.plan.instance_id)
        return known is not None and instance.ballot <= known[0]

    def _forget(self, now: float) -> None:
        for instance_id in [name for name, (_, until) in self._failed.items() if until <= now]:
            del self._failed[instance_id]
