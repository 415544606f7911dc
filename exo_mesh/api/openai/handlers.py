"""Handlers for OpenAI's routes: chat completions, completions, and cancellation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answering import Answering, WantedAnswer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.reply_ids import request_id_of
from exo_mesh.api.core.request import NeutralRequest
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.openai.checks import check_body
from exo_mesh.api.openai.delivery import REPLIES, OpenAIDialect, openai_recipe
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, G, GenerationBody, decode_generation_body
from exo_mesh.api.openai.timed import (
    HandlerClock,
    check_is_timeable,
    timed_reply,
)
from exo_mesh.api.openai.translate import asks_for_no_limit, delivery_of, neutral_chat, neutral_completion
from exo_mesh.node.inspection.service import InspectionService

_DELIVERY = (
    "stream",
    "stream_options",
    "user",
    "metadata",
    "priority",
    "service_tier",
    "keep_alive",
    "ttl",
    "cache",
    "cache_salt",
    "prompt_cache_key",
    "timings",
    "timings_per_token",
)
"""Fields that do not change the answer, only its delivery."""

_PREFIXES: dict[OpenAIDialect, str] = {"chat": "chatcmpl-", "completion": "cmpl-"}
"""The beginnings of the ids of replies."""


class _Timing:
    """Measures a /bench request and adds its times to the reply."""

    def __init__(self, inspection: InspectionService, limited_to: str | None) -> None:
        self._inspection = inspection
        self._limited_to = limited_to
        self._clock = HandlerClock()

    def asked(self) -> None:
        self._clock.asked()

    def prepared(self, request: PreparedRequest) -> None:
        self._clock.prepared(request)

    async def ended(self, reply: Any, request_id: str) -> Any:
        """The reply with its times; the end of the request has completed its trace."""
        times = self._clock.ended()
        trace = await self._inspection.trace(request_id, self._limited_to)
        return timed_reply(reply, trace, times)


class OpenAIRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._requests = context.services.requests
        self._inspection = context.services.inspection
        self._answering = Answering(context)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._answering.answer(request, await self._read(request, ChatBody, neutral_chat, "chat"))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        wanted = await self._read(request, CompletionBody, neutral_completion, "completion")
        return await self._answering.answer(request, wanted)

    async def timed_chat(self, request: web.Request) -> web.StreamResponse:
        """POST /bench/chat/completions: the same request as /v1/chat/completions, always traced and not streamed."""
        timing = _Timing(self._inspection, request[CALLER].limited_to)
        wanted = await self._read(request, ChatBody, neutral_chat, "chat", is_timed=True)
        return await self._answering.answer(request, wanted, timing)

    async def timed_completion(self, request: web.Request) -> web.StreamResponse:
        """POST /bench/completions: the same for a bare prompt."""
        timing = _Timing(self._inspection, request[CALLER].limited_to)
        wanted = await self._read(request, CompletionBody, neutral_completion, "completion", is_timed=True)
        return await self._answering.answer(request, wanted, timing)

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/cancel/{id}: cancel a request at any peer, by the reply's id, x-request-id or x-trace-id."""
        given = request.match_info["id"]
        if not await self._requests.cancel(request_id_of(given), request[CALLER].limited_to):
            return plain_error("not_found", f"no request {given} is running", "id")
        return json_response({"id": given, "object": "request.cancelled", "cancelled": True})

    async def _read(
        self,
        request: web.Request,
        kind: type[G],
        neutral: Callable[[G], NeutralRequest],
        dialect: OpenAIDialect,
        *,
        is_timed: bool = False,
    ) -> WantedAnswer:
        decode = partial(_checked, kind=kind, is_timed=is_timed)
        body = await read_as(request, self._context.options.body_silence_s, decode)
        # apart from the decoding, because the bytes of the body are free by now
        return await run_apart(request, lambda: _wanted(body, neutral(body), dialect))


def _checked(received: bytes, kind: type[G], *, is_timed: bool) -> G:
    """Decode and check a body. is_timed: the reply says what each part of the answer took."""
    body = decode_generation_body(received, kind)
    check_body(body)
    if is_timed:
        check_is_timeable(body)
    return body


def _wanted(body: GenerationBody, asked: NeutralRequest, dialect: OpenAIDialect) -> WantedAnswer:
    delivery = delivery_of(body)
    return WantedAnswer(
        asked,
        identity=lambda: {name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY},
        prefix=_PREFIXES[dialect],
        is_streamed=delivery.stream,
        is_unlimited=asks_for_no_limit(body),
        reply=lambda answer, created: REPLIES[dialect](answer, delivery, created),
        recipe=lambda prepared, created: openai_recipe(dialect, prepared, delivery, created),
    )
