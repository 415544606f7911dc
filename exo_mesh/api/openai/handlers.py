"""Handlers for OpenAI's routes: models, chat completions, completions, and cancellation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER, LOCAL
from exo_mesh.api.body import read_body
from exo_mesh.api.context import OUTPUT_BOUND, REQUEST_ID, ApiContext
from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.asker import Asker, TraceContext
from exo_mesh.api.core.defaults import with_defaults
from exo_mesh.api.core.idempotency import Idempotency, idempotency_of
from exo_mesh.api.core.preparing import PromptOptions, prepare
from exo_mesh.api.core.request import NeutralRequest, Prompts
from exo_mesh.api.errors import json_response, plain_error
from exo_mesh.api.listed import known_object, model_object
from exo_mesh.api.model_names import model_of_request, named_model
from exo_mesh.api.openai.checks import check_body
from exo_mesh.api.openai.objects import ChatCompletion, TextCompletion
from exo_mesh.api.openai.recipes import StreamRecipe, recipe_of
from exo_mesh.api.openai.replies import ChatReply, CompletionReply, Reply
from exo_mesh.api.openai.schema import ChatBody, CompletionBody, G, GenerationBody, decode_generation_body
from exo_mesh.api.openai.streaming import stream_answer
from exo_mesh.api.openai.timed import (
    HandlerClock,
    TimedChatCompletion,
    TimedTextCompletion,
    check_is_timeable,
    timed_reply,
)
from exo_mesh.api.openai.translate import asks_for_no_limit, delivery_of, neutral_chat, neutral_completion
from exo_mesh.api.quoting import quoted
from exo_mesh.api.routes import GENERATION_ERRORS, USE, Route, RouteTable
from exo_mesh.api.stream_secret import new_secret
from exo_mesh.api.tracing import TRACE, new_trace, trace_of
from exo_mesh.errors import InputError
from exo_mesh.random_hex import random_hex
from exo_mesh.security.api_keys import Role
from exo_mesh.serving.streams import StreamCard, hash_of_secret
from exo_mesh.telemetry.logs import current_trace

_DELIVERY = (
    "stream",
    "stream_options",
    "user",
    "metadata",
    "priority",
    "service_tier",
    "keep_alive",
    "ttl",
    "timings",
    "timings_per_token",
)
"""Fields that do not change the answer, only its delivery."""


class OpenAIRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._service = context.service

    def table(self) -> RouteTable:
        """The routes."""
        # fmt: off
        return [
            Route(
                "POST", ("/v1/chat/completions", "/chat/completions"), self.chat_completions, USE,
                "Answer a conversation", body=ChatBody, reply=ChatCompletion, errors=GENERATION_ERRORS, events=True,
            ),
            Route(
                "POST", ("/v1/completions", "/completions"), self.completions, USE, "Continue a prompt",
                body=CompletionBody, reply=TextCompletion, errors=GENERATION_ERRORS, events=True,
            ),
            Route(
                "POST", ("/bench/chat/completions",), self.timed_chat, USE,
                "Answer a conversation, and say what each part of it took",
                body=ChatBody, reply=TimedChatCompletion, errors=GENERATION_ERRORS,
            ),
            Route(
                "POST", ("/bench/completions",), self.timed_completion, USE,
                "Continue a prompt, and say what each part of it took",
                body=CompletionBody, reply=TimedTextCompletion, errors=GENERATION_ERRORS,
            ),
            Route(
                "GET", ("/v1/models", "/models"), self.models, USE, "The models of the mesh",
                errors=(400,), query={"status": "downloaded, loaded, known or unusable"},
            ),
            Route("GET", ("/v1/models/{id:.+}", "/models/{id:.+}"), self.model, USE, "One model", errors=(404,)),
            Route("POST", ("/v1/cancel/{id}",), self.cancel, USE, "Cancel a running request", errors=(404,)),
        ]
        # fmt: on

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        body = await self._body(request, ChatBody)
        return await self._answer(request, body, neutral_chat(body), ChatReply, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        body = await self._body(request, CompletionBody)
        return await self._answer(request, body, neutral_completion(body), CompletionReply, "cmpl-")

    async def timed_chat(self, request: web.Request) -> web.StreamResponse:
        """POST /bench/chat/completions: the same request as /v1/chat/completions, always traced and not streamed."""
        clock = HandlerClock()
        body = await self._body(request, ChatBody)
        check_is_timeable(body)
        return await self._answer(request, body, neutral_chat(body), ChatReply, "chatcmpl-", clock)

    async def timed_completion(self, request: web.Request) -> web.StreamResponse:
        """POST /bench/completions: the same for a bare prompt."""
        clock = HandlerClock()
        body = await self._body(request, CompletionBody)
        check_is_timeable(body)
        return await self._answer(request, body, neutral_completion(body), CompletionReply, "cmpl-", clock)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the models on the disks of all peers. `?status=loaded` lists only models with an instance.

        `?status=unusable` instead lists models on this node's disk that cannot be used, each with the reason;
        `?status=known` lists models that have a card but that no peer has.
        """
        created = self._context.started_at
        entries = self._service.models()
        match request.query.get("status"):
            case None | "downloaded":
                pass
            case "loaded":
                entries = [entry for entry in entries if entry.instance_ids]
            case "unusable":
                return json_response({"object": "list", "data": self._unusable_objects()})
            case "known":
                known = [known_object(card, created) for card in self._service.known_cards()]
                return json_response({"object": "list", "data": known})
            case other:
                message = f"status is {quoted(other)}; it must be downloaded, loaded, known or unusable"
                return plain_error("invalid_request", message, "status")
        return json_response(
            {"object": "list", "data": [model_object(entry, self._context.started_at) for entry in entries]}
        )

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}: one model; hub ids contain a slash."""
        name = await named_model(request, self._service, request.match_info["id"])
        return json_response(model_object(await self._service.model(name), self._context.started_at))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/cancel/{id}: cancel a request at any peer, by the reply's id, x-request-id or x-trace-id."""
        given = request.match_info["id"]
        if not await self._service.cancel(given, request[CALLER].limited_to):
            return plain_error("not_found", f"no request {given} is running", "id")
        return json_response({"id": given, "object": "request.cancelled", "cancelled": True})

    async def _body(self, request: web.Request, kind: type[G]) -> G:
        body = decode_generation_body(await read_body(request, self._context.options.body_silence_s), kind)
        check_body(body)
        return body

    async def _answer(
        self,
        request: web.Request,
        body: GenerationBody,
        asked: NeutralRequest,
        kind: type[Reply],
        prefix: str,
        clock: HandlerClock | None = None,
    ) -> web.StreamResponse:
        """Answer a request. clock: measures its parts, which the reply then has."""
        delivery = delivery_of(body)
        changing = {name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY}
        can_resume = delivery.stream and asked.num_choices == 1 and not has_several_prompts(asked)
        key = idempotency_of(request, changing, self._key_scope(request), can_resume=can_resume)
        defaults = self._context.options.defaults()
        asked = with_defaults(asked, defaults, is_unlimited=asks_for_no_limit(body))
        asked = replace(asked, model=await model_of_request(request, self._service, asked.model, defaults.model))
        request_id = prefix + (random_hex(12) if key is None else key.reply_id)
        asker = self._asker(request, request_id, asked.priority, key, is_traced=clock is not None)
        options = PromptOptions(not defaults.keep_agent_lines)
        if clock is not None:
            clock.asked()
        prepared = await prepare(asked, asker, self._service, self._context.texts, options)
        if clock is not None:
            clock.prepared(prepared)
        if prepared.chosen_bound is not None:
            request[OUTPUT_BOUND] = prepared.chosen_bound
        created = int(self._context.now())
        recipe = recipe_of(kind, prepared, delivery, created)
        with self._service.streams.open(self._card(request, recipe)):
            async with Answer(self._service, prepared, self._context.watchdog) as answer:
                reply = kind(answer, delivery, created)
                if delivery.stream:
                    received = key.received if key is not None and can_resume else None
                    return await stream_answer(self._context, request, answer, reply, received)
                steps: list[AnswerStep] = []
                while not answer.finished:
                    await answer.wait()
                    steps += answer.steps()
                whole = reply.whole(steps)
        return json_response(whole if clock is None else await self._timed(request, request_id, whole, clock))

    async def _timed(
        self, request: web.Request, request_id: str, whole: ChatCompletion | TextCompletion, clock: HandlerClock
    ) -> Any:
        """The reply with the parts of its time; call it after the request has ended, which completes its trace."""
        times = clock.ended()
        trace = await self._service.inspection.trace(request_id, request[CALLER].limited_to)
        return timed_reply(whole, trace, times)

    def _card(self, request: web.Request, recipe: StreamRecipe) -> StreamCard:
        """The card by which others find the running request. A caller without a key gets a secret for this."""
        key_id = request[CALLER].key_id
        return StreamCard(
            recipe.id,
            recipe.model,
            recipe.created,
            tuple(choice.request_id for choice in recipe.choices),
            key_id,
            b"" if key_id else hash_of_secret(new_secret(request)),
            partial(msgspec.json.encode, recipe),
        )

    def _key_scope(self, request: web.Request) -> str:
        """The id of the API key with which an Idempotency-Key is valid.

        Other peers do not know the local token of this node. So on an open mesh the holder of the local token counts as
        a caller without a key; then the answer can be resumed at another peer.
        """
        caller = request[CALLER]
        return "" if caller == LOCAL and self._context.options.access.is_open else caller.key_id

    def _asker(
        self, request: web.Request, request_id: str, priority: int, key: Idempotency | None, *, is_traced: bool
    ) -> Asker:
        """The caller as the mesh sees it. is_traced: trace the request in any case. Raises InputError for a priority
        that the caller may not use.

        Without keys, each address counts as one client. Behind a proxy such as nginx all callers without keys are one
        client, because anybody could forge a header with the caller's address.
        """
        caller = request[CALLER]
        if priority > 0 and caller.role is not Role.ADMIN:
            raise InputError("a priority above 0 needs a key with the role admin", param="priority")
        sample = self._context.options.defaults().trace_sample
        headers = request.headers
        trace = trace_of(headers.getall("traceparent", ()), headers.getall("tracestate", ()), sample)
        if trace is None and is_traced:
            trace = new_trace()
        if trace is not None:
            request[TRACE] = trace
            current_trace.set(trace.trace_id)
        return Asker(
            request_id,
            caller.key_id or request.remote or "",
            trace or TraceContext(),
            key,
            caller.key_id,
            caller.may_download,
            request[REQUEST_ID],
        )

    def _unusable_objects(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "status": "unusable", "reason": reason}
            for name, reason in sorted(self._service.unusable_models().items())
        ]


def has_several_prompts(asked: NeutralRequest) -> bool:
    """Whether the answer has a choice for each of several prompts."""
    return isinstance(asked.subject, Prompts) and len(asked.subject.prompts) > 1
