"""Wires the ranks of tensor groups, and remembers which sets of peers failed to form one.

No peer logs in to another: each peer answers a reservation with an address and a free port of its own, the owner of the
plan collects them, and each node starts its own rank with the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.domain.group_placement import FAILED
from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup

MAX_FAILURES = 2
"""How often a set of peers may fail to form a group before its members become pipeline stages."""

FORGET_S = 600.0
"""After this time, a set of peers that failed may be tried again: a cable may have been changed."""

MAX_SETS = 64
"""Most sets of peers that are remembered; the oldest are dropped first."""


def wirings(plan: Plan, collectives: Mapping[Seat, str]) -> dict[Seat, RankWiring]:
    """The wiring of each rank, from the endpoint at which each rank would listen."""
    found = {}
    for seat in plan.seats:
        group = plan.stages[seat.stage].group
        if group is not None:
            endpoints = tuple(collectives[Seat(seat.stage, rank, peer)] for rank, peer in enumerate(group.peers))
            found[seat] = RankWiring(group.backend, seat.rank, endpoints, group.rdma)
    return found


class _Trouble(msgspec.Struct):
    """A reason against a group. failures: 0 for a group that works but is faster as something else."""

    failures: int
    reason: str
    at: float


class GroupTroubles:
    """Remembers sets of peers that failed as a tensor group, or are faster without one."""

    def __init__(self) -> None:
        self._troubles: dict[frozenset[str], _Trouble] = {}

    def note(self, group: TensorGroup, reason: str, now: float) -> int:
        """Record that the group failed to form. Returns the number of failures of these peers within FORGET_S, at most
        MAX_FAILURES."""
        peers = frozenset(group.peers)
        before = self._troubles.pop(peers, None)
        failures = 1 + (before.failures if before is not None and now - before.at < FORGET_S else 0)
        failures = min(failures, MAX_FAILURES)
        self._troubles[peers] = _Trouble(failures, f"they {FAILED} {counted(failures, 'time')}, lastly: {reason}", now)
        while len(self._troubles) > MAX_SETS:
            del self._troubles[next(iter(self._troubles))]
        return failures

    def refuse(self, group: TensorGroup, reason: str, now: float) -> None:
        """Record that the group works but that its peers are faster as something else."""
        self._troubles.pop(frozenset(group.peers), None)
        self._troubles[frozenset(group.peers)] = _Trouble(0, reason, now)

    def forget(self, group: TensorGroup) -> None:
        """Forget the group's failures, because it has formed."""
        self._troubles.pop(frozenset(group.peers), None)

    def unfit(self, now: float) -> dict[frozenset[str], str]:
        """The sets of peers that must not form a group for now, with the reasons."""
        return {
            peers: trouble.reason
            for peers, trouble in self._troubles.items()
            if trouble.failures in (0, MAX_FAILURES) and now - trouble.at < FORGET_S
        }

    def failed(self, now: float) -> set[frozenset[str]]:
        """The sets of peers that cannot form a group even if a spec requests it."""
        return {peers for peers in self.unfit(now) if self._troubles[peers].failures}
