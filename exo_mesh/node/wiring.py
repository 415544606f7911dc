"""Builds the parts of a node from those of each package, and joins them with each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from exo_mesh import OLDEST_PROTOCOL, PROTOCOL_VERSION, __version__
from exo_mesh.base.clock import Clock
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.device import PeerInfo, Telemetry, role_of
from exo_mesh.domain.view import InstanceInfo, Record
from exo_mesh.engine.registry import Registry
from exo_mesh.machine import open_files
from exo_mesh.machine.memory import MemoryReader
from exo_mesh.machine.wiring import MachineParts
from exo_mesh.mesh.discovery.port import Discovery
from exo_mesh.mesh.membership.detector import Timing
from exo_mesh.mesh.membership.identity import take_identity
from exo_mesh.mesh.membership.peer_filter import PeerFilter
from exo_mesh.mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.mesh.membership.wiring import SharingParts, guard_of, key_answers
from exo_mesh.mesh.membership.wiring import answers as membership_answers
from exo_mesh.models.server_metrics import shown_in
from exo_mesh.models.wiring import ModelParts
from exo_mesh.node.health import Health
from exo_mesh.node.observation import Observation
from exo_mesh.node.own_engines import OwnEngines
from exo_mesh.node.service import Services
from exo_mesh.rings.hosting import calls as hosting_calls
from exo_mesh.rings.hosting.certificate_renewal import own_credentials
from exo_mesh.rings.hosting.kept_here import KeptHere
from exo_mesh.rings.hosting.local_models import LocalModels
from exo_mesh.rings.hosting.own_reading import own_prefixes, own_reading
from exo_mesh.rings.hosting.runner_starter import HostLimits
from exo_mesh.rings.hosting.wiring import HostingParts
from exo_mesh.rings.placing import calls as instance_calls
from exo_mesh.rings.placing.wiring import InstanceParts
from exo_mesh.rings.serving.request_run import Patience
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.rings.serving.wiring import ServingParts
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings
from exo_mesh.wire.call_access import OwnCalls
from exo_mesh.wire.channel_options import MAX_CONNECTIONS
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.control_server import ControlServer
from exo_mesh.wire.peer_call import AnyAnswer
from exo_mesh.wire.probes.port import probe_port

if TYPE_CHECKING:
    from exo_mesh.node.inspection.otlp.exporter import TraceExporter


class Tuning(msgspec.Struct, frozen=True):
    """Deadlines and intervals of the parts of a node; the defaults suit a LAN."""

    timing: Timing = msgspec.field(default_factory=Timing)
    host: HostLimits = msgspec.field(default_factory=HostLimits)
    patience: Patience = msgspec.field(default_factory=Patience)


class NodeParts:
    """All parts of a node. phase: where the node is between its start and its stop; see Health.describe.

    Each package is built from those below it, in the order of the imports (docs/how-it-works/architecture.md), so no
    other order works. A part that needs a later one gets a function that is called after the start, and the membership,
    which asks for the most, this object; see OwnSide.
    """

    def __init__(
        self,
        settings: Settings,
        effective: EffectiveSettings,
        registry: Registry,
        discoveries: Sequence[Discovery],
        memory_reader: MemoryReader,
        tuning: Tuning,
        clock: Clock,
        rng: random.Random,
        phase: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.discoveries = discoveries
        self.clock = clock
        self.phase = phase
        self.tasks = TaskOwner()
        self.metrics = Metrics()
        self.credentials = own_credentials(settings)
        self.identity = take_identity(settings.home)
        # higher than every reading of an earlier start, because gossip may still carry those
        self._sequence = self.identity.incarnation * VERSIONS_PER_INCARNATION
        self.machine = MachineParts.build(settings, memory_reader)
        self.probe_port = probe_port(settings.secret, self.identity.incarnation)
        self.own_calls = OwnCalls(self.identity.id)
        self.membership = self._new_membership(tuning.timing)
        sharing = SharingParts.build(settings, effective, self.membership)
        self.keys, self.shared = sharing.keys, sharing.settings
        self.exporter = _exporter(settings, self.membership, self.metrics)
        self.models = self._new_models()
        self.on_disk = KeptHere(settings, self.membership, self.models.catalogue, self.models.files)
        self.engines = OwnEngines(settings, registry, self.membership, self.models)
        self.hosting = self._new_hosting(tuning.host)
        self.owning = self._new_owning(tuning.host, rng)
        self.serving = self._new_serving(tuning.patience)
        self.health = self._new_health()
        self.services = self._new_services()
        self.answers = self._all_answers()
        self.server = self._new_server()

    def _new_membership(self, timing: Timing) -> Membership:
        settings = self.settings
        own = PeerInfo(
            id=self.identity.id,
            incarnation=self.identity.incarnation,
            name=settings.name,
            version=__version__,
            protocol=OLDEST_PROTOCOL,
            newest_protocol=PROTOCOL_VERSION,
            namespace=settings.namespace,
            addresses=(),
            role=role_of(settings.role, settings.max_memory_bytes),
        )
        return Membership(
            own,
            self,
            lambda address: ControlClient(
                address, self.credentials, settings.namespace, self.probe_port, self.own_calls
            ),
            peer_filter=PeerFilter(settings.node_id_filter, settings.interface_type_filter),
            answers=lambda: self.answers,
            timing=timing,
            clock=self.clock,
        )

    def _new_models(self) -> ModelParts:
        return ModelParts.build(
            self.settings,
            self.registry,
            self.membership,
            self.machine.disk,
            self.credentials,
            self._announce_models,
            shown_in(self.metrics.rkllm),
            self._wrong_bytes,
        )

    def _new_hosting(self, limits: HostLimits) -> HostingParts:
        models = self.models
        here = LocalModels(
            models.catalogue.local_card,
            models.catalogue.local_dir,
            models.downloads.introduce,
            models.downloads.of_stage,
            models.served.here,
            models.server_options,
        )
        return HostingParts.build(
            self.settings,
            self.registry,
            self.membership,
            here,
            self.machine,
            self.metrics,
            limits,
            self.clock,
            self.credentials,
        )

    def _new_owning(self, limits: HostLimits, rng: random.Random) -> InstanceParts:
        return InstanceParts.build(
            self.shared.effective,
            self.registry,
            self.membership,
            self.models,
            self.hosting.host,
            self.engines.of_card,
            self.metrics,
            limits.runner,
            self.clock,
            rng,
            self._requests_here,
        )

    def _new_serving(self, patience: Patience) -> ServingParts:
        return ServingParts.build(
            self.settings,
            self.membership,
            self.owning,
            self.credentials,
            lambda: self.hosting.monitor.used_bytes,
            self.metrics,
            patience,
            self.clock,
            self.models.served.standing_for,
            self._offer_trace,
        )

    def _new_health(self) -> Health:
        def placed() -> list[InstanceInfo]:
            return [instance for _, instance in self.owning.instances.all()]

        return Health(
            self.settings,
            self.membership,
            self.machine.disk,
            self.hosting.runner_history.guard,
            self.hosting.monitor,
            placed,
            self.clock,
            self._ended_tasks,
            self.models.downloads.failed_here,
        )

    def _ended_tasks(self) -> dict[str, str]:
        """Long-lived tasks of this node and its parts that ended because of a bug: exception by name."""
        ended = [self.tasks.ended, self.membership.ended_tasks, self.hosting.host.ended_tasks]
        ended += [self.owning.ended_tasks, self.server.ended_tasks, self.models.exchange.ended_tasks]
        ended += [discovery.ended_tasks for discovery in self.discoveries]
        return {name: exception for tasks in ended for name, exception in tasks.items()}

    def _new_services(self) -> Services:
        observation = Observation(
            self.settings,
            self.phase,
            self.membership,
            self.hosting,
            self.owning.instances,
            self.serving,
            self.health,
            self.machine.disk,
            self.exporter,
        )
        return Services.build(
            self.membership,
            self.models,
            self.hosting,
            self.owning,
            self.serving,
            observation,
            self.phase,
            obeys_peers=self.credentials is not None or self.settings.open_admin,
            engines_for=self.registry.supporting,
        )

    @property
    def _obeys_peers(self) -> bool:
        """Whether this node uses the hub for its peers; see FetchesForPeers."""
        return self.credentials is not None or self.settings.open_admin

    def _all_answers(self) -> list[AnyAnswer]:
        """This node's answers to every call of peers."""
        return [
            *membership_answers(self.membership, self.own_calls),
            *key_answers(self.keys),
            *hosting_calls.answers(self.hosting.host, self.membership),
            *self.models.answers(self.settings.name, obeys_peers=self._obeys_peers),
            *self.serving.answers,
            *self.services.observation.inspection.answers,
            *instance_calls.answers(
                self.membership, self.owning.instances.delete_own, self.owning.owned_rings.unused.wish_idle
            ),
        ]

    def _new_server(self) -> ControlServer:
        return ControlServer(
            self.answers,
            self.credentials,
            peer_id=self.membership.own.id,
            namespace=self.settings.namespace,
            is_peer=self.membership.is_alive,
            on_stranger=self.membership.note_stranger,
            options=[("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, open_files.limit() // 4))],
            guard=guard_of(self.membership, self.settings),
        )

    # OwnSide: what the membership asks of later parts

    def prefixes(self) -> dict[str, bytes]:
        return own_prefixes(self.membership, self.hosting.host)

    def is_calm(self, instance_id: str) -> bool:
        return self.owning.owned_rings.use.is_calm(instance_id)

    def reading(self) -> Telemetry:
        self._sequence += 1
        return own_reading(
            self.membership,
            self.hosting.host,
            self.machine,
            sequence=self._sequence,
            reasons=self.health.problems(),
            keys_digest=self.keys.digest,
            fetch_room_bytes=self.models.downloads.room.num_bytes,
            headroom_bytes=self.hosting.monitor.headroom_bytes,
            entry_requests=self.owning.owned_rings.use.own_report(),
        )

    def peer_left(self, peer: PeerInfo, records: list[Record]) -> None:
        self.owning.owned_rings.owner_left(peer, records)

    async def before_refute(self) -> None:
        await self.owning.owned_rings.free_beaten()

    # what other earlier parts need of later ones

    async def _announce_models(self) -> None:
        await self.engines.announce_models(is_sure=True)

    async def _wrong_bytes(self, model: str, loading_waits: bool) -> None:
        await self.owning.instances.place_again(model, only_ready=loading_waits)

    def _offer_trace(self, trace: RequestTrace) -> None:
        if self.exporter is not None:
            self.exporter.offer(trace)

    def _requests_here(self) -> dict[str, int]:
        return self.serving.journal.outstanding()


def _exporter(settings: Settings, membership: Membership, metrics: Metrics) -> TraceExporter | None:
    """The exporter of traces; None without --otlp-endpoint. Raises ConfigError."""
    if not settings.otlp_endpoint:
        return None
    from exo_mesh.node.inspection.otlp.wiring import exporter_of  # few nodes send traces

    return exporter_of(settings, membership, metrics)
