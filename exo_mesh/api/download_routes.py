"""Handlers for downloads: start, cancel, and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web

from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.errors import json_response, plain_error, quoted
from exo_mesh.api.model_names import named_model
from exo_mesh.api.model_routes import peer_names
from exo_mesh.api.sse import EventStream, comment_frame, data_frame
from exo_mesh.base.clock import monotonic
from exo_mesh.domain.download import DownloadEntry
from exo_mesh.errors import InputError

MAX_MODEL_CHARS = 300


class DownloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /download/start."""

    model: str
    peers: list[str] = []
    whole: bool = False


class DownloadRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models

    async def start(self, request: web.Request) -> web.Response:
        """POST /download/start: download each peer's share of a model, or the whole model; answers at once."""
        body = await read_as(request, self._context.options.body_silence_s, partial(decode_body, kind=DownloadBody))
        if not 0 < len(body.model) <= MAX_MODEL_CHARS or not body.model.isprintable():
            message = f"model must be the name of a model, with 1 to {MAX_MODEL_CHARS} printable characters"
            raise InputError(message, param="model")
        peers = peer_names(body.peers)
        model = await named_model(request, self._models, body.model)
        return json_response(_listed(await self._models.start_download(model, peers=peers, whole=body.whole)), 202)

    async def cancel(self, request: web.Request) -> web.Response:
        """DELETE /download/{node}/{model}: cancel the download of one peer, by its name or id. The bytes that it has
        are kept."""
        node, model = request.match_info["node"], request.match_info["model"]
        if not await self._models.cancel_download(node, model):
            message = f"peer {node} is not downloading {model}; GET /v1/download/progress lists the downloads"
            return plain_error("not_found", message, "model")
        return json_response({"id": model, "object": "download.cancelled", "peer": node, "cancelled": True})

    async def progress(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/download/progress: the downloads of all peers; with `stream=1` as events, one for each change."""
        if request.method == "HEAD" or not _wants_events(request):
            return json_response(_listed(self._models.downloads()))
        options = self._context.options
        stream = EventStream(request, options.stall_limit_s, self._context.watchdog)
        await stream.start()
        sent: Sequence[DownloadEntry] | None = None
        quiet_since = monotonic()
        while True:
            entries = self._models.downloads()
            if entries != sent:
                await stream.send(data_frame(_listed(entries)))
                sent, quiet_since = entries, monotonic()
            elif monotonic() - quiet_since >= options.progress_comment_s:
                await stream.send(comment_frame("keep-alive"))
                quiet_since = monotonic()
            await asyncio.sleep(options.progress_s)


def _wants_events(request: web.Request) -> bool:
    """Whether the client asks for events, by `stream` or by Accept. Raises InputError for a wrong value of `stream`."""
    match request.query.get("stream"):
        case None:
            return "text/event-stream" in request.headers.get(hdrs.ACCEPT, "")
        case "1" | "true":
            return True
        case "0" | "false":
            return False
        case other:
            raise InputError(f"stream is {quoted(other)}; it must be 1 or 0", param="stream")


def _listed(entries: Sequence[DownloadEntry]) -> dict[str, Any]:
    return {"object": "list", "data": [entry.describe() for entry in entries]}
