"""The routes that tend a single peer through any node: drain it, and read its log."""

from __future__ import annotations

import re

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.routes import ADMIN, Route, RouteTable
from exo_mesh.errors import InputError
from exo_mesh.telemetry.log_ring import MAX_RECORDS


class PeerRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._service = context.service

    def table(self) -> RouteTable:
        """The routes."""
        peer = {"node_id": "id or name of a peer; this node by default"}
        # fmt: off
        return [
            Route(
                "POST", ("/admin/drain",), self.drain, ADMIN, "Let a node take nothing new", errors=(404, 503),
                query=peer,
            ),
            Route(
                "DELETE", ("/admin/drain",), self.undo_drain, ADMIN, "Let a node take requests again",
                errors=(404, 503), query=peer,
            ),
            Route(
                "GET", ("/admin/log",), self.log, ADMIN, "The last log records of a node", errors=(400, 404, 503),
                query={**peer, "n": f"most records, 1 to {MAX_RECORDS}; 100 by default"},
            ),
        ]
        # fmt: on

    async def drain(self, request: web.Request) -> web.Response:
        """POST /admin/drain[?node_id=…]"""
        return await self._drain(request, on=True)

    async def undo_drain(self, request: web.Request) -> web.Response:
        """DELETE /admin/drain[?node_id=…]"""
        return await self._drain(request, on=False)

    async def log(self, request: web.Request) -> web.Response:
        """GET /admin/log[?node_id=…&n=100]: oldest first. Only for admins: it names addresses, paths and models."""
        wanted, text = request.query.get("node_id", ""), request.query.get("n", "100")
        if not re.fullmatch(r"[1-9][0-9]{0,2}", text) or int(text) > MAX_RECORDS:
            raise InputError(f"n must be a whole number from 1 to {MAX_RECORDS}, not {text[:20]!r}", param="n")
        found = await self._service.peer_desk.log(wanted, int(text))
        return _no_peer(wanted) if found is None else json_response({"object": "list", "data": found})

    async def _drain(self, request: web.Request, *, on: bool) -> web.Response:
        wanted = request.query.get("node_id", "")
        node_id = await self._service.peer_desk.drain(wanted, on=on)
        return json_response({"draining": on, "node_id": node_id}) if node_id else _no_peer(wanted)


def _no_peer(wanted: str) -> web.Response:
    return plain_error("not_found", f"there is no live peer {wanted[:80]}; GET /state lists them", "node_id")
