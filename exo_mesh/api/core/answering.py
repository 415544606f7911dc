"""Answers requests of all dialects: finds the model, prepares the request, runs it, and sends the reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from msgspec.structs import replace

from exo_mesh.api.access import CALLER, LOCAL
from exo_mesh.api.body import release_body, run_apart
from exo_mesh.api.context import OUTPUT_BOUND, REQUEST_ID, ApiContext, new_secret
from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.asker import Asker
from exo_mesh.api.core.defaults import with_defaults
from exo_mesh.api.core.idempotency import Idempotency, idempotency_of
from exo_mesh.api.core.preparing import PreparedRequest, prepare
from exo_mesh.api.core.prompts import prompt_options
from exo_mesh.api.core.recipes import StreamRecipe
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.core.reply_ids import SECRET_CHARS, with_secret
from exo_mesh.api.core.request import NeutralRequest, Prompts
from exo_mesh.api.core.streaming import stream_answer
from exo_mesh.api.errors import json_response
from exo_mesh.api.model_names import model_of_request
from exo_mesh.api.tracing import TRACE, TraceContext, new_trace, trace_of
from exo_mesh.base.random_hex import random_hex
from exo_mesh.base.telemetry.logs import current_trace
from exo_mesh.errors import InputError
from exo_mesh.rings.serving.streams import StreamCard, hash_of_secret
from exo_mesh.security.api_keys import Role


class WantedAnswer(msgspec.Struct):
    """A request of a dialect, and how its reply is made. Large fields are dropped once the prompt is ready.

    identity: returns the fields that change the answer, as JSON values; an Idempotency-Key is valid for one set of
    them.
    prefix: of the id of the reply. is_unlimited: the client wants an answer without a token limit. reply, recipe: make
    the reply and its recipe; they also get the Unix time of the reply. owner: the node that the id names, because it
    keeps the answer. is_id_secret: whoever knows the id may read the answer, so that of an answer without an API key
    ends with a secret.
    """

    asked: NeutralRequest
    identity: Callable[[], Mapping[str, Any]]
    prefix: str
    is_streamed: bool
    reply: Callable[[Answer, int], Reply]
    recipe: Callable[[PreparedRequest, int], StreamRecipe]
    is_unlimited: bool = False
    owner: str = ""
    is_id_secret: bool = False

    def drop_request(self) -> None:
        """Drop the request and its body, which may be large; what makes the reply stays."""
        self.asked = NeutralRequest(None, Prompts(()))
        self.identity = dict


class AnswerWatch(Protocol):
    """Follows a request that is answered as a whole, and may add to its reply."""

    def asked(self) -> None:
        """The request is read and checked."""

    def prepared(self, request: PreparedRequest) -> None:
        """The prompt is ready in tokens."""

    async def ended(self, reply: Any, request_id: str) -> Any:
        """The request has ended. Returns the reply to send."""


class Answering:
    """Runs requests on the mesh for the handlers of all dialects."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._services = context.services
        self._models = context.services.models
        self._requests = context.services.requests

    async def answer(
        self, request: web.Request, wanted: WantedAnswer, watch: AnswerWatch | None = None
    ) -> web.StreamResponse:
        """Answer a request. With a watch, the request is traced in any case."""
        can_resume = wanted.is_streamed and wanted.asked.num_choices == 1 and not has_several_prompts(wanted.asked)
        scope = self._key_scope(request)
        key = await run_apart(request, partial(idempotency_of, request, wanted.identity, scope, can_resume=can_resume))
        request_id = wanted.prefix + (_new_id(wanted.owner) if key is None else key.reply_id)
        prepared = await self._prepared(request, wanted, key, request_id, watch)
        wanted.drop_request()
        release_body(request)
        if prepared.chosen_bound is not None:
            request[OUTPUT_BOUND] = prepared.chosen_bound
        created = int(self._context.now())
        secret = self._secret(request, wanted, key)
        if wanted.is_id_secret and secret:
            prepared = replace(prepared, id=with_secret(prepared.id, secret))
        with self._requests.streams.open(self._card(request, wanted.recipe(prepared, created), secret)):
            async with Answer(self._requests, prepared, self._context.watchdog) as answer:
                reply = wanted.reply(answer, created)
                if wanted.is_streamed:
                    received = key.received if key is not None and can_resume else None
                    return await stream_answer(self._context, request, answer, reply, received)
                steps: list[AnswerStep] = []
                while not answer.finished:
                    await answer.wait()
                    steps += answer.steps()
                whole = reply.whole(steps)
        return json_response(whole if watch is None else await watch.ended(whole, request_id))

    async def _prepared(
        self,
        request: web.Request,
        wanted: WantedAnswer,
        key: Idempotency | None,
        request_id: str,
        watch: AnswerWatch | None,
    ) -> PreparedRequest:
        defaults = self._context.options.defaults()
        asked = with_defaults(wanted.asked, defaults, is_unlimited=wanted.is_unlimited)
        asked = replace(asked, model=await model_of_request(request, self._models, asked.model, defaults.model))
        asker = self._asker(request, request_id, asked.priority, key, is_traced=watch is not None)
        if watch is not None:
            watch.asked()
        prepared = await prepare(asked, asker, self._services, self._context.texts, prompt_options(defaults))
        if watch is not None:
            watch.prepared(prepared)
        return prepared

    def _secret(self, request: web.Request, wanted: WantedAnswer, key: Idempotency | None) -> str:
        """The secret with which a caller without a key can read the running answer; "" for callers with a key."""
        if request[CALLER].key_id:
            return ""
        in_id = (random_hex(SECRET_CHARS // 2) if key is None else key.secret) if wanted.is_id_secret else ""
        return new_secret(request, in_id)

    def _card(self, request: web.Request, recipe: StreamRecipe, secret: str) -> StreamCard:
        """The card by which others find the running request."""
        return StreamCard(
            recipe.id,
            recipe.model,
            recipe.created,
            tuple(choice.request_id for choice in recipe.choices),
            request[CALLER].key_id,
            hash_of_secret(secret),
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


def _new_id(owner: str) -> str:
    """The id of a reply without its prefix."""
    return f"{owner}_{random_hex(12)}" if owner else random_hex(12)


def has_several_prompts(asked: NeutralRequest) -> bool:
    """Whether the answer has a choice for each of several prompts."""
    return isinstance(asked.subject, Prompts) and len(asked.subject.prompts) > 1
