"""Handlers for the operational routes. They need no loaded model, and answer while a model loads."""

from __future__ import annotations

import re

from aiohttp import web
from msgspec import UNSET, structs

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.api.access import CALLER, STRANGER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, quoted
from exo_mesh.domain.reports import (
    HealthReport,
    NodeHealth,
    Readiness,
    ReasonReport,
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


def _for_caller(health: HealthReport, request: web.Request) -> HealthReport:
    """Remove names, paths and models from a health report for callers who may not call the API."""
    if request[CALLER] != STRANGER:
        return health
    reasons = [ReasonReport(reason.code, reason.level) for reason in health.reasons]
    return structs.replace(health, reasons=reasons, peer_health=UNSET, instance_health=UNSET)
