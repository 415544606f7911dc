"""Handlers for Ollama's routes around models: list, show, pull and delete; and for routes that exo-mesh does not
have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from aiohttp import web

from exo_mesh.api.body import read_as
from exo_mesh.api.context import ApiContext
from exo_mesh.api.download_routes import MAX_MODEL_CHARS
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.model_names import named_model
from exo_mesh.api.ollama.describing import (
    capabilities_of,
    details_of,
    digest_of,
    digest_of_name,
    listed_model,
    model_info_of,
    running_model,
)
from exo_mesh.api.ollama.lenient import B, decode_ollama_body, shown_options
from exo_mesh.api.ollama.lines import LINES, line_frame
from exo_mesh.api.ollama.objects import OllamaModels, OllamaProgress, OllamaShown, OllamaVersion
from exo_mesh.api.ollama.port import RUNNING
from exo_mesh.api.ollama.pulling import PullFollower, PullPhase
from exo_mesh.api.ollama.replies import rfc3339
from exo_mesh.api.ollama.schema import OllamaNamedBody, OllamaPullBody, OllamaShowBody
from exo_mesh.api.ollama.translate import named
from exo_mesh.api.sse import EventStream
from exo_mesh.base.clock import monotonic
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.errors import InputError

VERSION = "0.12.11"
"""The version of Ollama whose API these routes follow; some clients refuse servers that report an older one."""

NEVER_S = 100 * 365 * 86400.0
"""The time until a model that is never unloaded expires, as /api/ps shows it."""


class OllamaModelRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models
        self._instances = context.services.instances
        self._observation = context.services.observation

    async def root(self, request: web.Request) -> web.Response:
        """GET /ollama: what clients look for at their base URL."""
        return web.Response(text=RUNNING)

    async def version(self, request: web.Request) -> web.Response:
        """GET /api/version"""
        return json_response(OllamaVersion(VERSION))

    async def tags(self, request: web.Request) -> web.Response:
        """GET /api/tags: the models on the disks of all peers and at model servers."""
        since = rfc3339(self._context.started_at)
        return json_response(OllamaModels([listed_model(entry, since) for entry in self._models.all()]))

    async def loaded(self, request: web.Request) -> web.Response:
        """GET /api/ps: the models that have an instance; one line for each instance."""
        entries = {one: entry for entry in self._models.all() for one in entry.instance_ids}
        models = [
            running_model(entries[instance.id], instance, self._expiry(instance.id))
            for instance in self._placed()
            if instance.id in entries
        ]
        return json_response(OllamaModels(models))

    async def show(self, request: web.Request) -> web.Response:
        """POST /api/show: one model, its template and its sampling defaults."""
        name = await self._named(request, await self._read(request, OllamaShowBody))
        entry = await self._models.named(name)
        text = await self._context.texts.of(self._models, entry)
        defaults = text.defaults
        options = {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repeat_penalty": defaults.repetition_penalty,
        }
        shown = OllamaShown(
            license="",
            modelfile=f"FROM {entry.name}\n",
            parameters=shown_options(options),
            template=text.template.source if text.template is not None else "",
            details=details_of(entry),
            model_info=model_info_of(entry, [one for one in self._placed() if one.id in entry.instance_ids]),
            capabilities=capabilities_of(entry),
            modified_at=rfc3339(self._context.started_at),
        )
        return json_response(shown)

    async def pull(self, request: web.Request) -> web.StreamResponse:
        """POST /api/pull: download each peer's share of a model. The download continues if the client hangs up."""
        body = await self._read(request, OllamaPullBody)
        asked = await self._named(request, body)
        before = self._models.downloads()
        started = await self._models.start_download(asked)
        model = started[0].model if started else asked
        found = (digest_of(entry) for entry in self._models.all() if entry.name == model)
        digest = next(found, "") or digest_of_name(model)
        lines = self._pulled(PullFollower(model, digest, before, started, monotonic()))
        if body.stream is False:
            return json_response([line async for line in lines][-1])
        stream = EventStream(request, self._context.options.stall_limit_s, self._context.watchdog, LINES)
        await stream.start()
        async for line in lines:
            await stream.send(line_frame(line))
        return stream.response

    async def _pulled(self, follower: PullFollower) -> AsyncGenerator[OllamaProgress, None]:
        """The lines of a pull, until the model is there. A line without news is repeated from time to time."""
        options = self._context.options
        yield (last := OllamaProgress(status="pulling manifest"))
        quiet_since = monotonic()
        while True:
            phase = follower.take(self._models.downloads(), monotonic())
            line = follower.line()
            if line != last or monotonic() - quiet_since >= options.progress_comment_s:
                yield (last := line)
                quiet_since = monotonic()
            if phase is PullPhase.DONE:
                yield OllamaProgress(status="success")
                return
            await asyncio.sleep(options.progress_s)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /api/delete: delete the files of a model at all peers."""
        name = await self._named(request, await self._read(request, OllamaNamedBody))
        entry = await self._models.named(name)
        if not await self._models.delete(entry.name):
            return plain_error("model_not_found", f"no peer has files of {entry.name} that it may delete", "model")
        return json_response({})

    def _placed(self) -> list[InstanceReport]:
        return self._observation.state().view.instances

    def _expiry(self, instance_id: str) -> str:
        left_s = self._instances.idle_left_s(instance_id)
        return rfc3339(self._context.now() + (NEVER_S if left_s is None else left_s))

    async def _named(self, request: web.Request, body: OllamaNamedBody) -> str:
        """The model that a body names. Raises InputError if it names none, and UnknownModelError for a path."""
        name = named(body)
        if name is None or not name.isprintable() or len(name) > MAX_MODEL_CHARS:
            message = f"model must be the name of a model, with 1 to {MAX_MODEL_CHARS} printable characters"
            raise InputError(message, param="model")
        return await named_model(request, self._models, name)

    async def _read(self, request: web.Request, kind: type[B]) -> B:
        return await read_as(request, self._context.options.body_silence_s, partial(decode_ollama_body, kind=kind))
