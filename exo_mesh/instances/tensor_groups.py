"""Forming tensor groups: the wiring of all ranks of a plan, and which sets of peers have failed to be a group.

No peer logs in to another: each answers a reservation with an address and a free port of its own, the owner of the plan
puts them together, and each node starts its own rank with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exo_mesh.domain.group_placement import FAILED
from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup

MAX_FAILURES = 2
"""So often a set of peers may fail to become a group; then its members are pipeline stages."""

FORGET_S = 600.0
"""After this a set of peers that failed may be tried again: somebody may have changed the cable."""

MAX_SETS = 64
"""Sets of peers remembered; the oldest go first."""


def wirings(plan: Plan, collectives: Mapping[Seat, str]) -> dict[Seat, RankWiring]:
    """What each rank must know, from where each said it would listen."""
    found = {}
    for seat in plan.seats:
        group = plan.stages[seat.stage].group
        if group is not None:
            endpoints = tuple(collectives[Seat(seat.stage, rank, peer)] for rank, peer in enumerate(group.peers))
            found[seat] = RankWiring(group.backend, seat.rank, endpoints, group.rdma)
    return found


@dataclass(slots=True)
class _Trouble:
    """failures: 0 for a group that works, and is better off as something else."""

    failures: int
    reason: str
    at: float


class GroupTroubles:
    """Sets of peers that were to be a tensor group, and failed."""

    def __init__(self) -> None:
        self._troubles: dict[frozenset[str], _Trouble] = {}

    def note(self, group: TensorGroup, reason: str, now: float) -> int:
        """The group did not come to be; answers how often that has happened to these peers lately."""
        peers = frozenset(group.peers)
        before = self._troubles.pop(peers, None)
        failures = 1 + (before.failures if before is not None and now - before.at < FORGET_S else 0)
        failures = min(failures, MAX_FAILURES)
        self._troubles[peers] = _Trouble(failures, f"they {FAILED} {failures} times, lastly: {reason}", now)
        while len(self._troubles) > MAX_SETS:
            del self._troubles[next(iter(self._troubles))]
        return failures

    def refuse(self, group: TensorGroup, reason: str, now: float) -> None:
        """It works, and is better off as something else."""
        self._troubles.pop(frozenset(group.peers), None)
        self._troubles[frozenset(group.peers)] = _Trouble(0, reason, now)

    def forget(self, group: TensorGroup) -> None:
        """It has come to be."""
        self._troubles.pop(frozenset(group.peers), None)

    def unfit(self, now: float) -> dict[frozenset[str], str]:
        """The sets of peers that are to be no group for now, and why."""
        return {
            peers: trouble.reason
            for peers, trouble in self._troubles.items()
            if trouble.failures in (0, MAX_FAILURES) and now - trouble.at < FORGET_S
        }

    def failed(self, now: float) -> set[frozenset[str]]:
        """Those among them that cannot be one, whoever insists."""
        return {peers for peers in self.unfit(now) if self._troubles[peers].failures}
