"""Builds a node and its HTTP API from the settings."""

from __future__ import annotations

import errno
import logging
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exo_mesh import __version__
from exo_mesh.api.access import HEALTH_PATHS, METRICS_PATHS, AccessPolicy
from exo_mesh.api.app import app_runner, build_app
from exo_mesh.api.connections import ApiServer, ConnectionBounds, bound_socket
from exo_mesh.api.context import ApiOptions, RequestDefaults
from exo_mesh.api.web.languages import PageLanguages
from exo_mesh.api.web.members import member_urls
from exo_mesh.api.webtools.options import WebToolOptions
from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.node_logs import LoneLogs, NodeLogs
from exo_mesh.base.telemetry.start_phases import StartPhases
from exo_mesh.cli.screen import NodeFacts
from exo_mesh.domain.addresses import needs_interface
from exo_mesh.domain.device import PeerInfo
from exo_mesh.engine.contract import ChecksOptions
from exo_mesh.engine.floors import OTHER_ENGINES, mlx_obstacle_here, too_old, upgrade
from exo_mesh.engine.registry import Registry, load_registry
from exo_mesh.errors import MeshError, TransportError
from exo_mesh.machine import open_files
from exo_mesh.machine.fake_memory import reader_for
from exo_mesh.models.server_options import server_options
from exo_mesh.node.node import Node
from exo_mesh.security.api_keys import FILE_NAME, KeyFile
from exo_mesh.security.api_tls import ApiTls
from exo_mesh.security.invitations import Invitations
from exo_mesh.security.joining import Gift
from exo_mesh.security.local_token import take_token
from exo_mesh.security.own_nodes import ListeningMark
from exo_mesh.security.secret import exposure
from exo_mesh.security.sessions import PageSessions
from exo_mesh.settings.config import ConfigError, LoadedSettings, Settings
from exo_mesh.settings.default_paths import models_dirs, own_nodes_dir

if TYPE_CHECKING:
    from exo_mesh.api.core.image_trail import ImageTrail

API_PORT_TRIES = 50
_log = logging.getLogger(__name__)
ENGINE_EXTRAS = ("mlx", "torch")
"""Extras of this package that install the libraries of engines."""


_PATHS_BY_NAME = {"health": HEALTH_PATHS, "metrics": METRICS_PATHS}
"""Paths of the API by the words of --open-paths."""


class AddressInUseError(TransportError):
    """The port that the user named is taken."""

    code = "address_in_use"


class RunningNode:
    """A node with its HTTP API. Call start, then stop; stop may also follow a start that failed."""

    def __init__(self, loaded: LoadedSettings, logs: NodeLogs | None = None) -> None:
        self._loaded = loaded
        self._logs = logs
        self._phases = StartPhases()
        self._settings = replace(loaded.settings, models_dirs=models_dirs(loaded.settings, os.environ))
        self._registry = load_registry().configured(loaded.settings.engine, loaded.settings.engine_options)
        self._node: Node | None = None
        self._socket: socket.socket | None = None
        self._ollama_socket: socket.socket | None = None
        self._api: ApiServer | None = None
        self._tls: ApiTls | None = None
        self._notes: list[str] = []
        self._policy = AccessPolicy()
        self._web_tools = WebToolOptions()
        self._mark: ListeningMark | None = None

    async def start(self) -> None:
        """Binds the API's port, starts the node, serves. Raises ConfigError, AddressInUseError or another MeshError."""
        settings = self._settings
        _check_engine(self._registry, settings.engine)
        _check_model_engines(self._registry, settings.model_engines)
        check_options(self._registry, settings)
        missing = [path for path in self._loaded.settings.models_dirs if not path.is_dir()]
        self._notes += [f"the models directory {path} {_why_missing(path)}" for path in missing]
        self._notes += [f"{old}: {upgrade(extra)}" for extra in ENGINE_EXTRAS if (old := too_old(extra))]
        # NumPy is the slow fallback, so the user should know why MLX cannot run
        if _chosen(self._registry, settings.engine)[0] == "numpy" and (obstacle := mlx_obstacle_here()):
            self._notes.append(f"{obstacle}: {OTHER_ENGINES}")
        if settings.secret_file and settings.secret:
            self._notes += filter(None, [exposure(settings.secret_file)])
        if settings.api and settings.tls_cert and settings.tls_key:
            self._tls = _api_tls(settings.tls_cert, settings.tls_key)
            self._notes += filter(None, [exposure(settings.tls_key, "the file")])
        if settings.api:
            self._web_tools = WebToolOptions.of(settings)
            KeyFile(settings.home / FILE_NAME).read()
            self._socket = self._bind_api()
            self._ollama_socket = self._bind_ollama()
        read_memory = reader_for(settings.override_memory_bytes, settings.fake_mem_file)
        self._node = Node(
            settings,
            origins=self._loaded.origins,
            on_settings=self._follow_logs,
            registry=self._registry,
            memory_reader=read_memory,
        )
        self._follow_logs(self._node.shared.effective.now)
        self._phases.done("settings")
        await self._node.start(self._phases)
        if settings.grpc_port not in (0, self._node.grpc_port):
            self._notes.append(f"port {settings.grpc_port} is taken: peers reach this node on {self._node.grpc_port}")
        if self._socket is not None:
            self._policy = self._access_policy(self._node)
            options = self._api_options(self._node)
            runner = app_runner(build_app(self._node.services, options))
            bounds = ConnectionBounds.within(open_files.limit(), tls=self._tls is not None)
            self._api = ApiServer(runner, bounds, self._tls)
            await self._api.start(*filter(None, (self._socket, self._ollama_socket)))
            self._mark_listening(self._socket)
            self._node.announce_api(self._url(_reachable_host(self._node)))
        self._phases.done("API")
        self._log_ready()

    def _api_options(self, node: Node) -> ApiOptions:
        shared, metrics, settings = node.shared, node.metrics, self._settings
        return ApiOptions(
            registry=lambda: metrics.registry,
            responses=metrics.http_responses,
            access=self._policy,
            invitations=self._invitations(node),
            defaults=lambda: RequestDefaults.of(shared.effective.now),
            config=shared,
            hub_token=node.hub_token,
            config_file=str(self._loaded.config_file),
            logs=self._logs or LoneLogs(),
            headless=settings.headless,
            languages=PageLanguages(settings.page_languages, settings.page_languages_dir),
            ollama_port=self._ollama_socket.getsockname()[1] if self._ollama_socket is not None else None,
            web_tools=self._web_tools,
            image_trail=_image_trail(settings),
        )

    def _follow_logs(self, settings: Settings) -> None:
        """Applies the log settings in force, also when the mesh changes them later."""
        if self._logs is not None:
            self._logs.follow(settings.log_format, settings.log_level)

    def _log_ready(self) -> None:
        """Logs how long the start took and where the API is."""
        _log.info("started in %.2f s: %s", self._phases.total_s, self._phases)
        url = self._url(_local_host(self._settings.host))
        if not url:
            _log.info("ready, without an API (--no-api)")
            return
        page = "off (--headless)" if self._settings.headless else f"{url}/"
        _log.info("ready: API %s/v1, page %s, health %s/health", url, page, url)
        if self._ollama_socket is not None:
            _log.info("clients of Ollama are answered at port %d, too", self._ollama_socket.getsockname()[1])

    def facts(self) -> NodeFacts:
        """Facts about the started node, for people and programs."""
        assert self._node is not None, "the node has been started"
        own = self._node.membership.own
        state = self._node.observation.state()
        reading = state.telemetry.get(own.id)
        engine, reason = _chosen(self._registry, self._settings.engine)
        url = self._url(_local_host(self._settings.host))
        return NodeFacts(
            node_id=own.id,
            name=own.name,
            version=__version__,
            grpc_address=own.addresses[0],
            addresses=own.addresses,
            api_url=url,
            engine=engine,
            engine_reason=reason,
            usable_bytes=reading.usable_bytes if reading else 0,
            total_bytes=reading.total_bytes if reading else 0,
            models=own.models,
            namespace=own.namespace,
            mesh_is_open=not self._settings.secret,
            home=str(self._settings.home),
            access=self._policy.describe() if self._socket is not None else "",
            needs_key=self._socket is not None and not self._policy.is_open,
            tls_cert=str(self._settings.tls_cert or "") if self._tls else "",
            notes=(*self._notes, *(str(reason.message) for reason in state.health.reasons)),
            page_url="" if self._settings.headless or not url else f"{url}/",
            health_url=url and f"{url}/health",
            started_s=round(self._phases.total_s, 3),
            role=own.role,
        )

    def status_line(self) -> str:
        """The state of the started node in one line, for the process that supervises it, such as systemd."""
        assert self._node is not None, "the node has been started"
        health = self._node.observation.health()
        reasons = "; ".join(str(reason.message) for reason in health.reasons)
        num_instances = len(self._node.observation.state().view.instances)
        api = self._url(_local_host(self._settings.host)) or "no API"
        found = f"{counted(health.peers - 1, 'other peer')}; {counted(num_instances, 'instance')}"
        line = f"{health.status}; {api}; {found}"
        return f"{line} ({reasons})" if reasons else line

    async def asked_to_stop(self) -> str:
        """Waits until a peer or a caller of the API stops or restarts the node; returns "stop" or "restart"."""
        assert self._node is not None, "the node has been started"
        await self._node.peers.stops.asked.wait()
        return "restart" if self._node.peers.stops.wants_restart else "stop"

    async def finish(self) -> None:
        """Lets running streams finish; see Node.finish."""
        assert self._node is not None, "the node has been started"
        await self._node.finish()

    async def stop(self) -> None:
        """Ends requests, runners and connections, in this order."""
        if self._mark is not None:
            self._mark.close()
        if self._api is not None:
            self._api.stop_listening()
        for listening in filter(None, (self._socket, self._ollama_socket)):
            listening.close()
        if self._node is not None:
            await self._node.stop()
        if self._api is not None:
            await self._api.stop()

    def _url(self, host: str) -> str:
        """The URL of the API with this host; "" without an API."""
        if self._socket is None:
            return ""
        return f"{'https' if self._tls else 'http'}://{host}:{self._socket.getsockname()[1]}"

    def _access_policy(self, node: Node) -> AccessPolicy:
        settings = self._settings
        try:
            token = take_token(settings.home)
        except OSError as exc:
            token = ""
            self._notes.append(f"no client has local rights: no token in {settings.home}: {exc.strerror or exc}")
        closed = {path for name, paths in _PATHS_BY_NAME.items() if name not in settings.open_paths for path in paths}
        return AccessPolicy(
            keys=node.keys.file,
            needs_key=bool(settings.secret),
            local_token=token,
            open_admin=settings.open_admin,
            closed_paths=frozenset(closed),
            cors_origins=frozenset(settings.cors_origins),
            member_origins=lambda: _member_origins(node),
            allowed_hosts=frozenset({*settings.allowed_hosts, platform.node().lower()} - {""}),
            sessions=_sessions(settings.secret, node.keys.file) if settings.secret else None,
        )

    def _invitations(self, node: Node) -> Invitations:
        settings = self._settings
        peer = node.membership.own.addresses[0]
        gift = Gift(settings.secret, settings.namespace, settings.name, peer) if settings.secret else None
        return Invitations(gift, lambda: api_addresses(node.membership.own))

    def _mark_listening(self, bound: socket.socket) -> None:
        """Writes the file that shows the command line of this machine where it may send the local token."""
        try:
            host, port = bound.getsockname()[:2]
            self._mark = ListeningMark(
                self._settings.home,
                host,
                port,
                name=self._settings.host,
                certificate=self._settings.tls_cert if self._tls else None,
                registry=own_nodes_dir(),
            )
        except OSError as exc:
            self._notes.append(f"commands on this machine cannot use the local token: {exc.strerror or exc}")

    def _bind_ollama(self) -> socket.socket | None:
        """Binds a socket to --ollama-port; None without this setting, or with a note if the port is taken: a model
        server may run there, and the API is complete without this port."""
        host, port = self._settings.host, self._settings.ollama_port
        if port is None:
            return None
        try:
            return bound_socket(host, port)
        except OSError as exc:
            why = "is taken" if exc.errno == errno.EADDRINUSE else f"cannot be used ({exc.strerror or exc})"
            self._notes.append(f"--ollama-port {port} {why}: clients of Ollama reach this node below /ollama")
            return None

    def _bind_api(self) -> socket.socket:
        """Binds a socket to the API's port. If that port is taken and was not named, tries the next ones."""
        host, port = self._settings.host, self._settings.api_port
        tries = 1 if self._loaded.was_set("api_port") or port == 0 else API_PORT_TRIES
        for candidate in range(port, port + tries):
            try:
                bound = bound_socket(host, candidate)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise ConfigError(f"--host {host}: {exc.strerror or exc}") from exc
                continue
            if candidate != port:
                self._notes.append(f"port {port} is taken: the API is on {candidate}")
            return bound
        raise AddressInUseError(
            f"the API port {port} on {host} is taken; name another with --api-port, or 0 for any free one"
        )


def _api_tls(certificate: Path, key: Path) -> ApiTls:
    try:
        return ApiTls(certificate, key)
    except ValueError as exc:
        raise ConfigError(f"--tls-cert, --tls-key: {exc}", param="tls_cert") from exc


def _sessions(secret: str, keys: KeyFile) -> PageSessions:
    """The sessions of a closed mesh."""
    from exo_mesh.security.keys import session_key  # imports cryptography, which an open mesh does not need

    return PageSessions(session_key(secret), keys)


def _check_engine(registry: Registry, name: str) -> None:
    """Raises ConfigError if a named engine cannot run. With "auto" a node needs no engine: it can be an entry peer."""
    if name != "auto":
        try:
            registry.choose(name)
        except MeshError as exc:
            raise ConfigError(f"--engine {name}: {exc}") from exc


def _why_missing(path: Path) -> str:
    return f"is a file: name its folder, {path.parent}" if path.exists() else "does not exist"


def _check_model_engines(registry: Registry, model_engines: Mapping[str, str]) -> None:
    """Raises ConfigError if an engine named for a model cannot run here. Placement checks if it supports the model."""
    for model, engine in model_engines.items():
        try:
            registry.choose(engine)
        except MeshError as exc:
            raise ConfigError(f"--model-engine {model}={engine}: {exc}") from exc


def check_options(registry: Registry, settings: Settings) -> None:
    """Checks the options of engines: an engine in use must accept each --engine-option, and the engine that
    --server-option names must accept its own. Raises ConfigError."""
    servers = [name for name, provider in registry.providers.items() if provider.kind == "whole-model"]
    for key in settings.server_options:
        if not key.startswith(tuple(f"{name}." for name in servers)):
            raise ConfigError(
                f"--server-option {key}: must begin with the name of an engine and a dot; they are {', '.join(servers)}"
            )
    engine = _chosen(registry, "auto")[0] if settings.engine == "auto" else settings.engine
    engines = dict.fromkeys(name for name in (engine, *settings.model_engines.values()) if name)
    refusals = [(name, _refusal(registry, name, settings.engine_options)) for name in engines]
    if refusals and all(why for _, why in refusals):
        raise ConfigError(f"--engine-option of {'; '.join(f'{name}: {why}' for name, why in refusals)}")
    for name, options in server_options(settings, registry).items():
        if why := _refusal(registry, name, options):
            raise ConfigError(f"model servers of engine {name}: {why}")


def _refusal(registry: Registry, name: str, options: Mapping[str, str]) -> str:
    """Why an engine cannot use these options; "" if it can."""
    provider = registry.provider(name)
    if options and isinstance(provider, ChecksOptions):
        try:
            provider.check_options(options)
        except MeshError as exc:
            return str(exc)
    return ""


def _chosen(registry: Registry, preference: str) -> tuple[str, str]:
    """(engine, why it was chosen), or ("", why no engine can run)."""
    try:
        provider = registry.choose(preference)
    except MeshError as exc:
        return "", str(exc)
    why = "as asked" if preference != "auto" else "the best that runs here"
    return provider.name, f"{why} ({provider.availability().reason})"


def _local_host(host: str) -> str:
    """The host for URLs that are used on this machine."""
    if host in ("0.0.0.0", "::", "[::]"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def api_addresses(own: PeerInfo) -> tuple[str, ...]:
    """Addresses (host:port, with https:// if TLS) at which other machines may reach the API, the best first. Link-local
    IPv6 addresses only if there is no other, because people have to add an interface to them."""
    scheme, _, rest = own.api_url.partition("://")
    prefix, port = "" if scheme == "http" else f"{scheme}://", rest.rpartition(":")[2]
    hosts = list(dict.fromkeys(one.rpartition(":")[0] for one in own.addresses))
    hosts = [host for host in hosts if not needs_interface(host)] or hosts
    return tuple(f"{prefix}{host}:{port}" for host in hosts)


def _member_origins(node: Node) -> frozenset[str]:
    """The web origins from which live members serve their pages."""
    peers = node.membership.view.peers()
    return frozenset(url.lower() for peer in peers for url in member_urls(peer.api_url, peer.addresses, peer.name))


def _reachable_host(node: Node) -> str:
    """The host for URLs that other machines use: the host of the first control address."""
    return node.membership.own.addresses[0].rpartition(":")[0]


def _image_trail(settings: Settings) -> ImageTrail | None:
    """The trail of images that the settings ask for; None if they ask for none."""
    if not settings.image_transport_debug and settings.vision_debug_save_dir is None:
        return None
    from exo_mesh.api.core.image_trail import ImageTrail  # for people who look for a mistake

    return ImageTrail(settings.image_transport_debug, settings.vision_debug_save_dir)
