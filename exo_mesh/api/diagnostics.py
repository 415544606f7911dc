"""The handlers of the diagnostic routes: what each node, and all together, went through. No prompt, no answer."""

from __future__ import annotations

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error


class DiagnosticRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._service = context.service

    async def node(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/node: this node."""
        return json_response(await self._service.observation.diagnostics_of())

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster: every node that answers within 2 s; the others by name."""
        return json_response(await self._service.observation.cluster_diagnostics())

    async def timeline(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/timeline: the phases of all runners, by time."""
        return json_response(await self._service.observation.cluster_timeline())

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/{id}: one node by its id, or the first digits of it."""
        wanted = request.match_info["id"]
        found = await self._service.observation.diagnostics_of(wanted)
        if found is None:
            return plain_error("not_found", f"there is no live peer {wanted}; GET /state lists them", "id")
        return json_response(found)

    async def lift_quarantine(self, request: web.Request) -> web.Response:
        """DELETE /v1/diagnostics/node/quarantine: try again here what got stuck or crashed."""
        return json_response({"object": "quarantine.lifted", "lifted": self._service.lift_quarantine()})
