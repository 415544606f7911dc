"""Records which plans this node has promised a stage to, and the memory it holds for them. Pure: no clock, no
process."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, StagePlan
from exo_mesh.domain.stage import ReserveAnswer

LEASE_S = 30.0
"""Seconds after which a reservation without a commit is void, and so is a stage that no owner watches: the owner has
died or given up, and a release may have got lost. Much longer than an adoption takes."""

MAX_PROMISES = 1024
"""Promises are kept after a plan has ended, so that a late message of that plan changes nothing; the oldest are dropped
first."""


class Lease(msgspec.Struct):
    """Memory held for one stage. It ends at `expires_at` unless it is renewed: by the commit, and then as long as its
    owner watches the stage. `taken_bytes` is what its process has taken so far. adopted: the ballot by which another
    peer took the plan over from an owner that had gone. worked_at: when the stage last did something."""

    plan: Plan
    index: int
    expires_at: float
    taken_bytes: int = 0
    ready: bool = False
    committed: bool = False
    weights_bytes: int = 0
    step_bytes: int = 0
    adopted: Ballot = NO_BALLOT
    worked_at: float = float("-inf")

    @property
    def ballot(self) -> Ballot:
        """The ballot in force."""
        return max(self.plan.ballot, self.adopted)

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.index]

    @property
    def pending_bytes(self) -> int:
        return max(0, self.stage.reserve_bytes - self.taken_bytes)


class StageUse(NamedTuple):
    """What a stage does now. is_watched: whether an owner reads its reports, as far as the connection shows. is_in_use:
    whether it has computed a frame lately; an owner that is suspended does not read for a while."""

    is_watched: bool
    is_in_use: bool


class Reservations:
    """At most one lease per instance: for the highest ballot reserved.

    Two plans of one instance that share this node are put in order here: the higher ballot wins. Exception: a ready
    plan gives way only to a higher counter, that is, to a proposer that knows of it. A promise outlives its lease:
    lower ballots are refused as long as this process lives, and its stages end with the process. A ballot that was
    committed here is also refused for any other plan: its proposer has restarted, and forgotten that it used the
    ballot.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._promised: dict[str, Ballot] = {}
        self._used: dict[str, Ballot] = {}

    @property
    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(lease.stage.reserve_bytes for lease in self._leases.values())

    @property
    def pending_bytes(self) -> int:
        return sum(lease.pending_bytes for lease in self._leases.values())

    def held_bytes(self, instance_id: str) -> int:
        """The bytes that the lease of an instance holds, of any plan."""
        lease = self._leases.get(instance_id)
        return lease.stage.reserve_bytes if lease is not None else 0

    def lease(self, instance_id: str, ballot: Ballot) -> Lease | None:
        """The lease of exactly this plan, if it is in force here."""
        lease = self._leases.get(instance_id)
        return lease if lease is not None and lease.ballot == ballot else None

    def held(self, instance_id: str) -> Lease | None:
        """The lease of an instance, of any plan."""
        return self._leases.get(instance_id)

    def promised(self, instance_id: str) -> Ballot:
        return self._promised.get(instance_id, NO_BALLOT)

    def reserve(self, plan: Plan, index: int, usable_bytes: int, now: float) -> ReserveAnswer:
        """Hold memory for a stage of a plan, or refuse with the numbers. Repeating a granted reservation changes
        nothing.

        usable_bytes is what a new reservation could get, not counting what this instance itself holds.
        """
        promised = self.promised(plan.instance_id)
        held = self._leases.get(plan.instance_id)
        if held is not None and held.plan == plan and held.ballot == plan.ballot:
            return ReserveAnswer(True, usable_bytes)
        if plan.ballot < promised:
            return ReserveAnswer(
                False, usable_bytes, f"ballot {plan.ballot} is below {promised}, which is promised here", promised
            )
        if plan.ballot <= (used := self._used.get(plan.instance_id, NO_BALLOT)):
            return ReserveAnswer(False, usable_bytes, f"ballot {plan.ballot} was used here for another plan", used)
        if held is not None and held.ready and held.ballot.counter >= plan.ballot.counter:
            return ReserveAnswer(False, usable_bytes, f"the plan of ballot {held.ballot} is ready here", held.ballot)
        usable_bytes += held.stage.reserve_bytes if held is not None else 0
        need = plan.stages[index].reserve_bytes
        if need > usable_bytes:
            reason = (
                f"{plan.stages[index].shard} needs {gigabytes(need)}, but only {gigabytes(usable_bytes)} are usable"
            )
            return ReserveAnswer(False, usable_bytes, reason)
        self.promise(plan.instance_id, plan.ballot)
        self._leases[plan.instance_id] = Lease(plan, index, now + LEASE_S)
        return ReserveAnswer(True, usable_bytes)

    def adopt(self, instance_id: str, ballot: Ballot, adopted: Ballot) -> ReserveAnswer:
        """Promise the running plan of `ballot` to a new owner, whose ballot is `adopted`; the stage keeps running.

        The ballot of the old owner is fenced from then on, and so is the ballot of a slower adopter.
        """
        promised = self.promised(instance_id)
        lease = self._leases.get(instance_id)
        if lease is None or lease.plan.ballot != ballot or not lease.committed:
            return ReserveAnswer(False, 0, f"ballot {ballot} of {instance_id} does not run here", promised)
        if adopted < promised:
            return ReserveAnswer(False, 0, f"ballot {adopted} is below {promised}, which is promised here", promised)
        self.promise(instance_id, adopted)
        lease.adopted = adopted
        return ReserveAnswer(True, 0)

    def renew(self, instance_id: str, ballot: Ballot, now: float) -> Lease | None:
        """Commit a lease, or hold it for another LEASE_S; None if it is not in force (expired, released or replaced by
        a higher ballot)."""
        lease = self.lease(instance_id, ballot)
        if lease is not None:
            lease.committed, lease.expires_at = True, now + LEASE_S
            self._used[instance_id] = ballot
        return lease

    def release(self, instance_id: str, ballot: Ballot) -> Lease | None:
        """End the lease of this plan, or of a lower ballot; None if there is none. A lease of a higher ballot stays."""
        self.promise(instance_id, ballot)
        lease = self._leases.get(instance_id)
        if lease is None or lease.ballot > ballot:
            return None
        return self._leases.pop(instance_id)

    def expire(self, now: float) -> list[Lease]:
        """End and return the leases that were not renewed in time."""
        gone = [lease for lease in self.leases if lease.expires_at <= now]
        for lease in gone:
            del self._leases[lease.plan.instance_id]
        return gone

    def promise(self, instance_id: str, ballot: Ballot) -> None:
        """Refuse lower ballots from now on."""
        ballot = max(ballot, self._promised.pop(instance_id, NO_BALLOT))
        self._promised[instance_id] = ballot
        for oldest in list(self._promised):
            if len(self._promised) <= MAX_PROMISES:
                break
            if oldest not in self._leases:
                del self._promised[oldest]
                self._used.pop(oldest, None)
