"""The calls about stages and about the node that hosts them: one row each, and this node's answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec

from exo_mesh.base.telemetry.log_ring import MAX_RECORDS, RECENT
from exo_mesh.domain.stage import (
    StageFailed,
    StageFetching,
    StageHopLost,
    StageListening,
    StageLoading,
    StageReady,
    StageUpdate,
)
from exo_mesh.errors import InputError, ReservationError
from exo_mesh.mesh.membership.port import Calls, require_own
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.wire.call_access import ANYBODY, PEER, owner
from exo_mesh.wire.control_codec import status_to_proto
from exo_mesh.wire.message_codec import UnionCodec
from exo_mesh.wire.peer_call import CALL_S, LOOK_S, AnyAnswer, PeerCall, PeerStream, StreamAnswer, answer
from exo_mesh.wire.plan_codec import ballot_from_proto, ballot_to_proto, plan_from_proto, rank_from_proto
from exo_mesh.wire.proto import control_pb2 as pb

_log = logging.getLogger(__name__)

RESERVE = PeerCall("Reserve", pb.ReserveRequest, pb.ReserveReply, ANYBODY, deadline_s=CALL_S)
# Outlives a verdict: the membership must not end a ring with healthy streams.
COMMIT = PeerStream("Commit", pb.CommitRequest, pb.StageStatus, ANYBODY, deadline_s=None, outlives_verdict=True)
LINK = PeerCall("Link", pb.LinkRequest, pb.LinkReply, ANYBODY, deadline_s=CALL_S)
LOOK_AT_STAGE = PeerCall("LookAtStage", pb.LookAtStageRequest, pb.LookAtStageReply, ANYBODY, deadline_s=LOOK_S)
# A stage may need 4 s to stop.
RELEASE = PeerCall("Release", pb.ReleaseRequest, pb.ReleaseReply, PEER, deadline_s=2 * CALL_S)
DRAIN = PeerCall(
    "Drain", pb.DrainRequest, pb.DrainReply, owner("exo-mesh drain` or `exo-mesh drain --undo"), deadline_s=CALL_S
)
READ_LOG = PeerCall(
    "ReadLog",
    pb.ReadLogRequest,
    pb.ReadLogReply,
    owner('curl -H "Authorization: Bearer $(exo-mesh key local)" http://127.0.0.1:52415/admin/log'),
    deadline_s=CALL_S,
)

STAGE_UPDATE: UnionCodec[StageUpdate, pb.StageStatus] = UnionCodec(
    pb.StageStatus,
    listening=StageListening,
    loading=StageLoading,
    ready=StageReady,
    failed=StageFailed,
    hop_lost=StageHopLost,
    fetching=StageFetching,
)


def answers(host: StageHost, membership: Membership) -> list[AnyAnswer]:
    """This node's answers to these calls."""
    return [
        answer(RESERVE, partial(_reserve, host)),
        StreamAnswer(COMMIT, partial(_commit, host)),
        answer(LINK, partial(_link, host, membership)),
        answer(LOOK_AT_STAGE, partial(_look_at_stage, host)),
        answer(RELEASE, partial(_release, host)),
        answer(DRAIN, partial(_drain, host, membership)),
        answer(READ_LOG, _read_log),
    ]


async def _reserve(host: StageHost, request: pb.ReserveRequest) -> pb.ReserveReply:
    try:
        plan = plan_from_proto(request.plan)
    except ValueError as exc:
        raise InputError(f"invalid plan: {exc}") from exc
    try:
        if request.HasField("adopt"):
            adopted = ballot_from_proto(request.adopt)
            found = await host.adopt(plan.instance_id, plan.ballot, adopted)
        else:
            found = await host.reserve(plan, request.stage)
    except ReservationError as exc:
        return pb.ReserveReply(granted=False, reason=str(exc), never=True, never_code=exc.why)
    reply = pb.ReserveReply(
        granted=found.granted, reason=found.reason, usable_bytes=found.usable_bytes, collective=found.collective
    )
    if found.beaten_by is not None:
        reply.beaten_by.CopyFrom(ballot_to_proto(found.beaten_by))
    return reply


async def _commit(host: StageHost, request: pb.CommitRequest) -> AsyncGenerator[pb.StageStatus, None]:
    keep_kv_from = request.keep_kv_from if request.HasField("keep_kv_from") else None
    try:
        wiring = rank_from_proto(request.rank) if request.HasField("rank") else None
    except ValueError as exc:
        raise InputError(f"invalid wiring of a rank: {exc}") from exc
    ballot = ballot_from_proto(request.ballot)
    async with aclosing(host.commit(request.instance_id, ballot, keep_kv_from, wiring)) as reports:
        async for update in reports:
            yield STAGE_UPDATE.write(update)


async def _link(host: StageHost, membership: Membership, request: pb.LinkRequest) -> pb.LinkReply:
    """The endpoints are as their peers report them. The host of each is replaced by the address at which this node
    reaches that peer."""
    endpoint = reachable(membership, request.next_endpoint, request.next_peer)
    ranks = [reachable(membership, rank.endpoint, rank.peer) for rank in request.ranks]
    await host.link(request.instance_id, ballot_from_proto(request.ballot), endpoint, request.next_peer, ranks)
    return pb.LinkReply()


async def _look_at_stage(host: StageHost, request: pb.LookAtStageRequest) -> pb.LookAtStageReply:
    reason, status = await asyncio.gather(
        host.look(request.instance_id, ballot_from_proto(request.ballot)),
        host.status(request.instance_id, request.shows_hop),
    )
    return status_to_proto(status, reason)


async def _release(host: StageHost, request: pb.ReleaseRequest) -> pb.ReleaseReply:
    await host.release(request.instance_id, ballot_from_proto(request.ballot))
    return pb.ReleaseReply()


async def _drain(host: StageHost, membership: Membership, request: pb.DrainRequest) -> pb.DrainReply:
    require_own(membership.own, request.node_id)
    drain_here(host, membership, on=request.on)
    return pb.DrainReply()


def drain_here(host: StageHost, membership: Membership, *, on: bool) -> None:
    """Finish what runs here and take nothing new; or take requests again."""
    host.draining = on
    membership.tell_reading()
    _log.info("draining: this node takes no new requests" if on else "this node takes requests again")


async def _read_log(request: pb.ReadLogRequest) -> pb.ReadLogReply:
    records = RECENT.last(min(request.records, MAX_RECORDS))
    return pb.ReadLogReply(json=msgspec.json.encode([line.describe() for line in records]))


async def drain(calls: Calls, peer_id: str, *, on: bool) -> None:
    """Let a node finish what runs and take nothing new; or take requests again."""
    await calls.call(peer_id, DRAIN, pb.DrainRequest(on=on, node_id=peer_id))


async def read_log(calls: Calls, peer_id: str, records: int) -> bytes:
    """The last log records of a node, as JSON that is not checked."""
    return (await calls.call(peer_id, READ_LOG, pb.ReadLogRequest(records=records))).json


def reachable(membership: Membership, endpoint: str, peer_id: str) -> str:
    """`endpoint` of a peer's runner, with the host by which this node reaches that peer.

    A peer may have several addresses and its runner binds to all of them, so only the port is equal for every caller.
    """
    host, _, port = endpoint.rpartition(":")
    peer = membership.peer(peer_id)
    if peer is not None:
        return f"{peer.host}:{port}"
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::", "[::]") else endpoint
