"""What this node knows of every ring, whoever owns it: the records, the highest ballots, and rings without an owner."""

from __future__ import annotations

import asyncio

from exo_mesh.domain.plan import NO_BALLOT, Ballot
from exo_mesh.domain.view import InstanceInfo, RecordKey
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.members import Members

MAX_LAPSED = 256
"""Most rings without an owner that are remembered for the next placement of their model."""

LAPSED_S = 30.0
"""How long a ring without an owner is remembered; after that its stages have ended (see reservations.LEASE_S)."""


class RingHistory:
    """Remembers ballots and lapsed rings, and finds records in the view. A lapsed ring has lost its owner, or nobody
    recovered it; some of its stages may still run."""

    def __init__(self, membership: Membership, members: Members) -> None:
        self._membership = membership
        self._members = members
        self._highest: dict[str, Ballot] = {}
        self._lapsed: dict[str, tuple[InstanceInfo, float]] = {}

    def records_of(self, instance_id: str) -> list[tuple[str, InstanceInfo]]:
        """(owner, instance) of each record of an instance in the view."""
        records = self._membership.view.records_of_instances()
        return [(owner, one) for owner, one in records if one.plan.instance_id == instance_id]

    def own_record(self, instance_id: str) -> InstanceInfo | None:
        """This node's record of an instance; None if it has published none."""
        record = self._membership.view.get(RecordKey("instance", instance_id, self._membership.own.id))
        return record.value if record is not None and isinstance(record.value, InstanceInfo) else None

    def is_deleted(self, instance_id: str, ballot: Ballot) -> bool:
        """Whether somebody deleted the instance after it was placed by this ballot."""
        return self._membership.fences.covers(instance_id, ballot)

    def is_auto(self, instance_id: str) -> bool:
        """Whether the last known record of an instance says that the mesh placed it by itself."""
        lapsed, _ = self._lapsed.get(instance_id, (None, 0.0))
        known = [*(one for _, one in self.records_of(instance_id)), *([] if lapsed is None else [lapsed])]
        return bool(known) and max(known, key=lambda one: one.ballot).is_auto

    def above(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that this node knows; a new plan needs a higher one."""
        in_view = [one.ballot for _, one in self.records_of(instance_id)]
        fence, promised = self._membership.fences.ballot(instance_id), self._members.promised_here(instance_id)
        return max([self._highest.get(instance_id, NO_BALLOT), promised, fence, *in_view])

    def note(self, instance_id: str, ballot: Ballot) -> None:
        """Remember a ballot of an instance, so that the next plan gets a higher one."""
        self._highest[instance_id] = max(ballot, self._highest.get(instance_id, NO_BALLOT))

    def note_lapsed(self, instance: InstanceInfo) -> None:
        """Remember a ring that has just lost its owner; the oldest of more than MAX_LAPSED is forgotten."""
        self._lapsed[instance.plan.instance_id] = instance, asyncio.get_running_loop().time()
        while len(self._lapsed) > MAX_LAPSED:
            del self._lapsed[next(iter(self._lapsed))]

    def forget_lapsed(self, instance_id: str) -> None:
        """Forget a ring that has an owner again."""
        self._lapsed.pop(instance_id, None)

    def lapsed(self, instance_id: str) -> InstanceInfo | None:
        """The record of a lapsed ring. None after LAPSED_S, after a deletion, or if the view has a higher ballot."""
        instance, at = self._lapsed.get(instance_id, (None, 0.0))
        if instance is None or asyncio.get_running_loop().time() > at + LAPSED_S:
            return None
        if self.is_deleted(instance_id, instance.ballot):
            return None
        newer = any(one.ballot > instance.ballot for _, one in self.records_of(instance_id))
        return None if newer else instance

    def lapsed_of_model(self, model: str) -> list[str]:
        """Ids of the remembered rings of a model, also of rings that `lapsed` no longer returns."""
        return [instance_id for instance_id, (one, _) in self._lapsed.items() if one.plan.model == model]

    def lapsed_for_s(self, instance_id: str) -> float:
        """Seconds since a ring lost its owner; 0 if it has not."""
        now = asyncio.get_running_loop().time()
        return now - self._lapsed.get(instance_id, (None, now))[1]
