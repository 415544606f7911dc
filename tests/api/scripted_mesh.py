"""A scripted service and a real server on loopback: what the tests of the API talk to."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace
from openai import AsyncOpenAI

from exo_mesh.api.app import app_runner, build_app
from exo_mesh.api.connections import ApiServer, ConnectionBounds
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.api.core.texts import TextModels
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, entry_of
from exo_mesh.domain.embedding import DECODER_TASKS
from exo_mesh.domain.peer_names import peer_named
from exo_mesh.domain.reports import HealthReport, InstanceReport, QueueReport, RunnerReport, StateReport, TopologyReport
from exo_mesh.domain.request import (
    FinishReason,
    GenerateRequest,
    Progress,
    PromptLogprob,
    PromptLogprobs,
    RequestEvent,
    TokenEvent,
    TokenLogprob,
)
from exo_mesh.errors import CancelledRequestError, FetchError, MeshError, NotFetchedError, UnknownModelError
from exo_mesh.mesh.membership.known_peers import KnownPeer
from exo_mesh.mesh.membership.sleeping import WakeCall
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.fetcher.wire import HubModel
from exo_mesh.node.service import Services
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving import calls as serving_calls
from exo_mesh.rings.serving.answer_stages import AnsweredRequest, AnsweredRequests
from exo_mesh.rings.serving.explanations import Explanation, Explanations
from exo_mesh.rings.serving.kept_answers import KeptAnswers
from exo_mesh.rings.serving.kept_service import KeptService
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.stream_service import StreamService
from exo_mesh.rings.serving.traces import RequestTrace, TraceStore
from exo_mesh.security.api_tls import ApiTls
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template import ChatTemplate, Message
from exo_mesh.text.tokenizer import TextModel
from tests.support.neighbours import Neighbours
from tests.support.reports import report_of

Script = Callable[[GenerateRequest], AsyncGenerator[TokenEvent | Progress, None]]


@dataclass
class ScriptedMesh:
    """The smallest honest services of a node: one model, whose output is `answer`, or whatever `script` says. It holds
    what they do and have heard."""

    directory: Path
    answer: str = "Hello, world!"
    script: Script | None = None
    cached: int = 0
    """Tokens of every prompt that came from the prefix cache."""
    limit: int = 256
    names: tuple[str, ...] = ("exo-mesh-demo",)
    requests: list[GenerateRequest] = field(default_factory=list)
    specs: list[InstanceSpec] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    is_reading: bool = False
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    explanations: Explanations = field(default_factory=Explanations)
    answered: AnsweredRequests = field(default_factory=AnsweredRequests)
    status: str = "ok"
    draining: bool = False
    at_hub: tuple[str, ...] = ("m", "org/at-hub")
    """Models that no peer has and the hub has; `offline`: nobody asks it."""
    offline: bool = False
    progress: list[DownloadEntry] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    deleted: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    deleted_traces: set[str] = field(default_factory=set)
    trace_export: dict[str, Any] | None = None
    tasks: tuple[str, ...] = DECODER_TASKS
    loaded: tuple[str, ...] = ()
    """The instances of each model that are ready."""
    noted_templates: dict[str, ChatTemplate] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    """How long each instance may be unused, as clients set it."""
    live: LiveStreams = field(default_factory=LiveStreams)
    answers: KeptAnswers = field(default_factory=lambda: KeptAnswers(3600.0, monotonic))
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a request has left the service, however it ended."""

    def __post_init__(self) -> None:
        self.text = TextModel.open(self.directory)
        self.instances = [report_of(InstanceReport, id="i1", model=self.names[0], state="ready")]
        scripted: Any = (ScriptedModels, ScriptedInstances, ScriptedRequests, ScriptedPeers, ScriptedStore)
        scripted += (ScriptedObservation, ScriptedInspection)
        self.services = Services(*(service(self) for service in scripted))

    @property
    def request(self) -> GenerateRequest:
        """The last request."""
        return self.requests[-1]

    def peer_named(self, peer: str) -> str:
        known = [KnownPeer("peer1", "alpha"), KnownPeer("n1234567", "beta")]
        return peer_named(peer, known).id if peer else "peer1"

    def of(self, key_id: str | None, request_id: str = "") -> list[GenerateRequest]:
        """Requests that came with an API key, newest first."""
        return [
            request
            for request in reversed(self.requests)
            if key_id in (None, request.key_id) and request_id in ("", request.request_id)
        ]

    async def echo(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        if request.embed is not None:
            width = request.embed.dimensions or 4
            yield TokenEvent(0, None, finish=FinishReason.STOP, vector=struct.pack("<f", 0.5) * min(width, 4))
            return
        for event in self.events(self.text.encode_text(self.answer), request):
            yield event

    def events(self, ids: Iterable[int], request: GenerateRequest) -> list[TokenEvent]:
        """Events as a driver makes them: max_tokens is kept, and the end of the answer is a stop."""
        ids = list(ids)
        if not request.max_tokens:
            return [TokenEvent(0, None, finish=FinishReason.LENGTH)]
        wanted = request.sampling.logprobs
        top = tuple(TokenLogprob(i, -1.0 - i) for i in range(wanted or 0))
        events = [
            TokenEvent(i, token_id, None if wanted is None else -0.5, top)
            for i, token_id in enumerate(ids[: request.max_tokens])
        ]
        if self.cached:
            events[0] = replace(events[0], cached=self.cached)
        finish = FinishReason.STOP if len(ids) < request.max_tokens else FinishReason.LENGTH
        if finish is FinishReason.STOP:
            return [*events, TokenEvent(len(events), None, finish=finish)]
        last = events[-1]
        return [*events[:-1], TokenEvent(last.index, last.token_id, last.logprob, last.top, finish)]


@dataclass
class ScriptedModels:
    """One model here, and others at the hub."""

    _mesh: ScriptedMesh

    def all(self) -> list[ModelEntry]:
        return [
            ModelEntry(name, ("peer1",), self._mesh.loaded, self._mesh.limit, (), tasks=self._mesh.tasks)
            for name in self._mesh.names
        ]

    async def named(self, name: str) -> ModelEntry:
        for entry in self.all():
            if entry.name == name:
                return entry
        raise UnknownModelError(f"no peer has {name}", param="model")

    def engines_of(self, card: TomlCard) -> tuple[str, ...]:
        return ("mlx", "torch")

    def cards_without_files(self) -> list[TomlCard]:
        return [TomlCard(id=name, n_layers=4, source="a test") for name in self._mesh.at_hub]

    async def find(self, name: str, *, may_download: bool) -> ModelEntry:
        if not self._mesh.offline and name in self._mesh.at_hub:
            if not may_download:
                raise NotFetchedError(f'no peer has a model "{name}"', param="model")
            self._mesh.names += (name,)
            self._mesh.at_hub = tuple(one for one in self._mesh.at_hub if one != name)
        return await self.named(name)

    def downloads(self) -> list[DownloadEntry]:
        return list(self._mesh.progress)

    async def start_download(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False
    ) -> list[DownloadEntry]:
        found = await self.find(model, may_download=True)
        started = [
            entry_of(peer, f"name of {peer}", DownloadInfo(found.name, DownloadState.PENDING, 0, 100, is_whole=whole))
            for peer in peers or ("peer1",)
        ]
        self._mesh.progress += started
        return started

    async def cancel_download(self, peer: str, model: str) -> bool:
        named = self._mesh.peer_named(peer)
        kept = [one for one in self._mesh.progress if (one.peer_id, one.model) != (named, model)]
        found, self._mesh.progress = len(kept) < len(self._mesh.progress), kept
        return found

    async def delete(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        self._mesh.deleted.append((name, tuple(peers)))
        return {"peer1": 1_500_000} if name in self._mesh.names else {}

    async def search(self, query: str, limit: int) -> list[HubModel]:
        if self._mesh.offline:
            raise FetchError("this node is offline, so the hub is not asked", remedy="start it without --offline")
        return [HubModel(name, num_bytes=10**9) for name in self._mesh.at_hub if query in name][:limit]

    async def add_card(self, repo: str) -> ModelEntry:
        self._mesh.cards.append(repo)
        return ModelEntry(repo, (), (), self._mesh.limit, ())

    async def delete_card(self, name: str) -> bool:
        found = name in self._mesh.cards
        self._mesh.cards = [card for card in self._mesh.cards if card != name]
        return found

    async def storage(self) -> dict[str, Any]:
        return {"path": "/models", "models": [{"name": name, "bytes": 1, "used_at": 0.0} for name in self._mesh.names]}

    async def at(self, path: Path) -> str:
        if path == self._mesh.directory:
            return self._mesh.names[0]
        raise UnknownModelError(f"{path} is not a model directory of this node", param="model")

    def unusable(self) -> dict[str, str]:
        return self._mesh.unusable

    def is_reading(self) -> bool:
        return self._mesh.is_reading

    async def text_files(self, name: str) -> Path:
        return self._mesh.directory

    def note_template(self, name: str, template: ChatTemplate) -> None:
        self._mesh.noted_templates[name] = template


@dataclass
class ScriptedInstances:
    """Places anything at once."""

    _mesh: ScriptedMesh

    async def context_limit(self, name: str) -> int:
        return self._mesh.limit

    async def create(self, spec: InstanceSpec) -> InstanceReport:
        self._mesh.specs.append(spec)
        number = len(self._mesh.instances) + 1
        self._mesh.instances.append(report_of(InstanceReport, id=f"i{number}", model=spec.model, state="ready"))
        return self._mesh.instances[-1]

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[InstanceReport]:
        return [await self.create(spec) for _ in range(count)]

    async def previews(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        self._mesh.specs.append(spec)
        request = {"model": spec.model}
        return [
            {"width": 1, "policies": ["memory"], "context_limit": self._mesh.limit, "stages": [], "request": request}
        ]

    async def preview(self, spec: InstanceSpec) -> dict[str, Any]:
        return (await self.previews(spec))[0]

    async def delete(self, instance_id: str) -> bool:
        kept = [instance for instance in self._mesh.instances if instance.id != instance_id]
        found, self._mesh.instances = len(kept) < len(self._mesh.instances), kept
        return found

    def keep_loaded(self, instance_id: str, idle_s: float) -> None:
        self._mesh.kept[instance_id] = idle_s

    def idle_left_s(self, instance_id: str) -> float | None:
        left_s = self._mesh.kept.get(instance_id, -1.0)
        return None if left_s < 0 else left_s


@dataclass
class ScriptedRequests:
    """Answers as the script says."""

    _mesh: ScriptedMesh

    def _neighbours(self) -> Any:
        nothing: Any = None
        return Neighbours("peer1", serving_calls.answers("peer1", nothing, self._mesh.live, self._mesh.answers))

    @property
    def streams(self) -> StreamService:
        return StreamService(self._neighbours(), self._mesh.live)

    @property
    def kept_answers(self) -> KeptService:
        return KeptService(self._neighbours(), self._mesh.answers)

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        self._mesh.requests.append(request)
        cancelled = self._mesh.running[request.request_id] = asyncio.Event()
        live = self._mesh.live.choice(request.request_id)
        try:
            if request.prompt_logprobs is not None:
                top = tuple(TokenLogprob(i, -1.0 - i) for i in range(request.prompt_logprobs))
                yield PromptLogprobs(tuple(PromptLogprob(i, -0.25 * i, top) for i in range(1, len(request.prompt_ids))))
            async for event in (self._mesh.script or self._mesh.echo)(request):
                if cancelled.is_set():
                    raise CancelledRequestError("the request was cancelled")
                if live is not None:
                    self._mesh.live.add(live, event)
                yield event
        except MeshError as exc:
            if live is not None:
                live.end(exc)
            raise
        finally:
            del self._mesh.running[request.request_id]
            self._mesh.ended.set()

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        found = [one for one in self._mesh.of(key_id) if request_id in (one.request_id, one.trace_id, *one.names)]
        running = [one.request_id for one in found if one.request_id in self._mesh.running]
        for name in running:
            self._mesh.running[name].set()
        return bool(running)


class ScriptedPeers:
    """Two peers: peer1, called alpha, and n1234567, called beta."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh
        self.stops, self.sleeps = self, ScriptedSleepDesk()

    async def tell(self, peer: str, *, restart: bool) -> str:
        return self._mesh.peer_named(peer)

    def drain_here(self, *, on: bool) -> None:
        self._mesh.draining = on

    async def drain(self, peer: str, *, on: bool) -> str:
        self._mesh.draining = on
        return self._mesh.peer_named(peer)

    async def log(self, peer: str, records: int) -> list[dict[str, Any]]:
        self._mesh.peer_named(peer)
        lines = [{"time": 1.0, "level": "info", "logger": "exo_mesh.a", "message": f"line {n}"} for n in range(3)]
        return lines[-records:]

    def lift_quarantine(self) -> int:
        return 1


class ScriptedSleepDesk:
    """Two peers hear of a sleep; the peer "sleeper" can be woken, and nobody else is known."""

    async def sleep(self) -> int:
        return 2

    def awake(self) -> None:
        pass

    async def wake(self, wanted: str) -> WakeCall:
        return WakeCall(peer_named(wanted, [KnownPeer("n9", "sleeper")]), ("n1",))


class ScriptedStore:
    """None is configured, unless a test sets `store`."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self.store: Any = None

    @property
    def is_configured(self) -> bool:
        return self.store is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@dataclass
class ScriptedObservation:
    """What a node reports that has the scripted instances and requests."""

    _mesh: ScriptedMesh

    def state(self) -> StateReport:
        shown = report_of(StateReport, health=self.health())
        shown.view.instances = self._mesh.instances
        return shown

    def drain_state(self) -> dict[str, Any]:
        return {"draining": self._mesh.draining, "drained": self._mesh.draining, "requests": 0, "sequences": 0}

    def queue(self) -> QueueReport:
        running = len(self._mesh.running)
        return QueueReport(running, 32, 0, running, running)

    def recent_requests(self, most: int, key_id: str | None = None) -> list[dict[str, Any]]:
        return [{"request_id": request.request_id} for request in self._mesh.of(key_id)[:most]]

    def explanation(self, request_id: str, key_id: str | None = None) -> Explanation | None:
        return self._mesh.explanations.find(request_id, key_id)

    def answered(self, request_id: str, key_id: str | None = None) -> AnsweredRequest | None:
        found = self._mesh.answered.find(request_id)
        return found if found is not None and key_id in (None, found.key_id) else None

    def request_stats(self) -> dict[str, Any]:
        return {"total": len(self._mesh.requests)}

    def identity(self) -> dict[str, Any]:
        return {"node_id": "peer1", "name": "alpha", "incarnation": 1}

    def runner(self) -> RunnerReport:
        return RunnerReport("subprocess", "busy" if self._mesh.running else "idle")

    def idle_instances(self) -> list[str]:
        return [] if self._mesh.running else [instance.id for instance in self._mesh.instances]

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        return {"pressure_pct": 10.0, "peers": [{}] if whole_mesh else None}

    def memory_live(self) -> list[dict[str, float]]:
        return [{"pressure_pct": 10.0}]

    async def view_change(self, timeout_s: float) -> bool:
        return await self._mesh.changed.wait(timeout_s)

    def topology(self) -> TopologyReport:
        return report_of(TopologyReport)

    def health(self) -> HealthReport:
        reasons = [] if self._mesh.status == "ok" else [{"code": "starting", "message": "not yet", "remedy": "wait"}]
        return report_of(HealthReport, status=self._mesh.status, reasons=reasons, peer_health=[], instance_health=[])


@dataclass
class ScriptedInspection:
    """Traces of the scripted requests, and diagnostics of two peers."""

    _mesh: ScriptedMesh

    def traced(self, key_id: str | None) -> TraceStore:
        """A store with the traces of all requests so far, as their entry peer has it."""
        store = TraceStore(now=lambda: 1_700_000_000.0)
        for request in reversed(self._mesh.of(key_id)):
            if request.trace_id and request.trace_id not in self._mesh.deleted_traces:
                store.open(request, self._mesh.names[0], len(request.prompt_ids), 0.0)
        return store

    @property
    def trace_export(self) -> dict[str, Any] | None:
        return self._mesh.trace_export

    def traces(self, key_id: str | None = None) -> list[dict[str, Any]]:
        return [trace.describe() for trace in self.traced(key_id).all()]

    async def cluster_traces(self, key_id: str | None = None) -> dict[str, Any]:
        return {"data": self.traces(key_id), "unreachable": []}

    async def trace(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        return self.traced(key_id).find(wanted)

    async def delete_traces(self, trace_ids: Sequence[str] | None) -> dict[str, Any]:
        before = len(self.traces())
        self._mesh.deleted_traces.update(trace_ids or [row["trace_id"] for row in self.traces()])
        return {"deleted": before - len(self.traces()), "unreachable": []}

    @property
    def diagnostics(self) -> ScriptedInspection:
        return self

    def node_timeline(self) -> list[dict[str, Any]]:
        return [{"at": at, "until": at, "phase": "idle", "runner": "i1[0:4]"} for at in (1.0, 2.0, 3.0)]

    async def capture(self, peer: str = "", runner: str = "") -> dict[str, Any] | None:
        return {"node_id": self._mesh.peer_named(peer), "processes": []} if runner in ("", "i1") else None

    async def cancel_runner(self, peer: str, runner: str, request_id: str = "") -> dict[str, Any] | None:
        if self._mesh.peer_named(peer) != "peer1" or runner != "i1":
            return None
        cancelled = [
            await self._mesh.services.requests.cancel(name)
            for name in list(self._mesh.running)
            if request_id in ("", name)
        ]
        return {"instance": "i1", "cancelled": sum(cancelled), "unreachable": []}

    async def of(self, peer: str = "") -> dict[str, Any]:
        return {**self.own_diagnostics(), "node_id": self._mesh.peer_named(peer)}

    def own_diagnostics(self) -> dict[str, Any]:
        return {"node_id": "peer1", "requests": [{"request_id": one.request_id} for one in self._mesh.requests]}

    async def cluster(self) -> dict[str, Any]:
        return {"nodes": [self.own_diagnostics()], "unreachable": []}

    async def cluster_timeline(self) -> dict[str, Any]:
        return {"entries": [], "left_out": 0, "unreachable": []}


@dataclass
class Served:
    """A server with its service and clients."""

    mesh: ScriptedMesh
    url: str
    http: aiohttp.ClientSession
    ollama_url: str = ""
    """The address of the port for clients of Ollama, if there is one."""

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """Made when a test first asks for it: it reads all certificates of the system."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0)

    async def chat(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST a chat of one user message; status and body."""
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        async with self.http.post("/v1/chat/completions", json=body) as reply:
            return reply.status, await reply.json()


compile_once = cache(CompiledTemplate.compile)


class TemplatesRenderedHere(TemplateRenderer):
    """It renders in this process, since starting another one for each test would take longer than most of them."""

    async def compile(self, template: ChatTemplate) -> ChatTemplate:
        compiled = compile_once(template.source, template.where)
        return replace(template, variables=compiled.variables)

    async def try_out(self, template: ChatTemplate, variables: Mapping[str, Any]) -> ChatTemplate:
        compiled = compile_once(template.source, template.where)
        return replace(template, traits=compiled.traits(variables), is_tried=True)

    async def render(self, template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
        return compile_once(template.source, template.where).render(messages, **options)


@asynccontextmanager
async def served(
    mesh: ScriptedMesh,
    options: ApiOptions,
    bounds: ConnectionBounds | None = None,
    tls: ApiTls | None = None,
    templates: TemplateRenderer | None = None,
    *,
    ollama: bool = False,
    clock: Clock = monotonic,
) -> AsyncIterator[Served]:
    """templates: the real ones, for tests that are about them. ollama: with a port for clients of Ollama. clock: the
    deadlines of connections follow it."""
    texts = TextModels(templates or TemplatesRenderedHere())
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2 if ollama else 1)]
    ports = [listening.getsockname()[1] for listening in sockets]
    if ollama:
        options = replace(options, ollama_port=ports[1])
    runner = app_runner(build_app(mesh.services, options, now=lambda: 1_700_000_000.0, texts=texts))
    server_of_api = ApiServer(runner, bounds, tls, clock)
    await server_of_api.start(*sockets)
    url, *others = (f"http://127.0.0.1:{port}" for port in ports)
    async with aiohttp.ClientSession(url) as http:
        server = Served(mesh, url, http, *others)
        yield server
        if "openai" in vars(server):
            await server.openai.close()
    await server_of_api.stop()
    for listening in sockets:
        listening.close()
