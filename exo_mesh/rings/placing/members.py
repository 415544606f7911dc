"""Finds the peers of a plan as its owner calls them, and knows what runs on this node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.mesh.membership.calls import reaches
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.calls import reachable
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.placing.calls import Member

LOOK_EVERY_S = 0.1
"""Seconds between checks whether the peers that are still to release their stages answer this node."""

_log = logging.getLogger(__name__)


class Members:
    """Finds the member for a peer id, and knows what runs on this node. Owners reach stages only through this class."""

    def __init__(self, host: StageHost, membership: Membership) -> None:
        self._host = host
        self._membership = membership
        self._tasks = TaskOwner()

    async def close(self) -> None:
        """End the releases that are still under way; see `release`."""
        await self._tasks.close()

    @property
    def own_id(self) -> str:
        return self._membership.own.id

    def runs_here(self, plan: Plan) -> bool:
        """Whether this node holds a lease for exactly this plan."""
        return any(lease.plan == plan for lease in self._host.leases)

    def leased_here(self) -> list[tuple[str, Ballot]]:
        """(instance id, ballot in force) of the stages that run here, and of the stages with reserved memory."""
        return [(lease.plan.instance_id, lease.ballot) for lease in self._host.leases] + list(self._host.stages())

    def stages_here(self) -> dict[tuple[str, Ballot], bool]:
        """The stages that run here, by (instance id, ballot in force), and whether each is in use or its owner follows
        its reports. The reports of an owner that is gone may seem to be read for half a minute, so it must be alive."""
        return {
            (name, ballot): use.is_in_use or (use.is_watched and self.is_alive(ballot.proposer))
            for (name, ballot), use in self._host.stages().items()
        }

    def is_idle_here(self, instance_id: str) -> bool | None:
        """Whether the stage here, or rank of it, sees no request on its ring; None if none runs here."""
        if instance_id not in self._host.runners:
            return None
        beat = self._host.beat(instance_id)
        return beat is not None and beat.is_idle

    def promised_here(self, instance_id: str) -> Ballot:
        """See StageHost.promised."""
        return self._host.promised(instance_id)

    async def release_here(self, instance_id: str, ballot: Ballot, beaten_by: Ballot = NO_BALLOT) -> None:
        """See StageHost.release."""
        await self._host.release(instance_id, ballot, beaten_by)

    async def release(self, instance_id: str, ballot: Ballot, peer_ids: Iterable[str]) -> None:
        """End the stages of an instance up to this ballot at several peers.

        Returns when each peer has answered or failed. A peer that does not answer this node's probes is not waited for,
        because a call may take until its deadline there: it is called in the background, and its stage ends by itself
        once no owner follows it.
        """
        calls = {
            self._tasks.start(self._release_at(peer_id, instance_id, ballot), f"release {instance_id}"): peer_id
            for peer_id in peer_ids
        }
        waiting = set(calls)
        while waiting and not all(self.unanswered_s(calls[call]) for call in waiting):
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_EVERY_S)

    async def _release_at(self, peer_id: str, instance_id: str, ballot: Ballot) -> None:
        try:
            await self.member(peer_id).release(instance_id, ballot)
        except MeshError as exc:
            _log.info("cannot release %s at peer %s: %s", instance_id, peer_id[:8], exc)

    def has_other_owner(self, plan: Plan, ballot: Ballot) -> bool:
        """Whether the view shows a ready ring of this plan with another owner and a higher ballot."""
        return any(
            one.plan == plan and one.state is InstanceState.READY and one.ballot > ballot and owner != self.own_id
            for owner, one in self._membership.view.records_of_instances()
        )

    def records_of(self, instance_id: str) -> list[InstanceInfo]:
        """What the view shows of an instance: several records while its ownership is being settled."""
        records = self._membership.view.records_of_instances()
        return [one for _, one in records if one.plan.instance_id == instance_id]

    def name_of(self, peer_id: str) -> str:
        """The name of a peer; the first digits of its id once it is gone."""
        peer = self._membership.peer(peer_id)
        if peer is not None:
            return peer.info.name
        return self._membership.own.name if peer_id == self.own_id else peer_id[:8]

    def newer_plan(self, plan: Plan) -> Plan | None:
        """The newest plan of the same instance, with a higher ballot, that the view shows as loading or ready; or
        None."""
        newer = [
            one.plan
            for _, one in self._membership.view.records_of_instances()
            if one.plan.instance_id == plan.instance_id
            and one.plan.ballot > plan.ballot
            and one.state is not InstanceState.FAILED
        ]
        return max(newer, key=lambda one: one.ballot, default=None)

    def addresses(self, endpoint: str, peer_id: str) -> list[str]:
        """ "host:port" of every address at which this node may reach the data port of a peer's runner, best first."""
        peer = self._membership.peer(peer_id)
        if peer is None:
            return [reachable(self._membership, endpoint, peer_id)]
        return [f"{host}:{endpoint.rpartition(':')[2]}" for host in peer.hosts]

    async def connects(self, address: str, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts a connection at "host:port"."""
        client = self._membership.client_at(address)
        try:
            return await client.connects(timeout_s)
        finally:
            await client.close()

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        """Whether the machine refuses connections at "host:port", so that no process listens there."""
        client = self._membership.client_at(address)
        try:
            return await client.is_refused(timeout_s)
        finally:
            await client.close()

    def is_alive(self, peer_id: str) -> bool:
        return self._membership.is_alive(peer_id)

    def unanswered_s(self, peer_id: str) -> float:
        """See Membership.unanswered_s."""
        return self._membership.unanswered_s(peer_id)

    def is_out_of_reach(self, peer_id: str) -> bool:
        """See Membership.is_out_of_reach."""
        return self._membership.is_out_of_reach(peer_id)

    async def reaches(self, from_id: str, to_id: str) -> bool:
        """Whether one node gets an answer from another now. True if that cannot be determined."""
        peer = self._membership.peer(to_id)
        if peer is None and to_id != self.own_id:
            return True
        incarnation = (self._membership.own if peer is None else peer.info).incarnation
        try:
            return await reaches(self._membership.calls, from_id, to_id, incarnation)
        except MeshError:
            return True

    async def try_other_ways(self, peer_id: str) -> None:
        """After a call to this peer failed: call it at another of its addresses from now on, if it answers there."""
        peer = self._membership.peer(peer_id)
        if peer is not None:
            await peer.try_next_address()

    def member(self, peer_id: str) -> Member:
        """Raises TransportError if the peer is not alive."""
        if not self.is_alive(peer_id):
            raise TransportError(f"peer {peer_id[:8]} is gone")
        return Member(self._membership, peer_id)
