"""Knows on which rings the requests of living peers run, and for which rings they wait."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from exo_mesh.domain.device import EntryRequests
from exo_mesh.domain.view import InstanceInfo
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.members import Members

TAKE_OVER_S = 2.0
"""After this time, an unused ring is taken over from a dead owner without its dead members, even if one of their
runners still answers. Until then a false death verdict is often refuted."""


class RingUse:
    """The use of rings by the clients of this node, and by other living peers' clients as last reported.

    A report may be a second old. A request that it misses continues under the new plan after a pause. own_requests:
    returns the number of running requests of clients of this node by instance; None: unknown.
    """

    def __init__(
        self,
        membership: Membership,
        members: Members,
        own_requests: Callable[[], Mapping[str, int] | None],
    ) -> None:
        self._own_requests = own_requests
        self._membership = membership
        self._members = members
        self._awaited: Counter[str] = Counter()
        self._noticed: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def awaits(self, instance_id: str) -> Iterator[None]:
        """While a request here waits for a ring whose owner is dead."""
        self._awaited[instance_id] += 1
        self._membership.changed.beat()
        try:
            yield
        finally:
            self._awaited[instance_id] -= 1
            self._awaited += Counter()  # drops what is 0

    def own_report(self) -> EntryRequests | None:
        """The requests of this node's clients; None if they are unknown."""
        running = self._own_requests()
        return None if running is None else EntryRequests(dict(running), frozenset(self._awaited))

    def is_idle(self, instance: InstanceInfo, dead_s: float) -> bool:
        """Whether no request of a living peer uses a ring, whose owner has been dead for TAKE_OVER_S or for whose
        recovery a request waits. dead_s: how long the owner has been dead.

        Then continuing without the dead members loses nothing. New requests could not use the ring, because no live
        peer publishes it.
        """
        instance_id = instance.plan.instance_id
        reports = self._reports()
        known = [report for report in reports if report is not None]
        is_awaited = instance_id in self._awaited or any(instance_id in report.awaited for report in known)
        if not is_awaited and dead_s < TAKE_OVER_S:
            return False
        if len(known) == len(reports):
            return not any(report.running.get(instance_id, 0) for report in known)
        return not self._members.stages_here().get((instance_id, instance.ballot), False)

    def is_calm(self, instance_id: str) -> bool:
        """Whether no request uses or awaits a ring, by the stage here, if there is one, and by what this node and the
        other living peers last reported. False if some peer has reported nothing."""
        if self._members.is_idle_here(instance_id) is False:
            return False
        readings = self._membership.last_telemetry
        peers = [readings.get(peer.id) for peer in self._membership.peers]
        reports = [self.own_report(), *(None if one is None else one.entry_requests for one in peers)]
        is_driving = any(one is not None and one.outstanding.get(instance_id, 0) for one in peers)
        return not is_driving and all(
            report is not None and not report.running.get(instance_id, 0) and instance_id not in report.awaited
            for report in reports
        )

    def notice_awaited(self) -> bool:
        """Returns whether a request of a peer waits for a ring for which none waited at the last call."""
        awaited = frozenset[str]().union(*(report.awaited for report in self._reports() if report is not None))
        is_new, self._noticed = not awaited <= self._noticed, awaited
        return is_new

    def _reports(self) -> list[EntryRequests | None]:
        """Of this node and of each living peer. The runners may still compute an answer for a client of the dead owner,
        so whether they work says less."""
        readings = self._membership.telemetry
        peers = [readings.get(peer.id) for peer in self._membership.peers]
        return [self.own_report(), *(None if one is None else one.entry_requests for one in peers)]
