"""Reads a running answer for a client that did not ask for it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable

import msgspec
from aiohttp import web

from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.recipes import StreamRecipe, read_recipe
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.core.streaming import stream_answer
from exo_mesh.api.sse import HEADERS
from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.errors import InputError
from exo_mesh.rings.serving.stream_service import StreamService
from exo_mesh.rings.serving.streams import FoundStream, StreamViewer

LAST_EVENT = "Last-Event-ID"


async def follow_stream(
    context: ApiContext,
    request: web.Request,
    found: FoundStream,
    viewer: StreamViewer,
    reply_of: Callable[[StreamRecipe, Answer], Reply],
) -> web.StreamResponse:
    """Stream a running answer from its beginning, or after the event that Last-Event-ID names. reply_of: makes the
    reply in the dialect of its request."""
    recipe = read_recipe(found.recipe)
    last = request.headers.get(LAST_EVENT)
    if last is not None and not (len(recipe.choices) == 1 and re.fullmatch(r"[0-9]{1,9}", last)):
        message = f"{LAST_EVENT} must be the id of an event of this answer, and the answer must have one choice"
        raise InputError(message, param=LAST_EVENT)
    if recipe.num_kept != recipe.num_drawn:
        raise InputError("an answer with best_of cannot be read now: the best texts are known only at the end")
    if request.method == "HEAD":
        return web.Response(headers=HEADERS)
    entry = await context.services.models.named(recipe.model)
    text = await context.texts.of(context.services.models, entry)
    followed = _Followed(context.services.requests.streams, found, viewer)
    async with Answer(followed, recipe.prepared(text), context.watchdog) as answer:
        received = int(last or 0) if len(recipe.choices) == 1 else None
        return await stream_answer(context, request, answer, reply_of(recipe, answer), received, is_taken=True)


class _Followed(msgspec.Struct, frozen=True):
    """A source of events for an Answer that follows a running request instead of starting one."""

    streams: StreamService
    found: FoundStream
    viewer: StreamViewer

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        return self.streams.follow(self.found, self.viewer, request.request_id)
