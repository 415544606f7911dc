"""The calls of an owner to the peers of its instances, as values; and the rows and answers of calls about instances."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, ReserveAnswer, StageStatus
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import FetchError, InputError, ModelError, ReservationError
from exo_mesh.mesh.membership.fences import Fence
from exo_mesh.mesh.membership.messages import fence_from_proto, fence_to_proto
from exo_mesh.mesh.membership.port import Calls
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import introduce
from exo_mesh.rings.hosting.calls import COMMIT, LINK, LOOK_AT_STAGE, RELEASE, RESERVE
from exo_mesh.wire.call_access import PEER
from exo_mesh.wire.control_codec import status_from_proto
from exo_mesh.wire.peer_call import CALL_S, AnyAnswer, PeerCall, answer
from exo_mesh.wire.plan_codec import ballot_from_proto, ballot_to_proto, plan_to_proto, rank_to_proto
from exo_mesh.wire.proto import control_pb2 as pb

DELETE_INSTANCE = PeerCall(
    "DeleteInstance", pb.DeleteInstanceRequest, pb.DeleteInstanceReply, PEER, deadline_s=2 * CALL_S
)
KEEP_INSTANCE = PeerCall("KeepInstance", pb.KeepInstanceRequest, pb.KeepInstanceReply, PEER, deadline_s=CALL_S)

RankEndpoints = Sequence[tuple[str, str]]
"""(endpoint as its peer reports it, peer id) of ranks 1 to N-1 of a tensor group."""


def answers(
    membership: Membership,
    delete_own: Callable[[str, bool], Awaitable[bool]],
    wish_idle: Callable[[str, float], bool],
) -> list[AnyAnswer]:
    """This node's answers. delete_own: see Instances. wish_idle: see UnusedRings."""
    return [
        answer(DELETE_INSTANCE, partial(_delete_instance, membership, delete_own)),
        answer(KEEP_INSTANCE, partial(_keep_instance, wish_idle)),
    ]


async def _delete_instance(
    membership: Membership, delete_own: Callable[[str, bool], Awaitable[bool]], request: pb.DeleteInstanceRequest
) -> pb.DeleteInstanceReply:
    if request.HasField("fence"):
        membership.take_fence(fence_from_proto(request.fence))
    return pb.DeleteInstanceReply(found=await delete_own(request.instance_id, request.replaced))


async def _keep_instance(
    wish_idle: Callable[[str, float], bool], request: pb.KeepInstanceRequest
) -> pb.KeepInstanceReply:
    if math.isnan(request.idle_s):
        raise InputError("idle_s must be a number, not NaN")
    return pb.KeepInstanceReply(found=wish_idle(request.instance_id, request.idle_s))


async def delete_instance(calls: Calls, peer_id: str, fence: Fence, *, is_replaced: bool = False) -> None:
    """Send a peer a deletion; it ends the instance if it owns it. is_replaced: see Instances.delete."""
    proto = fence_to_proto(fence)
    request = pb.DeleteInstanceRequest(instance_id=fence.instance_id, fence=proto, replaced=is_replaced)
    await calls.call(peer_id, DELETE_INSTANCE, request)


async def keep_instance(calls: Calls, peer_id: str, instance_id: str, idle_s: float) -> None:
    """Set how long an instance that the peer owns may be idle; negative: for ever."""
    await calls.call(peer_id, KEEP_INSTANCE, pb.KeepInstanceRequest(instance_id=instance_id, idle_s=idle_s))


class Member:
    """A peer of a plan as the owner of the plan calls it: this node or another one. TransportError and DeadlineError
    mean that the peer cannot be reached now."""

    def __init__(self, membership: Membership, peer_id: str) -> None:
        self._membership = membership
        self._calls = membership.calls
        self._id = peer_id

    async def reserve(self, plan: Plan, index: int) -> ReserveAnswer:
        """See StageHost.reserve. Raises ReservationError if the stage can never run there."""
        peer = self._membership.peer(self._id)
        if peer is not None and not peer.info.knows(plan.model):  # copying a tokenizer exceeds the deadline of RESERVE
            try:
                await introduce(self._calls, self._id, plan.model, plan.model_digest)
            except (FetchError, ModelError) as exc:
                raise ReservationError(str(exc), peer_id=self._id) from exc
        return await self._ask(pb.ReserveRequest(plan=plan_to_proto(plan), stage=index))

    async def adopt(self, plan: Plan, index: int, adopted: Ballot) -> ReserveAnswer:
        """See StageHost.adopt."""
        request = pb.ReserveRequest(plan=plan_to_proto(plan), stage=index, adopt=ballot_to_proto(adopted))
        return await self._ask(request)

    async def _ask(self, request: pb.ReserveRequest) -> ReserveAnswer:
        reply = await self._calls.call(self._id, RESERVE, request)
        if reply.never:
            raise ReservationError(reply.reason, peer_id=self._id, why=reply.never_code)
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
        """See StageHost.commit, and ControlPort.stream for quiet."""
        request = pb.CommitRequest(
            instance_id=instance_id,
            ballot=ballot_to_proto(ballot),
            keep_kv_from=keep_kv_from,
            rank=None if wiring is None else rank_to_proto(wiring),
        )
        return self._calls.stream(self._id, COMMIT, request, quiet=quiet)

    async def link(
        self, instance_id: str, ballot: Ballot, endpoint: str, next_peer: str, ranks: RankEndpoints = ()
    ) -> None:
        """Connect the stage to the next one. `endpoint` is as next_peer reports it; the member replaces the host by the
        address at which it reaches next_peer. It does the same for `ranks`, the other ranks, if it leads a tensor
        group."""
        request = pb.LinkRequest(
            instance_id=instance_id,
            ballot=ballot_to_proto(ballot),
            next_endpoint=endpoint,
            next_peer=next_peer,
            ranks=[pb.RankEndpoint(endpoint=there, peer=peer_id) for there, peer_id in ranks],
        )
        await self._calls.call(self._id, LINK, request)

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        """See StageHost.look."""
        request = pb.LookAtStageRequest(instance_id=instance_id, ballot=ballot_to_proto(ballot))
        reply = await self._calls.call(self._id, LOOK_AT_STAGE, request)
        return "" if reply.runs else reply.reason or "its stage does not run"

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        """See StageHost.status."""
        # NO_BALLOT is the ballot of no plan: the answer describes what runs there, for any plan.
        nothing = ballot_to_proto(NO_BALLOT)
        request = pb.LookAtStageRequest(instance_id=instance_id, ballot=nothing, shows_hop=shows_hop)
        return status_from_proto(await self._calls.call(self._id, LOOK_AT_STAGE, request))

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        """See StageHost.release."""
        await self._calls.call(
            self._id, RELEASE, pb.ReleaseRequest(instance_id=instance_id, ballot=ballot_to_proto(ballot))
        )
