"""The handlers of the diagnostic routes: what each node, and all together, went through. No prompt, no answer.

Callers who are no admin are shown no ids of requests: these are of other callers, too.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.routes import ADMIN, USE, Route, RouteTable

REQUEST_IDS = frozenset({"request_id", "trace_id", "key_id"})


class DiagnosticRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._service = context.service

    def table(self) -> RouteTable:
        """The routes."""
        base = "/v1/diagnostics"
        # fmt: off
        return [
            Route("GET", (f"{base}/node",), self.node, USE, "All that this node knows of itself"),
            Route(
                "DELETE", (f"{base}/node/quarantine",), self.lift_quarantine, ADMIN,
                "Try again what got stuck or crashed here",
            ),
            Route("GET", (f"{base}/cluster",), self.cluster, USE, "The same of every node that answers"),
            Route("GET", (f"{base}/cluster/timeline",), self.timeline, USE, "The phases of all runners, by time"),
            Route("GET", (f"{base}/cluster/{{id}}",), self.one, USE, "What one node knows of itself", errors=(404,)),
        ]
        # fmt: on

    async def node(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/node: this node."""
        return json_response(_for_caller(await self._service.observation.diagnostics_of(), request))

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster: every node that answers within 2 s; the others by name."""
        return json_response(_for_caller(await self._service.observation.cluster_diagnostics(), request))

    async def timeline(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/timeline: the phases of all runners, by time."""
        return json_response(_for_caller(await self._service.observation.cluster_timeline(), request))

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/{id}: one node by its id, or the first digits of it."""
        wanted = request.match_info["id"]
        found = await self._service.observation.diagnostics_of(wanted)
        if found is None:
            return plain_error("not_found", f"there is no live peer {wanted}; GET /state lists them", "id")
        return json_response(_for_caller(found, request))

    async def lift_quarantine(self, request: web.Request) -> web.Response:
        """DELETE /v1/diagnostics/node/quarantine: try again here what got stuck or crashed."""
        return json_response({"object": "quarantine.lifted", "lifted": self._service.lift_quarantine()})


def _for_caller(found: Any, request: web.Request) -> Any:
    if request[CALLER].limited_to is not None:
        remove_request_ids(found)
    return found


def remove_request_ids(value: Any) -> None:
    """Delete the ids of requests from a JSON value, wherever they are in it; peers of any version may have sent it."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            for name in REQUEST_IDS & item.keys():
                del item[name]
            left += item.values()
        elif isinstance(item, list):
            left += item
