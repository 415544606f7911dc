"""What the stages of this node know of the mesh around them."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.plan import Ballot
from exo_mesh.mesh.membership.service import Membership


class StageSurroundings:
    """Answers the questions of stages about peers, and takes the news that one is used."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    @property
    def own_id(self) -> str:
        return self._membership.own.id

    def engines(self) -> tuple[str, ...]:
        """The engines whose stages may come to this node: that of its device, and those of the mesh's plans that run
        models here."""
        own = self._membership.own
        run_here = {engine for _, engines in own.model_engines for engine in engines}
        plans = [instance.plan for _, instance in self._membership.view.instances() if not instance.plan.takes_text]
        used = [engine for plan in plans for engine in plan.engines if engine in run_here]
        return tuple(dict.fromkeys([*(device.engine for device in own.devices[:1]), *used]))

    def hosts_of(self, peer_id: str) -> Sequence[str]:
        """Where this node may reach a peer, best first; empty if unknown."""
        peer = self._membership.peer(peer_id)
        return peer.hosts if peer is not None else []

    def name_of(self, peer_id: str) -> str:
        """The name of a peer, or the beginning of its id if it is unknown."""
        peer = self._membership.peer(peer_id)
        return peer.info.name if peer is not None else peer_id[:8]

    def is_out_of_reach(self, peer_id: str) -> bool:
        """Whether a peer that others reach has not answered this node for long."""
        return self._membership.is_out_of_reach(peer_id)

    def is_silent(self, peer_id: str) -> bool:
        """Whether a peer has not answered the last probe, or is gone."""
        return not self._membership.is_alive(peer_id) or self._membership.unanswered_s(peer_id) > 0

    def fence_of(self, instance_id: str) -> Ballot:
        """The highest ballot of an instance that is void because the instance was deleted."""
        return self._membership.fences.ballot(instance_id)

    def used(self) -> None:
        """A stage here is used whose ring was idle: its peers are probed more often."""
        self._membership.check_partners()
