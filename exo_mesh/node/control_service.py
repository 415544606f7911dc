"""Answers the control RPCs of other nodes, with the messages of control.proto."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

from exo_mesh.errors import InputError, ReservationError
from exo_mesh.mesh.membership.key_sharing import KeySharing
from exo_mesh.mesh.membership.messages import fence_from_proto
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models import text_cache
from exo_mesh.models.cards.shelf import CardShelf
from exo_mesh.models.catalogue import Catalogue, card_from_json, card_to_json
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.surveys import Surveys, survey_to_json
from exo_mesh.node.inspection.desk import Inspection
from exo_mesh.node.model_desk import ModelService
from exo_mesh.rings.hosting.peer_desk import PeerService
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.members import reachable
from exo_mesh.rings.serving.journal import Journal
from exo_mesh.rings.serving.kept_desk import KeptDesk
from exo_mesh.rings.serving.stream_desk import StreamDesk
from exo_mesh.wire.call_access import OwnCalls
from exo_mesh.wire.control_codec import status_to_proto
from exo_mesh.wire.plan_codec import ballot_from_proto, ballot_to_proto, plan_from_proto, rank_from_proto
from exo_mesh.wire.proto import control_pb2 as pb


class ControlService:
    """Implements exo_mesh.wire.control_server.ControlHandler by delegation."""

    def __init__(
        self,
        membership: Membership,
        host: StageHost,
        catalogue: Catalogue,
        surveys: Surveys,
        self_tests: SelfTests,
        instances: Instances,
        journal: Journal,
        inspection: Inspection,
        keys: KeySharing,
        desk: ModelService,
        shelf: CardShelf,
        streams: StreamDesk,
        kept: KeptDesk,
        peer_desk: PeerService,
        own_calls: OwnCalls,
    ) -> None:
        self._membership = membership
        self._host = host
        self._catalogue = catalogue
        self._surveys = surveys
        self._self_tests = self_tests
        self._instances = instances
        self._journal = journal
        self._inspection = inspection
        self._keys = keys
        self._desk = desk
        self._shelf = shelf
        self._streams = streams
        self._kept = kept
        self._peer_desk = peer_desk
        self._own_calls = own_calls

    async def hello(self, request: pb.HelloRequest, caller_host: str) -> pb.HelloReply:
        return await self._membership.answer_hello(request, caller_host)

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        return self._membership.answer_probe(request)

    async def indirect_probe(self, request: pb.IndirectProbeRequest) -> pb.IndirectProbeReply:
        return await self._membership.answer_indirect_probe(request)

    async def exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        return self._membership.answer_exchange(request)

    async def goodbye(self, request: pb.GoodbyeRequest) -> pb.GoodbyeReply:
        return self._membership.answer_goodbye(request)

    async def describe_model(self, request: pb.DescribeModelRequest) -> pb.DescribeModelReply:
        reply = await self._catalogue.describe(request.model)
        if request.engine and reply.found:
            card = card_from_json(reply.card_json)
            survey = await self._surveys.here(card, request.engine)
            reply.card_json = card_to_json(replace(card, legal_cuts=survey.legal_cuts))  # for peers of older versions
            reply.survey_json = survey_to_json(survey)
        return reply

    async def self_test(self, request: pb.SelfTestRequest) -> pb.SelfTestReply:
        return await self._self_tests.run(request)

    async def read_text_files(self, request: pb.ReadTextFilesRequest) -> AsyncIterator[pb.TextFile]:
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, request.model)
        async for item in text_cache.send(model_dir, request):
            yield item

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        try:
            plan = plan_from_proto(request.plan)
        except ValueError as exc:
            raise InputError(f"invalid plan: {exc}") from exc
        try:
            if request.HasField("adopt"):
                adopted = ballot_from_proto(request.adopt)
                answer = await self._host.adopt(plan.instance_id, plan.ballot, adopted)
            else:
                answer = await self._host.reserve(plan, request.stage)
        except ReservationError as exc:
            return pb.ReserveReply(granted=False, reason=str(exc), never=True, never_code=exc.why)
        reply = pb.ReserveReply(
            granted=answer.granted,
            reason=answer.reason,
            usable_bytes=answer.usable_bytes,
            collective=answer.collective,
        )
        if answer.beaten_by is not None:
            reply.beaten_by.CopyFrom(ballot_to_proto(answer.beaten_by))
        return reply

    async def commit(self, request: pb.CommitRequest) -> AsyncIterator[pb.StageStatus]:
        keep_kv_from = request.keep_kv_from if request.HasField("keep_kv_from") else None
        try:
            wiring = rank_from_proto(request.rank) if request.HasField("rank") else None
        except ValueError as exc:
            raise InputError(f"invalid wiring of a rank: {exc}") from exc
        ballot = ballot_from_proto(request.ballot)
        async for status in self._host.commit(request.instance_id, ballot, keep_kv_from, wiring):
            yield status

    async def link(self, request: pb.LinkRequest) -> pb.LinkReply:
        endpoint = reachable(self._membership, request.next_endpoint, request.next_peer)
        ranks = [reachable(self._membership, rank.endpoint, rank.peer) for rank in request.ranks]
        ballot = ballot_from_proto(request.ballot)
        await self._host.link(request.instance_id, ballot, endpoint, request.next_peer, ranks)
        return pb.LinkReply()

    async def look_at_stage(self, request: pb.LookAtStageRequest) -> pb.LookAtStageReply:
        reason, status = await asyncio.gather(
            self._host.look(request.instance_id, ballot_from_proto(request.ballot)),
            self._host.status(request.instance_id, request.shows_hop),
        )
        return status_to_proto(status, reason)

    async def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        await self._host.release(request.instance_id, ballot_from_proto(request.ballot))
        return pb.ReleaseReply()

    async def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        if request.instance_id:
            count = self._journal.cancel_on(request.instance_id, request.request_id)
            return pb.CancelReply(found=count > 0, count=count)
        key_id = request.key_id if request.HasField("key_id") else None
        return pb.CancelReply(found=self._journal.cancel(request.request_id, key_id))

    async def find_streams(self, request: pb.FindStreamsRequest) -> pb.FindStreamsReply:
        return self._streams.answer_find(request)

    async def follow_stream(self, request: pb.FollowStreamRequest) -> AsyncIterator[pb.FollowReply]:
        async for item in self._streams.answer_follow(request):
            yield item

    async def read_kept(self, request: pb.ReadKeptRequest) -> AsyncIterator[pb.KeptPart]:
        async for part in self._kept.answer_read(request):
            yield part

    async def delete_kept(self, request: pb.DeleteKeptRequest) -> pb.DeleteKeptReply:
        return self._kept.answer_delete(request)

    async def diagnose(self, request: pb.DiagnoseRequest) -> pb.DiagnoseReply:
        return await self._inspection.diagnostics.answer(request)

    async def read_traces(self, request: pb.ReadTracesRequest) -> pb.ReadTracesReply:
        return self._inspection.answer_read_traces(request)

    async def delete_traces(self, request: pb.DeleteTracesRequest) -> pb.DeleteTracesReply:
        return self._inspection.answer_delete_traces(request)

    async def capture(self, request: pb.CaptureRequest) -> pb.CaptureReply:
        return await self._inspection.answer_capture(request)

    async def share_keys(self, request: pb.ShareKeysRequest) -> pb.ShareKeysReply:
        return await self._keys.answer(request)

    async def introduce(self, request: pb.IntroduceRequest) -> pb.IntroduceReply:
        return await self._desk.answer_introduce(request)

    async def describe_files(self, request: pb.DescribeFilesRequest) -> pb.DescribeFilesReply:
        return await self._desk.answer_describe_files(request)

    async def pull(self, request: pb.PullRequest) -> pb.PullReply:
        return await self._desk.answer_pull(request)

    async def drop_model(self, request: pb.DropModelRequest) -> pb.DropModelReply:
        return await self._desk.answer_drop(request)

    async def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        return pb.ConfirmReply(is_mine=self._own_calls.confirm(request.proof))

    async def delete_card(self, request: pb.DeleteCardRequest) -> pb.DeleteCardReply:
        return pb.DeleteCardReply(found=await self._shelf.delete_own(request.model))

    async def stop_node(self, request: pb.StopNodeRequest) -> pb.StopNodeReply:
        if request.node_id != self._membership.own.id:
            raise InputError(f"this request is for node {request.node_id[:8]}, but arrived at another one")
        self._membership.stops.ask(restart=request.restart)
        return pb.StopNodeReply()

    async def wake(self, request: pb.WakeRequest) -> pb.WakeReply:
        return self._membership.sleeps.answer_wake(request)

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        if request.node_id != self._membership.own.id:
            raise InputError(f"this request is for node {request.node_id[:8]}, but arrived at another one")
        self._peer_desk.drain_here(on=request.on)
        return pb.DrainReply()

    async def read_log(self, request: pb.ReadLogRequest) -> pb.ReadLogReply:
        return pb.ReadLogReply(json=self._peer_desk.log_here(request.records))

    async def keep_instance(self, request: pb.KeepInstanceRequest) -> pb.KeepInstanceReply:
        if math.isnan(request.idle_s):
            raise InputError("idle_s must be a number, not NaN")
        return pb.KeepInstanceReply(found=self._instances.wish_idle(request.instance_id, request.idle_s))

    async def delete_instance(self, request: pb.DeleteInstanceRequest) -> pb.DeleteInstanceReply:
        if request.HasField("fence"):
            self._membership.take_fence(fence_from_proto(request.fence))
        found = await self._instances.delete_own(request.instance_id, is_replaced=request.replaced)
        return pb.DeleteInstanceReply(found=found)
