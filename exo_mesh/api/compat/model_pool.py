"""The lists of models that pages of the first exo read: `/initial_models` and `/modelpool`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.errors import json_response
from exo_mesh.api.sse import DONE, EventStream, data_frame
from exo_mesh.domain.download import DownloadState


class ModelPoolRoutes:
    """Each method answers one route."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def initial(self, request: web.Request) -> web.Response:
        """GET /initial_models: an object with an entry per model."""
        return json_response(self._entries())

    async def pool(self, request: web.Request) -> web.StreamResponse:
        """GET /modelpool: the entries as events, then [DONE]."""
        if request.method == "HEAD":
            return json_response(self._entries())
        stream = EventStream(request, self._context.options.stall_limit_s, self._context.watchdog)
        await stream.start()
        await stream.send(*(data_frame({name: entry}) for name, entry in self._entries().items()), DONE)
        return stream.response

    def _entries(self) -> dict[str, dict[str, Any]]:
        """By model: models on disk, and downloads that have not ended. total_size, total_downloaded: bytes."""
        models = self._context.services.models
        found = {
            model.name: _entry(
                model.name, 0 if model.is_partial else model.num_bytes, model.num_bytes, is_whole=not model.is_partial
            )
            for model in models.all()
        }
        for one in models.downloads():
            if one.state in (DownloadState.PENDING, DownloadState.ONGOING):
                found[one.model] = _entry(one.model, one.done_bytes, one.total_bytes, is_whole=False)
        return found


def _entry(name: str, num_done: int, num_total: int, *, is_whole: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "downloaded": is_whole,
        "download_percentage": 100.0 if is_whole else round(100 * num_done / max(1, num_total), 1),
        "total_size": num_total,
        "total_downloaded": num_done,
        "loading": False,
    }
