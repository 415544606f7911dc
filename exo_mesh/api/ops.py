"""Handlers for the operational routes. They need no loaded model, and answer while a model loads."""

from __future__ import annotations

import re
from functools import partial

from aiohttp import web
from msgspec import UNSET, structs
from msgspec.structs import replace

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.api.access import CALLER, STRANGER
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.model_names import find_model, named_model
from exo_mesh.api.placement_options import errors_name, instance_spec, names_of_query, preview_spec
from exo_mesh.api.routes import ADMIN, OPEN, USE, Route, RouteTable
from exo_mesh.api.schema import InstanceBody
from exo_mesh.domain.reports import (
    HealthReport,
    InstanceReport,
    NodeHealth,
    QueueReport,
    Readiness,
    ReasonReport,
    StateReport,
    TopologyReport,
)
from exo_mesh.errors import InputError

HEALTH = ("/health", "/healthcheck")
_ABLE = ("ok", "degraded")


class OpsRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.services.models
        self._instances = context.services.instances
        self._peers = context.services.peers
        self._observation = context.services.observation
        self._registry = context.options.registry
        self._body_silence_s = context.options.body_silence_s

    def table(self) -> RouteTable:
        """The routes."""
        # fmt: off
        return [
            Route("GET", ("/version",), self.version, OPEN, "Versions of the package and of the protocol"),
            Route(
                "GET", HEALTH, self.health, OPEN, "The health of the node, 503 unless it can serve",
                reply=NodeHealth, errors=(503,),
            ),
            Route("GET", ("/healthz",), self.alive, OPEN, "200 if the process is alive"),
            Route(
                "GET", ("/readyz",), self.ready, OPEN, "200 if it can serve, else 503 with reasons",
                reply=Readiness, errors=(503,),
            ),
            Route("GET", ("/metrics",), self.metrics, OPEN, "Metrics for Prometheus", content_type="text/plain"),
            Route(
                "GET", ("/state",), self.state, USE, "The shared view of the mesh, and telemetry of each peer",
                reply=StateReport,
            ),
            Route(
                "GET", ("/v1/topology", "/topology"), self.topology, USE, "Peers, links, cables and rings",
                reply=TopologyReport,
            ),
            Route("GET", ("/drain",), self.drain_state, USE, "Whether the node drains, and the requests that are left"),
            Route("POST", ("/drain",), self.drain, ADMIN, "Finish running requests and accept no new ones"),
            Route("DELETE", ("/drain",), self.undo_drain, ADMIN, "Accept requests again"),
            Route(
                "GET", ("/queue",), self.queue, USE, "Waiting and running requests of the drivers on this node",
                reply=QueueReport,
            ),
            Route(
                "GET", ("/requests/recent",), self.recent_requests, USE, "The outcomes of this node's last requests",
                errors=(400,), query={"n": "most requests, 1 to 9999"},
            ),
            Route("GET", ("/requests/stats",), self.request_stats, USE, "Totals over this node's requests"),
            Route(
                "GET", ("/memory",), self.memory, USE, "Memory of this machine, or of all machines",
                errors=(400,), query={"scope": "node or cluster"},
            ),
            Route("GET", ("/memory/live",), self.memory_live, USE, "Memory readings of the last 90 s"),
            Route(
                "POST", ("/instance",), self.create_instance, ADMIN, "Place a model and wait until it is ready",
                body=InstanceBody, status=201, errors=(400, 404, 408, 409, 413, 429, 500, 503, 504),
            ),
            Route(
                "GET", ("/instance/previews",), self.previews, USE, "The possible ways to place a model now",
                errors=(400, 404, 503, 504), query={"model": "the name of the model", "model_id": "same as model"},
            ),
            Route("GET", ("/instance/{id}",), self.instance, USE, "One instance", reply=InstanceReport, errors=(404,)),
            Route(
                "DELETE", ("/instance/{id}",), self.delete_instance, ADMIN, "Stop an instance at all peers",
                errors=(404, 503, 504),
            ),
        ]
        # fmt: on

    async def version(self, request: web.Request) -> web.Response:
        """GET /version"""
        return json_response({"version": __version__, "protocol": PROTOCOL_VERSION})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: the full health report of the node; 503 unless it can serve."""
        seen = self._observation
        runner, shown = seen.runner(), _for_caller(seen.health(), request)
        health = NodeHealth(
            **{name: getattr(shown, name) for name in shown.__struct_fields__},
            runner_mode=runner.runner_mode,
            runner_status=runner.runner_status,
            queue=seen.queue(),
            version=__version__,
        )
        if request[CALLER] != STRANGER:
            health.node_id = seen.identity()["node_id"]
        else:
            health.queue.instances = UNSET
        return json_response(health, 200 if health.status in _ABLE else 503)

    async def alive(self, request: web.Request) -> web.Response:
        """GET /healthz: answers while the process and its event loop run. Restart the node only if this fails."""
        return json_response({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """GET /readyz: 200 if the node can serve requests now, else 503 with the reasons."""
        health = _for_caller(self._observation.health(), request)
        ready = Readiness(health.status in _ABLE, health.status, health.reasons)
        return json_response(ready, 200 if ready.ready else 503)

    async def state(self, request: web.Request) -> web.Response:
        """GET /state"""
        return json_response(self._observation.state())

    async def topology(self, request: web.Request) -> web.Response:
        """GET /v1/topology"""
        return json_response(self._observation.topology())

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics, for Prometheus."""
        from exo_mesh.base.telemetry.exposition import (  # slow; not needed before the first scrape
            CONTENT_TYPE,
            exposition,
        )

        text = exposition(self._registry(), with_names=request[CALLER] != STRANGER) if self._registry else b""
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def drain(self, request: web.Request) -> web.Response:
        """POST /drain: finish running requests and accept no new ones."""
        self._peers.drain_here(on=True)
        return await self.drain_state(request)

    async def undo_drain(self, request: web.Request) -> web.Response:
        """DELETE /drain: accept requests again."""
        self._peers.drain_here(on=False)
        return await self.drain_state(request)

    async def drain_state(self, request: web.Request) -> web.Response:
        """GET /drain: whether the node drains, and the requests that are left."""
        return json_response(self._observation.drain_state())

    async def queue(self, request: web.Request) -> web.Response:
        """GET /queue: the waiting and running requests of the rings whose driver is on this node."""
        return json_response(self._observation.queue())

    async def recent_requests(self, request: web.Request) -> web.Response:
        """GET /requests/recent[?n=50]: the outcomes of the last requests with this node as entry peer; with a key of
        the role "use", only the requests of this key."""
        text = request.query.get("n", "50")
        if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
            raise InputError(f"n must be a whole number from 1 to 9999, not {quoted(text)}", param="n")
        found = self._observation.recent_requests(int(text), request[CALLER].limited_to)
        return json_response({"requests": found})

    async def request_stats(self, request: web.Request) -> web.Response:
        """GET /requests/stats"""
        return json_response(self._observation.request_stats())

    async def memory(self, request: web.Request) -> web.Response:
        """GET /memory[?scope=cluster]"""
        scope = request.query.get("scope", "node")
        if scope not in ("node", "cluster"):
            raise InputError(f"scope is {quoted(scope)}; it must be node or cluster", param="scope")
        return json_response(self._observation.memory(whole_mesh=scope == "cluster"))

    async def memory_live(self, request: web.Request) -> web.Response:
        """GET /memory/live: the memory readings of the last 90 s."""
        return json_response(self._observation.memory_live())

    async def create_instance(self, request: web.Request) -> web.Response:
        """POST /instance: place a model and wait until it is ready; `replicas`: the number of instances to place."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=InstanceBody))
        body.model = await self._found(request, body.model)
        spec = instance_spec(body)
        if body.replicas is not None:
            made = await self._instances.create_replicas(spec, body.replicas)
            return json_response({"object": "list", "data": made}, 201)
        return json_response(await self._instances.create(spec), 201)

    async def previews(self, request: web.Request) -> web.Response:
        """GET /instance/previews?model=…: the possible placements for the query (see wishes.preview_spec)."""
        with errors_name(names_of_query(request.query)):
            spec = preview_spec(request.query)
            spec = replace(spec, model=await self._found(request, spec.model))
            return json_response({"model": spec.model, "previews": await self._instances.previews(spec)})

    async def instance(self, request: web.Request) -> web.Response:
        """GET /instance/{id}"""
        instance_id = request.match_info["id"]
        placed = self._observation.state().view.instances
        found = next((one for one in placed if one.id == instance_id), None)
        return _no_instance(instance_id) if found is None else json_response(found)

    async def delete_instance(self, request: web.Request) -> web.Response:
        """DELETE /instance/{id}"""
        instance_id = request.match_info["id"]
        if not await self._instances.delete(instance_id):
            return _no_instance(instance_id)
        return json_response({"id": instance_id, "object": "instance.deleted", "deleted": True})

    async def _found(self, request: web.Request, name: str) -> str:
        """The name of a model that can be placed: a model of the mesh, or of the hub if the caller may download."""
        name = await named_model(request, self._models, name)
        return (await find_model(self._models, name, may_download=request[CALLER].may_download)).name


def _for_caller(health: HealthReport, request: web.Request) -> HealthReport:
    """Remove names, paths and models from a health report for callers who may not call the API."""
    if request[CALLER] != STRANGER:
        return health
    reasons = [ReasonReport(reason.code, reason.level) for reason in health.reasons]
    return structs.replace(health, reasons=reasons, peer_health=UNSET, instance_health=UNSET)


def _no_instance(instance_id: str) -> web.Response:
    return plain_error("not_found", f"no instance {instance_id}; GET /state lists the instances", "id")
