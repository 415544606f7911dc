"""The node object: starts and stops the parts of this peer, and implements MeshService."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.telemetry.start_phases import StartPhases
from exo_mesh.domain.device import API
from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.engine.registry import Registry, load_registry
from exo_mesh.errors import MeshError, NodeStoppingError, NotReadyError
from exo_mesh.machine import this_machine
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.machine.memory import MemoryReader, read_memory
from exo_mesh.machine.wake_on_lan import own_macs
from exo_mesh.mesh.discovery.choose import discoveries_for
from exo_mesh.mesh.discovery.port import Announcement, Discovery
from exo_mesh.mesh.discovery.static import StaticDiscovery
from exo_mesh.mesh.membership.port import raise_bugs
from exo_mesh.mesh.membership.sleeping import SleepDesk
from exo_mesh.mesh.membership.stopping import StopDesk
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.fetcher.wire import HubModel
from exo_mesh.node.background import start_background
from exo_mesh.node.inspection.desk import Inspection
from exo_mesh.node.instance_desk import InstanceDesk
from exo_mesh.node.model_list import ModelList
from exo_mesh.node.parts import NodeParts, Tuning
from exo_mesh.node.store_desk import StoreDesk
from exo_mesh.rings.hosting.calls import drain_here
from exo_mesh.rings.hosting.peer_desk import PeerDesk
from exo_mesh.rings.placing.hostfile_rank import own_rank
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.calls import cancel
from exo_mesh.rings.serving.kept_desk import KeptDesk
from exo_mesh.rings.serving.stream_desk import StreamDesk
from exo_mesh.settings.config import Settings
from exo_mesh.text.template import ChatTemplate

_log = logging.getLogger(__name__)


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
        tuning: Tuning | None = None,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        own = own_rank(settings, os.environ)
        self.settings = settings = own.settings(settings)
        self._static_rank = own.rank
        self._clock = clock
        self._phase = "starting"
        found = [*(discoveries_for(settings) if discoveries is None else discoveries)]
        found += [StaticDiscovery(own.addresses)] if own.addresses else []
        self._parts = parts = NodeParts(
            settings,
            origins,
            registry or load_registry().configured(settings.engine, settings.engine_options),
            found,
            memory_reader,
            tuning or Tuning(),
            clock,
            rng or random.Random(),
            lambda: self._phase,
        )
        self.metrics, self.membership, self.observation = parts.metrics, parts.membership, parts.observation
        self.keys, self.shared, self.hub_token = parts.keys, parts.shared, parts.models.exchange.hub_token
        self._models, self._hosting = parts.models, parts.hosting
        self._owning, self._serving = parts.owning, parts.serving
        self._desk, self._server, self._tasks = parts.desk, parts.server, parts.tasks
        self._list = ModelList(self.node_id, parts.models, parts.owning.instances)
        self._placing = InstanceDesk(parts.membership, parts.models, parts.owning)

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
        if settings.probe_datagrams and await self._parts.probe_port.start(
            settings.host, port, self.membership.answer_probe_datagram
        ):
            self.membership.take_datagrams()
        phases.done("control port")
        device = await asyncio.to_thread(
            this_machine.device, self._parts.registry, settings.engine, self._parts.machine.memory.follow
        )
        phases.done("engines")
        await self._models.exchange.start(self._hosting.host.is_in_use)
        await self._models.catalogue.rescan(is_first=True)
        model_engines = await asyncio.to_thread(self._parts.engines.of_local_models)
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
                on_disk=await self._models.kept.first_look(),
            )
        )
        self._hosting.host.start()
        self._owning.start()
        start_background(self._parts, port)
        await self._start_discoveries(port)
        phases.done("discovery")
        if not device.engine and self.membership.own.role != API:
            self._parts.health.note(
                "no_engine", f"no engine can run for --engine {settings.engine}", "pip install exo-mesh[mlx]"
            )
        if settings.wait_for_peers:
            self._phase = "waiting_for_peers"
            self._tasks.start(self._await_peers(), "wait for peers")
        else:
            self._phase = "ok"
        _log.info("node %s (%s) listens on %s:%d", settings.name, self.node_id[:8], settings.host, port)

    async def _start_discoveries(self, port: int) -> None:
        settings = self.settings
        own = Announcement(settings.namespace, self.node_id, port, settings.name, PROTOCOL_VERSION)
        for discovery in self._parts.discoveries:
            try:
                await discovery.start(own, self.membership.suggest)
            except MeshError as exc:
                self._parts.health.note(
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
        await asyncio.gather(*(discovery.stop() for discovery in self._parts.discoveries))
        await self._owning.stop()
        await self._hosting.host.stop()
        await self._models.downloads.close()
        await self.membership.stop()
        await self._serving.stop()
        await self._server.stop()
        self._parts.probe_port.stop()
        await self._models.exchange.stop()
        self._parts.machine.close()
        self._models.texts.close()
        await self._models.catalogue.close()
        self._parts.identity.release()

    def announce_api(self, url: str) -> None:
        """Publishes the URL of this node's HTTP API to the mesh."""
        self.membership.describe(replace(self.membership.own, api_url=url))

    # MeshService

    def models(self) -> list[ModelEntry]:
        return self._list.all()

    def known_cards(self) -> list[TomlCard]:
        return self._list.cards_without_files()

    async def model(self, name: str) -> ModelEntry:
        return await self._list.of_name(name)

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

    def is_reading_models(self) -> bool:
        return self._models.catalogue.is_reading

    async def text_files(self, name: str) -> Path:
        return await self._models.texts.directory(name)

    def note_template(self, name: str, template: ChatTemplate) -> None:
        self._models.profiles.note_tried(name, template)

    async def context_limit(self, name: str) -> int:
        return await self._placing.context_limit(name)

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
        calls, everybody = self.membership.calls, self.membership.everybody
        answers = await asyncio.gather(  # a client may use one x-request-id at several peers
            *(cancel(calls, peer.id, request_id, key_id) for peer in everybody), return_exceptions=True
        )
        raise_bugs(answers)
        return any(answer is True for answer in answers)

    async def create_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        return await self._placing.create(spec)

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[dict[str, Any]]:
        return await self._placing.create_replicas(spec, count)

    async def preview_instances(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        return await self._placing.previews(spec)

    async def preview_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        return await self._placing.preview(spec)

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
        drain_here(self._hosting.host, on=on)

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
                self._parts.health.missed_peers(found)
                break
            await self.membership.changed.wait(1.0)
        self._phase = "ok"
