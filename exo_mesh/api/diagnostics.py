"""Handlers for the diagnostic routes: the state and recent events of each node and of all nodes. No prompt, no answer.

Only admins see the ids of requests, because other callers made some of those requests.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.routes import NDJSON
from exo_mesh.errors import InputError
from exo_mesh.node.inspection.diagnostics import MAX_TIMELINE

REQUEST_IDS = frozenset({"request_id", "trace_id", "key_id"})


class DiagnosticRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._peers = context.services.peers
        self._inspection = context.services.inspection

    async def node(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/node: diagnostics of this node."""
        return json_response(_for_caller(await self._inspection.diagnostics.of(), request))

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster: every node's diagnostics; of nodes that do not answer within 2 s only the
        name."""
        return json_response(_for_caller(await self._inspection.diagnostics.cluster(), request))

    async def timeline(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/timeline: the phases of all runners, by time."""
        return json_response(_for_caller(await self._inspection.diagnostics.cluster_timeline(), request))

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/diagnostics/cluster/{id}: diagnostics of one node, by its name, its id or the first digits of it."""
        found = await self._inspection.diagnostics.of(request.match_info["id"])
        return json_response(_for_caller(found, request))

    async def capture(self, request: web.Request) -> web.Response:
        """POST /v1/diagnostics/node/capture, /v1/diagnostics/cluster/{id}/capture: stacks and memory maps of processes;
        takes up to some seconds."""
        wanted, runner = request.match_info.get("id", ""), request.query.get("runner", "")
        found = await self._inspection.capture(wanted, runner)
        return _nothing_there(wanted, runner) if found is None else json_response(found)

    async def cancel_runner(self, request: web.Request) -> web.Response:
        """POST …/runners/{runner}/cancel: cancel the requests of a runner; the runner itself keeps running."""
        wanted, runner = request.match_info.get("id", ""), request.match_info["runner"]
        done = await self._inspection.cancel_runner(wanted, runner, request.query.get("request_id", ""))
        return _nothing_there(wanted, runner) if done is None else json_response({"object": "runner.cancelled", **done})

    async def events(self, request: web.Request) -> web.Response:
        """GET /events[?since=…&n=1000&scope=cluster]: the flight recorder, oldest first. Each phase is one line; a
        phase that still lasts appears again in later calls, with a later `until`."""
        since, most = _since(request.query.get("since", "0")), request.query.get("n", "1000")
        scope = request.query.get("scope", "node")
        if not re.fullmatch(r"[1-9][0-9]{0,3}", most) or int(most) > MAX_TIMELINE:
            raise InputError(f"n must be a whole number from 1 to {MAX_TIMELINE}, not {quoted(most)}", param="n")
        if scope not in ("node", "cluster"):
            raise InputError(f"scope is {quoted(scope)}; it must be node or cluster", param="scope")
        if scope == "cluster":
            entries = (await self._inspection.diagnostics.cluster_timeline())["entries"]
        else:
            entries = self._inspection.diagnostics.node_timeline()
        lines = [msgspec.json.encode(entry) for entry in entries if entry["until"] > since][-int(most) :]
        return web.Response(body=b"".join(line + b"\n" for line in lines), content_type=NDJSON)

    async def lift_quarantine(self, request: web.Request) -> web.Response:
        """DELETE /v1/diagnostics/node/quarantine: allow again on this node what got stuck or crashed."""
        return json_response({"object": "quarantine.lifted", "lifted": self._peers.lift_quarantine()})


def _since(text: str) -> float:
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise InputError(f"since must be a Unix time in seconds, not {quoted(text)}", param="since")
    return since


def _nothing_there(peer: str, runner: str) -> web.Response:
    what = f"no runner {runner} on {peer or 'this node'}"
    return plain_error("not_found", f"{what}; GET /state lists peers and instances", "runner")


def _for_caller(found: Any, request: web.Request) -> Any:
    if request[CALLER].limited_to is not None:
        remove_request_ids(found)
    return found


def remove_request_ids(value: Any) -> None:
    """Delete the ids of requests from a JSON value, at any depth, because peers of any version may have sent it."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            for name in REQUEST_IDS & item.keys():
                del item[name]
            left += item.values()
        elif isinstance(item, list):
            left += item
