"""Answers the control RPCs of other nodes, with the messages of control.proto."""

from __future__ import annotations

from exo_mesh.errors import InputError
from exo_mesh.mesh.membership.key_sharing import KeySharing
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.cards.shelf import CardShelf
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.surveys import Surveys
from exo_mesh.node.inspection.desk import Inspection
from exo_mesh.node.model_desk import ModelDesk
from exo_mesh.rings.hosting.peer_desk import PeerDesk
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.serving.journal import Journal
from exo_mesh.rings.serving.kept_desk import KeptDesk
from exo_mesh.rings.serving.stream_desk import StreamDesk
from exo_mesh.wire.call_access import OwnCalls
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
        desk: ModelDesk,
        shelf: CardShelf,
        streams: StreamDesk,
        kept: KeptDesk,
        peer_desk: PeerDesk,
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

    async def share_keys(self, request: pb.ShareKeysRequest) -> pb.ShareKeysReply:
        return await self._keys.answer(request)

    async def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        return pb.ConfirmReply(is_mine=self._own_calls.confirm(request.proof))

    async def stop_node(self, request: pb.StopNodeRequest) -> pb.StopNodeReply:
        if request.node_id != self._membership.own.id:
            raise InputError(f"this request is for node {request.node_id[:8]}, but arrived at another one")
        self._membership.stops.ask(restart=request.restart)
        return pb.StopNodeReply()

    async def wake(self, request: pb.WakeRequest) -> pb.WakeReply:
        return self._membership.sleeps.answer_wake(request)
