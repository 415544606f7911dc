"""Handlers for running answers: list them, read them from another client, and stop them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import SECRET_HEADER, ApiContext
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.streams.dialects import reply_of
from exo_mesh.api.streams.following import follow_stream
from exo_mesh.rings.serving.streams import FoundStream, StreamViewer, hash_of_secret


class StreamRoutes:
    """Each method answers one route. An answer of another caller is reported as not running."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._requests = context.services.requests

    async def streams(self, request: web.Request) -> web.Response:
        """GET /v1/streams: the caller's running answers at all peers."""
        found = await self._requests.streams.find(_viewer(request))
        sees_all = request[CALLER].limited_to is None
        return json_response({"object": "list", "data": [_described(one, sees_all) for one in found]})

    async def attach(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: stream a running answer in the dialect of its request; with Last-Event-ID only the
        events after it."""
        viewer, stream_id = _viewer(request), request.match_info["id"]
        found = await self._find(viewer, stream_id)
        if not found:
            return _not_running(stream_id)
        return await follow_stream(self._context, request, found[0], viewer, reply_of)

    async def stop(self, request: web.Request) -> web.Response:
        """DELETE /v1/streams/{id}: stop a running answer for all its readers."""
        stream_id = request.match_info["id"]
        found = await self._find(_viewer(request), stream_id)
        stopped = [await self._requests.cancel(one) for stream in found for one in stream.request_ids]
        if not any(stopped):
            return _not_running(stream_id)
        return json_response({"id": stream_id, "object": "stream.deleted", "deleted": True})

    async def _find(self, viewer: StreamViewer, stream_id: str) -> list[FoundStream]:
        """The running answer with this id: at most one. Ids are printable ASCII; other ids are not looked up."""
        plain = stream_id.isascii() and stream_id.isprintable()
        return (await self._requests.streams.find(viewer, stream_id))[:1] if plain else []


def _viewer(request: web.Request) -> StreamViewer:
    secret = request.headers.get(SECRET_HEADER) or request.query.get("secret", "")
    return StreamViewer(request[CALLER].limited_to, hash_of_secret(secret))


def _described(found: FoundStream, sees_all: bool) -> dict[str, Any]:
    return {
        "id": found.id,
        "object": "stream",
        "created": found.created,
        "model": found.model,
        "peer": found.peer_id,
        "choices": len(found.request_ids),
        "state": "generating" if found.output_tokens else "waiting",
        "output_tokens": found.output_tokens,
        **({"key_id": found.key_id} if sees_all else {}),
    }


def _not_running(stream_id: str) -> web.Response:
    return plain_error("not_found", f"no running answer {stream_id} that you may see", "id")
