"""The node object: starts and stops the parts of this peer, and holds its services."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from exo_mesh import PROTOCOL_VERSION
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.telemetry.start_phases import StartPhases
from exo_mesh.domain.device import API
from exo_mesh.engine.registry import Registry, load_registry
from exo_mesh.errors import MeshError
from exo_mesh.machine import this_machine
from exo_mesh.machine.interfaces import recent_interfaces
from exo_mesh.machine.memory import MemoryReader, read_memory
from exo_mesh.machine.wake_on_lan import own_macs
from exo_mesh.mesh.discovery.choose import discoveries_for
from exo_mesh.mesh.discovery.port import Announcement, Discovery
from exo_mesh.mesh.discovery.static import StaticDiscovery
from exo_mesh.mesh.membership.calls import answer_datagram
from exo_mesh.node.background import start_background
from exo_mesh.node.wiring import NodeParts, Tuning
from exo_mesh.rings.placing.hostfile_rank import own_rank
from exo_mesh.settings.config import Settings
from exo_mesh.settings.effective import EffectiveSettings

_log = logging.getLogger(__name__)


class Node:
    """This peer. Construct it, `await start()` once, use its `services`, `await finish()` if there is time, and `await
    stop()` (within 5 s). origins: of the settings, as in LoadedSettings. on_settings: called with the settings in force
    when they change."""

    def __init__(
        self,
        settings: Settings,
        *,
        origins: Mapping[str, str] | None = None,
        on_settings: Callable[[Settings], object] = lambda settings: None,
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
            EffectiveSettings(settings, origins, on_settings),
            registry or load_registry().configured(settings.engine, settings.engine_options),
            found,
            memory_reader,
            tuning or Tuning(),
            clock,
            rng or random.Random(),
            lambda: self._phase,
        )
        self.metrics, self.membership = parts.metrics, parts.membership
        self.keys, self.shared, self.hub_token = parts.keys, parts.shared, parts.models.exchange.hub_token
        self.services = services = parts.services
        self.models, self.instances, self.requests = services.models, services.instances, services.requests
        self.peers, self.store = services.peers, services.store
        self.observation, self.inspection = services.observation, services.inspection
        self._models, self._hosting = parts.models, parts.hosting
        self._owning, self._serving = parts.owning, parts.serving
        self._server, self._tasks = parts.server, parts.tasks

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
            settings.host, port, partial(answer_datagram, self.membership.probing.answer_datagram)
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
                on_disk=await self._parts.on_disk.first_look(),
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
        if self.observation.inspection.exporter is not None:
            await self.observation.inspection.exporter.close()
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
