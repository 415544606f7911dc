"""The peers of a plan as its owner calls them: this node directly, another node over the control plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan
from exo_mesh.domain.stage import ReserveAnswer, StageStatus
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.domain.view import InstanceState
from exo_mesh.errors import FetchError, MeshError, ModelError, ReservationError, TransportError
from exo_mesh.mesh.membership.port import PeerClient
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.wire.control_codec import status_from_proto
from exo_mesh.wire.plan_codec import ballot_from_proto, ballot_to_proto, plan_to_proto, rank_to_proto
from exo_mesh.wire.proto import control_pb2 as pb

REACH_S = 2.0
"""How long a peer may take to report whether it reaches another peer; its own probe takes less than a second."""

LOOK_EVERY_S = 0.1
"""Seconds between checks whether the peers that are still to release their stages answer this node."""

_log = logging.getLogger(__name__)

RankEndpoints = Sequence[tuple[str, str]]
"""(endpoint as its peer reports it, peer id) of ranks 1 to N-1 of a tensor group."""


class Member(Protocol):
    """What an owner calls on a stage's peer. TransportError and DeadlineError mean that the peer cannot be reached
    now."""

    async def reserve(self, plan: Plan, index: int) -> ReserveAnswer:
        """See StageHost.reserve. Raises ReservationError if the stage can never run there."""

    async def adopt(self, plan: Plan, index: int, adopted: Ballot) -> ReserveAnswer:
        """See StageHost.adopt."""

    def commit(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None = None,
        wiring: RankWiring | None = None,
        *,
        quiet: bool = False,
    ) -> AsyncIterator[pb.StageStatus]:
        """See StageHost.commit, and PeerClient.commit for quiet."""

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: RankEndpoints = ()
    ) -> None:
        """Connect the stage to the next one. `endpoint` is as next_peer reports it; the member replaces the host by the
        address at which it reaches next_peer. It does the same for `ranks`, the other ranks, if it leads a tensor
        group."""

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        """See StageHost.look."""

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        """See StageHost.status."""

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        """See StageHost.release."""


def reachable(membership: Membership, endpoint: str, peer_id: str) -> str:
    """`endpoint` of a peer's runner, with the host by which this node reaches that peer.

    A peer may have several addresses and its runner binds to all of them, so only the port is equal for every caller.
    """
    host, _, port = endpoint.rpartition(":")
    peer = membership.peer(peer_id)
    if peer is not None:
        return f"{peer.host}:{port}"
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::", "[::]") else endpoint


class LocalMember:
    """This node as a member: calls its stage host directly."""

    def __init__(self, host: StageHost, membership: Membership) -> None:
        self._host = host
        self._membership = membership

    async def reserve(self, plan: Plan, index: int) -> ReserveAnswer:
        return await self._host.reserve(plan, index)

    async def adopt(self, plan: Plan, index: int, adopted: Ballot) -> ReserveAnswer:
        return await self._host.adopt(plan.instance_id, plan.ballot, adopted)

    def commit(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None = None,
        wiring: RankWiring | None = None,
        *,
        quiet: bool = False,
    ) -> AsyncIterator[pb.StageStatus]:
        return self._host.commit(instance_id, ballot, keep_kv_from, wiring)

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: RankEndpoints = ()
    ) -> None:
        dialled = [reachable(self._membership, there, peer_id) for there, peer_id in ranks]
        await self._host.link(instance_id, ballot, reachable(self._membership, endpoint, next_peer), next_peer, dialled)

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        return await self._host.look(instance_id, ballot)

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        return await self._host.status(instance_id, shows_hop)

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        await self._host.release(instance_id, ballot)


class RemoteMember:
    """Another node as a member: calls it over the control plane."""

    def __init__(self, client: PeerClient, peer_id: str, knows: Callable[[str], bool] = lambda model: True) -> None:
        """knows: see PeerInfo.knows."""
        self._client = client
        self._peer_id = peer_id
        self._knows = knows

    async def reserve(self, plan: Plan, index: int) -> ReserveAnswer:
        if not self._knows(plan.model):  # copying a tokenizer exceeds the reservation's deadline
            try:
                await self._client.introduce(plan.model, plan.model_digest)
            except (FetchError, ModelError) as exc:
                raise ReservationError(str(exc), peer_id=self._peer_id) from exc
        return await self._ask(pb.ReserveRequest(plan=plan_to_proto(plan), stage=index))

    async def adopt(self, plan: Plan, index: int, adopted: Ballot) -> ReserveAnswer:
        request = pb.ReserveRequest(plan=plan_to_proto(plan), stage=index, adopt=ballot_to_proto(adopted))
        return await self._ask(request)

    async def _ask(self, request: pb.ReserveRequest) -> ReserveAnswer:
        reply = await self._client.reserve(request)
        if reply.never:
            raise ReservationError(reply.reason, peer_id=self._peer_id, why=reply.never_code)
        beaten_by = ballot_from_proto(reply.beaten_by) if reply.HasField("beaten_by") else None
        return ReserveAnswer(reply.granted, reply.usable_bytes, reply.reason, beaten_by, collective=reply.collective)

    def commit(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None = None,
        wiring: RankWiring | None = None,
        *,
        quiet: bool = False,
    ) -> AsyncIterator[pb.StageStatus]:
        request = pb.CommitRequest(
            instance_id=instance_id,
            ballot=ballot_to_proto(ballot),
            keep_kv_from=keep_kv_from,
            rank=None if wiring is None else rank_to_proto(wiring),
        )
        return self._client.commit(request, quiet=quiet)

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: RankEndpoints = ()
    ) -> None:
        request = pb.LinkRequest(
            instance_id=instance_id,
            ballot=ballot_to_proto(ballot),
            next_endpoint=endpoint,
            next_peer=next_peer,
            ranks=[pb.RankEndpoint(endpoint=there, peer=peer_id) for there, peer_id in ranks],
        )
        await self._client.link(request)

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        request = pb.LookAtStageRequest(instance_id=instance_id, ballot=ballot_to_proto(ballot))
        reply = await self._client.look_at_stage(request)
        return "" if reply.runs else reply.reason or "its stage does not run"

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        # NO_BALLOT is the ballot of no plan: the answer describes what runs there, for any plan.
        nothing = ballot_to_proto(NO_BALLOT)
        request = pb.LookAtStageRequest(instance_id=instance_id, ballot=nothing, shows_hop=shows_hop)
        return status_from_proto(await self._client.look_at_stage(request))

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        await self._client.release(pb.ReleaseRequest(instance_id=instance_id, ballot=ballot_to_proto(ballot)))


class Members:
    """Finds the member for a peer id, and knows what runs on this node. Owners reach stages only through this class."""

    def __init__(self, host: StageHost, membership: Membership) -> None:
        self._host = host
        self._local = LocalMember(host, membership)
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
        peer, target = self._membership.peer(from_id), self._membership.peer(to_id)
        if target is None and to_id != self.own_id:
            return True
        incarnation = (self._membership.own if target is None else target.info).incarnation
        request = pb.IndirectProbeRequest(from_peer=self.own_id, target=to_id, incarnation=incarnation)
        try:
            if from_id == self.own_id:
                return (await self._membership.answer_indirect_probe(request)).reached
            return peer is None or (await peer.client.indirect_probe(request, REACH_S)).reached
        except MeshError:
            return True

    async def try_other_ways(self, peer_id: str) -> None:
        """After a call to this peer failed: call it at another of its addresses from now on, if it answers there."""
        peer = self._membership.peer(peer_id)
        if peer is not None:
            await peer.try_next_address()

    def member(self, peer_id: str) -> Member:
        """Raises TransportError if the peer is not alive."""
        if peer_id == self._membership.own.id:
            return self._local
        peer = self._membership.peer(peer_id)
        if peer is None:
            raise TransportError(f"peer {peer_id[:8]} is gone")
        return RemoteMember(peer.client, peer_id, peer.info.knows)
