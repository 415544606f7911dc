"""The node object: wires the parts of this peer together, starts and stops them, and implements MeshService."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from exo_mesh import OLDEST_PROTOCOL, PROTOCOL_VERSION, __version__
from exo_mesh.clock import Clock, monotonic
from exo_mesh.discovery.choose import discoveries_for
from exo_mesh.discovery.interfaces import recent_interfaces
from exo_mesh.discovery.port import Announcement, Discovery
from exo_mesh.discovery.static import StaticDiscovery
from exo_mesh.discovery.wake_on_lan import own_macs
from exo_mesh.domain.device import API, PeerInfo, Telemetry, role_of
from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE, SERVED_DIGEST
from exo_mesh.engine.registry import Registry, load_registry
from exo_mesh.errors import MeshError, NodeStoppingError, NotReadyError
from exo_mesh.fetcher.wire import HubModel
from exo_mesh.hosting.certificate_renewal import Renewal, own_credentials
from exo_mesh.hosting.local_models import LocalModels
from exo_mesh.hosting.own_reading import own_reading
from exo_mesh.hosting.parts import HostingParts
from exo_mesh.hosting.peer_desk import PeerDesk
from exo_mesh.hosting.ring_energy import keep_ring_energy
from exo_mesh.hosting.runner_starter import HostLimits
from exo_mesh.inspection.describe import describe_instance, peers_of
from exo_mesh.inspection.desk import Inspection
from exo_mesh.instances.hostfile_rank import own_rank
from exo_mesh.instances.parts import InstanceParts
from exo_mesh.instances.previews import preview, previews, with_peer_ids
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.instances.stage_phases import with_phases
from exo_mesh.machine import this_machine
from exo_mesh.machine.memory import MemoryReader, read_memory
from exo_mesh.machine.parts import MachineParts
from exo_mesh.membership.detector import Timing
from exo_mesh.membership.identity import take_identity
from exo_mesh.membership.parts import SharingParts
from exo_mesh.membership.paths import PathKeeper
from exo_mesh.membership.peers import VERSIONS_PER_INCARNATION
from exo_mesh.membership.service import Membership
from exo_mesh.membership.sleeping import SleepDesk
from exo_mesh.membership.stopping import StopDesk
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.engine_speeds import SpeedNeeds
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.parts import ModelParts
from exo_mesh.models.server_metrics import shown_in
from exo_mesh.node.control_service import ControlService
from exo_mesh.node.health import Health
from exo_mesh.node.housekeeping import announce_models, keep_addresses, keep_awake, keep_house, keep_rdma_ports
from exo_mesh.node.model_desk import ModelDesk
from exo_mesh.node.observation import Observation
from exo_mesh.node.store_desk import StoreDesk
from exo_mesh.serving.kept_desk import KeptDesk
from exo_mesh.serving.parts import ServingParts
from exo_mesh.serving.request_run import Patience
from exo_mesh.serving.stream_desk import StreamDesk
from exo_mesh.settings.config import Settings
from exo_mesh.tasks import TaskOwner
from exo_mesh.telemetry.metrics import Metrics
from exo_mesh.telemetry.start_phases import StartPhases
from exo_mesh.transport.control_client import ControlClient
from exo_mesh.transport.control_server import ControlServer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Deadlines and intervals of the parts of a node; the defaults suit a LAN."""

    timing: Timing = field(default_factory=Timing)
    host: HostLimits = field(default_factory=HostLimits)
    patience: Patience = field(default_factory=Patience)


class Node:
    """This peer. Construct it, `await start()` once, use it as a MeshService, `await finish()` if there is time, and
    `await stop()` (within 5 s). origins: of the settings, as in LoadedSettings."""

    def __init__(
        self,
        settings: Settings,
        *,
        origins: Mapping[str, str] | None = None,
        registry: Registry | None = None,
        discoveries: Sequence[Discovery] | None = None,
        memory_reader: MemoryReader = read_memory,
        tuning: Tuning = Tuning(),
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        own = own_rank(settings, os.environ)
        self.settings = settings = own.settings(settings)
        self._static_rank = own.rank
        self._discoveries = discoveries_for(settings) if discoveries is None else list(discoveries)
        self._discoveries += [StaticDiscovery(own.addresses)] if own.addresses else []
        self._registry = registry = registry or load_registry()
        self._clock = clock
        self._phase = "starting"
        self._tasks = TaskOwner()
        self.metrics = metrics = Metrics()
        self._credentials = credentials = own_credentials(settings)
        self._identity = take_identity(settings.home)
        # higher than every reading of an earlier start, because gossip may still carry those
        self._sequence = self._identity.incarnation * VERSIONS_PER_INCARNATION

        # Each package is built from those below it, in the order of the imports
        # (docs/how-it-works/architecture.md), so no other order works. A part that needs a
        # later one gets a function that is called after the start: membership reads the telemetry of the host, frees
        # stages before it refutes, and reports peers that have left.
        limits = tuning.host.runner
        self._machine = machine = MachineParts.at(settings, memory_reader)
        self.membership = self._new_membership(tuning.timing)
        sharing = SharingParts.at(settings, origins, self.membership)
        self.keys, self.shared = sharing.keys, sharing.settings
        self._models = models = ModelParts.at(
            settings,
            registry,
            self.membership,
            machine.disk,
            credentials,
            self._announce_models,
            shown_in(metrics.rkllm),
        )
        self.hub_token = models.exchange.hub_token
        self._hosting = hosting = HostingParts.at(
            settings,
            registry,
            self.membership,
            self._new_local_models(),
            machine,
            metrics,
            tuning.host,
            clock,
            credentials,
        )
        self._owning = InstanceParts.at(
            self.shared.effective,
            registry,
            self.membership,
            models,
            hosting.host,
            self._engines_of,
            metrics,
            limits,
            clock,
            rng or random.Random(),
        )
        self._serving = ServingParts.at(
            settings,
            self.membership,
            self._owning,
            credentials,
            lambda: hosting.monitor.used_bytes,
            metrics,
            tuning.patience,
            clock,
            models.served.standing_for,
        )
        self._desk = ModelDesk(self.membership, models.catalogue, models.downloads, self._owning.placer, models.shelf)
        self._health = self._new_health()
        self.observation = self._new_observation()
        self._server = self._new_server()

    def _new_local_models(self) -> LocalModels:
        models = self._models
        return LocalModels(
            models.catalogue.local_card,
            models.catalogue.local_dir,
            models.downloads.introduce,
            models.downloads.of_stage,
            models.served.here,
            models.server_options,
        )

    def _new_membership(self, timing: Timing) -> Membership:
        own = PeerInfo(
            id=self._identity.id,
            incarnation=self._identity.incarnation,
            name=self.settings.name,
            version=__version__,
            protocol=OLDEST_PROTOCOL,
            newest_protocol=PROTOCOL_VERSION,
            namespace=self.settings.namespace,
            addresses=(),
            role=role_of(self.settings.role, self.settings.max_memory_bytes),
        )
        return Membership(
            own,
            self._read_telemetry,
            on_leave=self._peer_left,
            before_refute=self._before_refute,
            timing=timing,
            clock=self._clock,
            dial=lambda address: ControlClient(address, self._credentials, self.settings.namespace),
            only_peers=self.settings.node_id_filter,
            only_links=self.settings.interface_type_filter,
        )

    def _new_health(self) -> Health:
        def placed() -> list[InstanceInfo]:
            return [instance for _, instance in self._owning.instances.all()]

        hosting = self._hosting
        return Health(
            self.settings,
            self.membership,
            self._machine.disk,
            hosting.runner_history.guard,
            hosting.monitor,
            placed,
            self._clock,
            self._ended_tasks,
            self._models.downloads.failed_here,
        )

    def _ended_tasks(self) -> dict[str, str]:
        """Long-lived tasks of this node and its parts that ended because of a bug: exception by name."""
        ended = [self._tasks.ended, self.membership.ended_tasks, self._hosting.host.ended_tasks]
        ended += [self._owning.ended_tasks, self._server.ended_tasks, self._models.exchange.ended_tasks]
        ended += [discovery.ended_tasks for discovery in self._discoveries]
        return {name: exception for tasks in ended for name, exception in tasks.items()}

    def _new_observation(self) -> Observation:
        return Observation(
            self.settings,
            lambda: self._phase,
            self.membership,
            self._hosting,
            self._owning.instances,
            self._serving,
            self._health,
            self._machine.disk,
            self.metrics,
        )

    def _new_server(self) -> ControlServer:
        models = self._models
        service = ControlService(
            self.membership,
            self._hosting.host,
            models.catalogue,
            models.surveys,
            models.self_tests,
            self._owning.instances,
            self._serving.journal,
            self.observation.inspection,
            self.keys,
            self._desk,
            models.shelf,
            self.streams,
            self.kept_answers,
            self._hosting.peer_desk,
        )
        return ControlServer(
            service,
            self._credentials,
            peer_id=self.membership.own.id,
            namespace=self.settings.namespace,
            is_peer=self.membership.is_alive,
            on_stranger=self.membership.note_stranger,
        )

    @property
    def node_id(self) -> str:
        return self.membership.own.id

    @property
    def grpc_port(self) -> int:
        """Port of the control endpoint, once started."""
        return self._server.port

    async def start(self, phases: StartPhases | None = None) -> None:
        """Starts serving and looking for peers. Raises MeshErrors for problems that make the node unusable; lesser ones
        (a discovery that does not work, no engine) appear in `health`. phases: records the steps of the start."""
        settings, phases = self.settings, phases or StartPhases()
        await asyncio.to_thread(self._hosting.runner_history.pid_files.reap)
        port = await self._server.start(settings.host, settings.grpc_port)
        phases.done("control port")
        device = await asyncio.to_thread(
            this_machine.device, self._registry, settings.engine, self._machine.memory.follow
        )
        phases.done("engines")
        await self._models.exchange.start(self._hosting.host.is_in_use)
        await self._models.catalogue.rescan()
        model_engines = await asyncio.to_thread(self._model_engines)
        phases.done("models")
        self.membership.start(
            replace(
                self.membership.own,
                addresses=this_machine.addresses(settings.host, port, settings.interface_type_filter),
                devices=(device,),
                models=self._models.catalogue.local_names,
                partial_models=self._models.catalogue.partial_names,
                model_engines=model_engines,
                fetches=self._models.downloads.rules.fetches,
                files_port=self._models.exchange.port,
                has_store=self._models.downloads.rules.store.is_here,
                static_rank=self._static_rank,
                macs=own_macs(recent_interfaces()),
            )
        )
        self._hosting.host.start()
        self._owning.start()
        self._start_tasks(port)
        await self._start_discoveries(port)
        phases.done("discovery")
        if not device.engine and self.membership.own.role != API:
            self._health.note(
                "no_engine", f"no engine can run for --engine {settings.engine}", "pip install exo-mesh[mlx]"
            )
        if settings.wait_for_peers:
            self._phase = "waiting_for_peers"
            self._tasks.start(self._await_peers(), "wait for peers")
        else:
            self._phase = "ok"
        _log.info("node %s (%s) listens on %s:%d", settings.name, self.node_id[:8], settings.host, port)

    def _start_tasks(self, port: int) -> None:
        settings = self.settings
        work = partial(
            keep_house,
            self._models.catalogue,
            self.membership,
            self._hosting.host,
            self._hosting.monitor,
            self.metrics,
            self._clock,
            self._model_engines,
            self._machine.disk,
            self._health,
            self._models.downloads,
            lambda: self._phase,
        )
        keep = self._tasks.keep
        keep(work, "housekeeping")
        find = partial(self._desk.find, may_download=True)
        self._tasks.start(self._owning.instances.preload(self.settings.preload, find), "preloading")
        self._tasks.start(self._models.resume_pulls(self.membership), "unfinished pulls")
        types = settings.interface_type_filter
        keep(partial(keep_addresses, self.membership, settings.host, port, types), "own addresses")
        keep(partial(keep_rdma_ports, self.membership), "Thunderbolt ports")
        keep(self._hosting.monitor.run, "memory monitor")
        if not settings.allow_sleep:
            keep(partial(keep_awake, self.observation, self._models.downloads), "staying awake")
        self._machine.meter.start(self.metrics.hardware)
        keep(partial(keep_ring_energy, self.membership, self._hosting.host, self.metrics.hardware), "energy of rings")
        keep(PathKeeper(self.membership, clock=self._clock).run, "paths")
        keep(self.keys.keep, "API keys")
        keep(partial(self.sleeps.keep, settings.home), "peers that can be woken")
        keep(self.shared.keep, "shared settings")
        keep(self._models.keep_cards, "model cards")
        keep(self._models.served.keep, "model servers")
        keep(partial(self._models.speeds.keep, self._speed_needs()), "speeds of engines")
        keep(self.inspection.keep_traces, "traces")
        keep(self.kept_answers.keep_tidy, "kept answers")
        if self.inspection.exporter is not None:
            keep(self.inspection.exporter.keep, "export of traces")
        if self._credentials is not None:
            host, renew_files = self._hosting.host, self._models.exchange.renew
            renewal = Renewal(settings, self._credentials, self.membership, host, renew_files)
            keep(renewal.keep, "renewal of the certificate")

    async def _start_discoveries(self, port: int) -> None:
        settings = self.settings
        own = Announcement(settings.namespace, self.node_id, port, settings.name, PROTOCOL_VERSION)
        for discovery in self._discoveries:
            try:
                await discovery.start(own, self.membership.suggest)
            except MeshError as exc:
                self._health.note(
                    "discovery_failed",
                    f"{discovery.name}: {exc}",
                    "list peers with --bootstrap-peers host:port or --peers-file; see docs/tasks/discovery.md",
                )

    async def finish(self) -> None:
        """Refuses new requests, and lets requests that entered here finish for up to --stop-grace. Cancel to stop
        waiting.

        Stages here keep serving other peers' requests; these continue on other peers when this node has stopped.
        """
        self._phase = "stopping"
        self._hosting.host.draining = True
        await self._serving.journal.finish(self.settings.stop_grace)

    async def stop(self) -> None:
        """Ends all that this node owns and hosts, leaves the mesh, and frees everything. Never raises a MeshError."""
        self._phase = "stopping"
        await self._serving.journal.cut()
        await self._tasks.close()
        if self.inspection.exporter is not None:
            await self.inspection.exporter.close()
        await asyncio.gather(*(discovery.stop() for discovery in self._discoveries))
        await self._owning.stop()
        await self._hosting.host.stop()
        await self._models.downloads.close()
        await self.membership.stop()
        await self._serving.stop()
        await self._server.stop()
        await self._models.exchange.stop()
        self._machine.close()
        self._models.texts.close()
        await self._models.catalogue.close()
        self._identity.release()

    def announce_api(self, url: str) -> None:
        """Publishes the URL of this node's HTTP API to the mesh."""
        self.membership.describe(replace(self.membership.own, api_url=url))

    # MeshService

    def models(self) -> list[ModelEntry]:
        known = self._models.catalogue.known_card
        return [self._entry(name, peers, known(name)) for name, peers in self._models.catalogue.names().items()]

    def known_cards(self) -> list[TomlCard]:
        there = self._models.catalogue.names()
        return [card for card_id, card in sorted(self._models.shelf.cards().items()) if card_id not in there]

    async def model(self, name: str) -> ModelEntry:
        card = await self._models.catalogue.card(name)
        known = next((entry for entry in self.models() if entry.name == card.name), None)
        return known or self._entry(card.name, (self.node_id,), card)

    async def find_model(self, name: str, *, may_download: bool) -> ModelEntry:
        card = await self._desk.find(name, may_download=may_download)
        self._models.shelf.runner_of(card.name)
        return await self.model(card.name)

    def downloads(self) -> list[DownloadEntry]:
        return self._desk.entries()

    async def start_download(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False
    ) -> list[DownloadEntry]:
        return await self._desk.start(model, peers=peers, whole=whole)

    async def cancel_download(self, peer_id: str, model: str) -> bool:
        return await self._desk.cancel(peer_id, model)

    async def delete_model(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        return await self._desk.delete(name, peers=peers)

    async def search_models(self, query: str, limit: int) -> list[HubModel]:
        return await self._desk.search(query, limit)

    async def add_card(self, repo: str) -> ModelEntry:
        card = await self._desk.add_card(repo)
        return await self.model(card.name)

    async def delete_card(self, name: str) -> bool:
        return await self._desk.delete_card(name)

    @property
    def store(self) -> StoreDesk | None:
        store = self._models.downloads.store
        return StoreDesk(self.membership, self._models.catalogue, store, self._desk) if store.is_configured else None

    async def storage(self) -> dict[str, Any]:
        return await self._desk.storage()

    async def model_at(self, path: Path) -> str:
        return await self._models.catalogue.name_at(path)

    def unusable_models(self) -> dict[str, str]:
        return self._models.catalogue.unusable

    async def text_files(self, name: str) -> Path:
        return await self._models.texts.directory(name)

    async def context_limit(self, name: str) -> int:
        placed = self._owning.instances.of_model(name) or self._owning.instances.of_model(name, InstanceState.LOADING)
        if placed:  # a request waits for a ring that recovers, and that ring keeps its limit
            return max(instance.plan.context_limit for instance in placed)
        card = await self._models.catalogue.card(name)
        return (await self._owning.placer.propose(card, InstanceSpec(name))).context_limit

    @property
    def inspection(self) -> Inspection:
        return self.observation.inspection

    @property
    def streams(self) -> StreamDesk:
        return self._serving.streams

    @property
    def kept_answers(self) -> KeptDesk:
        return self._serving.kept

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        if self._phase == "stopping":
            raise NodeStoppingError(
                "this node is stopping and accepts no new requests; send the request to another peer"
            )
        if self._hosting.host.draining:
            raise NotReadyError("this node is draining and accepts no new requests; send the request to another peer")
        return self._serving.router.generate(model, request)

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        here = self._serving.journal.cancel(request_id, key_id)
        answers = await asyncio.gather(  # a client may use one x-request-id at several peers
            *(peer.client.cancel(request_id, key_id) for peer in self.membership.peers), return_exceptions=True
        )
        return here or any(answer is True for answer in answers)

    async def create_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        spec = replace(spec, model=(await self._models.catalogue.card(spec.model)).name)
        instance = await self._owning.instances.ensure(with_peer_ids(spec, self.membership.view.peers()))
        owners = [owner for owner, held in self._owning.instances.all() if held.plan.digest == instance.plan.digest]
        described = describe_instance(instance, owners[0] if owners else instance.plan.ballot.proposer)
        return with_phases([described], self._owning.instances.phases)[0]

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[dict[str, Any]]:
        spec = with_peer_ids(spec, self.membership.view.peers())
        made: list[dict[str, Any]] = []
        while len(made) < count:
            used = {peer_id for one in made for stage in one["stages"] for peer_id in peers_of(stage)}
            made.append(await self.create_instance(replace(spec, exclude_peers=(*spec.exclude_peers, *sorted(used)))))
        return made

    async def preview_instances(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        peers = self.membership.view.peers()
        card = await self._models.catalogue.card(spec.model)
        self._models.speeds.wish(card)
        return await previews(self._owning.placer, card, with_peer_ids(replace(spec, model=card.name), peers), peers)

    async def preview_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        peers = self.membership.view.peers()
        card = await self._models.catalogue.card(spec.model)
        self._models.speeds.wish(card)
        return await preview(self._owning.placer, card, with_peer_ids(replace(spec, model=card.name), peers), peers)

    async def delete_instance(self, instance_id: str) -> bool:
        return await self._owning.instances.delete(instance_id)

    def keep_loaded(self, instance_id: str, idle_s: float) -> None:
        self._owning.instances.keep_alive(instance_id, idle_s)

    def idle_left_s(self, instance_id: str) -> float | None:
        return self._owning.instances.idle_left_s(instance_id)

    @property
    def stops(self) -> StopDesk:
        return self.membership.stops

    @property
    def sleeps(self) -> SleepDesk:
        return self.membership.sleeps

    @property
    def peer_desk(self) -> PeerDesk:
        return self._hosting.peer_desk

    def drain(self, *, on: bool) -> None:
        self._hosting.peer_desk.drain_here(on=on)

    def lift_quarantine(self) -> int:
        return self._hosting.runner_history.guard.lift()

    # internals

    async def _await_peers(self) -> None:
        """Makes the node ready once --wait-for-peers others are in the mesh together, or after --discovery-timeout. It
        stays ready when they leave, since it can still serve."""
        wanted, timeout_s = self.settings.wait_for_peers, self.settings.discovery_timeout
        began = self._clock()
        while (found := self.membership.num_peers) < wanted:
            if timeout_s and self._clock() - began >= timeout_s:
                self._health.missed_peers(found)
                break
            await self.membership.changed.wait(1.0)
        self._phase = "ok"

    def _engines_for(self, model: str, architecture: str) -> tuple[str, ...]:
        settings = self.settings
        wanted = settings.model_engines.get(model)
        engines = this_machine.engines_for(self._registry, settings.engine, wanted, architecture)
        return self._models.speeds.ordered(model, engines, num_chosen=int(engines[:1] == (wanted,)))

    def _engines_of(self, card: ModelCard) -> tuple[str, ...]:
        if card.architecture == SERVED_ARCHITECTURE:
            return self.membership.own.engines_for(card.name)
        return self._engines_for(card.name, card.architecture)

    async def _announce_speeds(self) -> None:
        """Publishes the measured speeds, and the order of the engines that follows from them."""
        engines = await asyncio.to_thread(self._model_engines)
        speeds = self._models.speeds.published()
        self.membership.describe(replace(self.membership.own, model_engines=engines, engine_speeds=speeds))

    def _speed_needs(self) -> SpeedNeeds:
        host, membership = self._hosting.host, self.membership

        def is_busy() -> bool:
            loads = any(
                held.state is InstanceState.LOADING and self.node_id in held.plan.member_ids
                for _, held in membership.view.instances()
            )
            return loads or bool(self.observation.work() or sum(stage.beat.sequences for stage in host.beats()))

        return SpeedNeeds(
            self._engines_for,
            is_busy,
            host.usable_bytes,
            lambda: [(held.plan.model, held.plan.model_digest) for _, held in membership.view.instances()],
            lambda: next(iter(membership.own.devices), None),
            self._announce_speeds,
        )

    async def _announce_models(self) -> None:
        await announce_models(self._models.catalogue, self.membership, self._model_engines, is_sure=True)

    def _model_engines(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The engines that run each model on this machine; see PeerInfo.model_engines. Blocking."""
        architectures = self._models.catalogue.local_architectures.items()
        return tuple((name, self._engines_for(name, architecture)) for name, architecture in architectures)

    def _read_telemetry(self) -> Telemetry:
        self._sequence += 1
        return own_reading(
            self.membership,
            self._hosting.host,
            self._machine,
            sequence=self._sequence,
            reasons=self._health.problems(),
            keys_digest=self.keys.digest,
            fetch_room_bytes=self._models.downloads.room.num_bytes,
            headroom_bytes=self._hosting.monitor.headroom_bytes,
            entry_requests=self._owning.owned_rings.use.own_report(),
        )

    def _peer_left(self, peer: PeerInfo, records: list[Record]) -> None:
        self._owning.owned_rings.owner_left(peer, records)

    async def _before_refute(self) -> None:
        await self._owning.owned_rings.free_beaten()

    def _entry(self, name: str, peers: Sequence[str], card: ModelCard) -> ModelEntry:
        ready = tuple(instance.plan.instance_id for instance in self._owning.instances.of_model(name))
        is_loading = bool(self._owning.instances.of_model(name, InstanceState.LOADING))
        aliases, profile = self._models.profiles.of(card)
        about = self._models.shelf.card(card.name)
        served = self._models.served
        return ModelEntry(
            name,
            tuple(peers),
            ready,
            card.context_length,
            card.eos_ids,
            is_loading,
            aliases,
            profile,
            num_bytes=card.total_bytes,
            num_layers=card.num_layers,
            quantization=(about.quantization if about is not None else None) or "",
            dtype=card.dtype,
            digest=card.digest.removeprefix(SERVED_DIGEST),
            served=served.find(name) if card.architecture == SERVED_ARCHITECTURE else None,
            stand_ins=tuple(one for other in served.standing_for(name) if (one := served.find(other)) is not None),
            tasks=self._models.shelf.tasks_of(card),
        )
