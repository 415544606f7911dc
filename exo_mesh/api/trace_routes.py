"""Handlers for traces: of this node, of the whole mesh, and of one request at any peer."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.errors import InputError
from exo_mesh.node.inspection.trace_formats import chrome_trace, trace_stats
from exo_mesh.rings.serving.traces import MAX_TRACES, RequestTrace
from exo_mesh.security.api_keys import Role
from exo_mesh.settings.effective import shared_text

SHARE = "trace_sample"
"""The setting that PUT /v1/tracing changes; see exo_mesh.settings.effective."""

MAX_IDS = 10 * MAX_TRACES


class DeleteTracesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/traces/delete: exactly one of the two fields is required."""

    trace_ids: list[str] = []
    all: bool = False


class TracingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PUT /v1/tracing. sample: the share of new requests to trace, above 0 and at most 1; null means all."""

    enabled: bool
    sample: float | None = None


class TraceRoutes:
    """Each method answers one route. Callers who are not admins see only traces of their own requests."""

    def __init__(self, context: ApiContext) -> None:
        self._inspection = context.services.inspection
        self._desk = context.options.config
        self._body_silence_s = context.options.body_silence_s

    async def tracing(self, request: web.Request) -> web.Response:
        """GET /v1/tracing: the tracing of this node. origin "mesh": set by PUT /v1/tracing or PUT /config for all
        peers, except those started with --trace-sample. export: the state of the export to a collector; null if no
        collector is configured."""
        effective = self._desk.effective
        sample, origin = effective.now.trace_sample, effective.origin(SHARE)
        is_on = SHARE in self._desk.shared_texts and float(self._desk.shared_texts[SHARE]) > 0
        export = self._inspection.trace_export
        if export is not None and request[CALLER].role is not Role.ADMIN:
            export = {name: value for name, value in export.items() if name not in ("endpoint", "error")}
        found = {"object": "tracing", "enabled": is_on, "sample": sample, "origin": origin.partition(":")[0]}
        return json_response({**found, "export": export})

    async def switch(self, request: web.Request) -> web.Response:
        """PUT /v1/tracing: {"enabled": true} traces every new request at all peers, or with `sample` a share of them;
        {"enabled": false} goes back to the --trace-sample of each node."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=TracingBody))
        share = 1.0 if body.sample is None else body.sample
        if not 0.0 < share <= 1.0:
            raise InputError(f"sample must be above 0 and at most 1, not {body.sample}", param="sample")
        await self._desk.change({SHARE: shared_text(SHARE, share) if body.enabled else None})
        return await self.tracing(request)

    async def here(self, request: web.Request) -> web.Response:
        """GET /v1/traces"""
        data = self._inspection.traces(request[CALLER].limited_to)
        return json_response({"object": "list", "data": data})

    async def everywhere(self, request: web.Request) -> web.Response:
        """GET /v1/traces/cluster: the traces of all peers; of peers that do not answer within 2 s only the name."""
        found = await self._inspection.cluster_traces(request[CALLER].limited_to)
        return json_response({"object": "list", **found})

    async def one(self, request: web.Request) -> web.Response:
        """GET /v1/traces/{id}: one trace in the Trace Event Format, by its trace id or any id of its request."""
        found = await self._found(request)
        return _not_found(request) if found is None else json_response(chrome_trace(found))

    async def stats(self, request: web.Request) -> web.Response:
        """GET /v1/traces/{id}/stats: the total time per stage and phase."""
        found = await self._found(request)
        return _not_found(request) if found is None else json_response(trace_stats(found))

    async def raw(self, request: web.Request) -> web.Response:
        """GET /v1/traces/{id}/raw: the same as /v1/traces/{id}, as a file that a browser saves."""
        found = await self._found(request)
        if found is None:
            return _not_found(request)
        name = "".join(char if char.isascii() and char.isalnum() else "-" for char in found.trace_id)
        return json_response(
            chrome_trace(found), headers={"Content-Disposition": f'attachment; filename="{name}.json"'}
        )

    async def delete(self, request: web.Request) -> web.Response:
        """POST /v1/traces/delete: delete the traces with these ids, or all, at every peer that answers."""
        body = await read_as(request, self._body_silence_s, partial(decode_body, kind=DeleteTracesBody))
        if body.all == bool(body.trace_ids):
            raise InputError('send either "trace_ids" with at least one id, or "all": true', param="trace_ids")
        if len(body.trace_ids) > MAX_IDS:
            message = f"trace_ids has {len(body.trace_ids)} ids; at most {MAX_IDS} are allowed"
            raise InputError(message, param="trace_ids")
        deleted = await self._inspection.delete_traces(None if body.all else body.trace_ids)
        return json_response({"object": "traces.deleted", **deleted})

    async def _found(self, request: web.Request) -> RequestTrace | None:
        return await self._inspection.trace(request.match_info["id"], request[CALLER].limited_to)


def _not_found(request: web.Request) -> web.Response:
    wanted = request.match_info["id"]
    return plain_error(
        "not_found", f"no peer that answers has a trace {wanted}; GET /v1/traces/cluster lists the traces", "id"
    )
