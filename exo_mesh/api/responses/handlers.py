"""Handlers for the routes of responses: create, count, read, list, cancel and delete."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.answering import Answering, WantedAnswer
from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.api.core.prompt_tokens import PromptTokens
from exo_mesh.api.core.recipes import StreamRecipe, read_recipe
from exo_mesh.api.core.reply_ids import secret_of
from exo_mesh.api.errors import json_response, quoted
from exo_mesh.api.responses.context import gather_items
from exo_mesh.api.responses.delivery import response_recipe, response_reply
from exo_mesh.api.responses.ids import PREFIX
from exo_mesh.api.responses.objects import DeletedResponse, InputTokens, ResponseObject
from exo_mesh.api.responses.pages import page_of
from exo_mesh.api.responses.replies import FinishedResponse, ResponseDelivery, ResponseReply, response_of
from exo_mesh.api.responses.schema import (
    ResponsesBody,
    decode_input_tokens_body,
    decode_responses_body,
)
from exo_mesh.api.responses.stored import StoredResponse, events_again, read_stored, stored_bytes
from exo_mesh.api.responses.tools import neutral_tools
from exo_mesh.api.responses.translate import (
    NAMES,
    OPAQUE,
    input_items,
    neutral_conversation,
    neutral_response,
    repeated_fields,
    shows_logprobs,
)
from exo_mesh.api.responses.writers import ItemOptions
from exo_mesh.api.sse import HEADERS, EventStream, named_frame
from exo_mesh.api.streams.following import follow_stream
from exo_mesh.errors import InputError, UnknownAnswerError
from exo_mesh.rings.serving.kept_answers import KeptAnswer
from exo_mesh.rings.serving.streams import FoundStream, StreamViewer, hash_of_secret

_DELIVERY = (
    "stream",
    "stream_options",
    "store",
    "user",
    "metadata",
    "service_tier",
    "keep_alive",
    "ttl",
    "safety_identifier",
    "prompt_cache_key",
    "cache",
)
"""Fields that do not change the answer, only its delivery."""


class ResponsesRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._instances = context.services.instances
        self._requests = context.services.requests
        self._answering = Answering(context)
        self._prompts = PromptTokens(context)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        return await self._answering.answer(request, await self._wanted(request))

    async def _wanted(self, request: web.Request) -> WantedAnswer:
        body = await read_as(request, self._context.options.body_silence_s, decode_responses_body)
        own = input_items(body)
        caller = request[CALLER]
        placed = await gather_items(self._requests.kept_answers, caller.limited_to, own, body.previous_response_id)
        asked = await run_apart(request, partial(neutral_response, body, placed))
        is_stored = body.store is not False and self._requests.kept_answers.is_on
        kept_input = own if is_stored else []
        # the input, which may be large, is dropped once the prompt is ready
        shown = msgspec.structs.replace(body, input=None)

        def keep(finished: FinishedResponse) -> None:
            data = stored_bytes(kept_input, finished)
            previous = shown.previous_response_id or ""
            self._requests.kept_answers.keep(KeptAnswer(finished.response.id, caller.key_id, previous, data))

        def reply(answer: Answer, created: int) -> ResponseReply:
            delivery = _delivery(shown, answer.prepared, is_stored=is_stored)
            return (
                ResponseReply(answer, delivery, created, keep)
                if is_stored
                else ResponseReply(answer, delivery, created)
            )

        def recipe(prepared: PreparedRequest, created: int) -> StreamRecipe:
            return response_recipe(prepared, _delivery(shown, prepared, is_stored=is_stored), created)

        return WantedAnswer(
            asked,
            identity=partial(_identity, body),
            prefix=PREFIX,
            is_streamed=bool(body.stream),
            reply=reply,
            recipe=recipe,
            owner=self._requests.kept_answers.owner,
            is_id_secret=True,
        )

    async def input_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/responses/input_tokens: the tokens of the prompt that the same input would make."""
        body = await read_as(request, self._context.options.body_silence_s, decode_input_tokens_body)
        key_id = request[CALLER].limited_to
        placed = await gather_items(self._requests.kept_answers, key_id, input_items(body), body.previous_response_id)
        conversation = await run_apart(request, partial(neutral_conversation, body, placed))
        model, text = await self._prompts.model(request, body.model)
        limit = await self._instances.context_limit(model)
        prompt = await self._prompts.prompt(conversation, text, NAMES)
        return json_response(InputTokens(len(await self._prompts.encode(text, prompt, limit, "input"))))

    async def read(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: a response, or its events."""
        response_id = request.match_info["id"]
        if request.query.get("include_obfuscation", "false") != "false":
            raise InputError('include_obfuscation must be "false"', param="include_obfuscation")
        is_streamed, after = _stream_of(request)
        answer = await self._kept(request, response_id)
        found = await self._running(request, response_id) if answer is None else None
        if found is not None:
            if is_streamed:
                viewer = _viewer(request, response_id)
                return await follow_stream(self._context, request, found, viewer, partial(response_reply, after=after))
            return json_response(_of_recipe(read_recipe(found.recipe), "in_progress"))
        # it may have ended between the two questions
        stored = await self._stored(request, response_id) if answer is None else read_stored(answer.data)
        if not is_streamed:
            return json_response(stored.response)
        return await self._stream_again(request, stored, after)

    async def input_items(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}/input_items: the input of the request and the conversation before it."""
        kept, key_id, response_id = self._requests.kept_answers, request[CALLER].limited_to, request.match_info["id"]
        stored = await self._stored(request, response_id)
        previous = msgspec.json.decode(stored.response).get("previous_response_id")
        placed = await gather_items(kept, key_id, stored.items(), previous)
        return json_response(page_of([*placed.history, *placed.own], request.query))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}"""
        response_id = request.match_info["id"]
        is_response = response_id.startswith(PREFIX)
        if not is_response or not await self._requests.kept_answers.delete(request[CALLER].limited_to, response_id):
            raise UnknownAnswerError(self._requests.kept_answers.missing(response_id), param="id")
        return json_response(DeletedResponse(response_id))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel: cancel a response that is being written."""
        response_id = request.match_info["id"]
        found = await self._running(request, response_id)
        stopped = [await self._requests.cancel(one) for one in found.request_ids] if found is not None else []
        if found is None or not any(stopped):
            raise UnknownAnswerError(f"no response {quoted(response_id)} of yours is running", param="id")
        return json_response(_of_recipe(read_recipe(found.recipe), "cancelled"))

    async def _running(self, request: web.Request, response_id: str) -> FoundStream | None:
        """The running response with this id, if the caller may see it."""
        if not (response_id.startswith(PREFIX) and response_id.isascii() and response_id.isprintable()):
            return None
        found = await self._requests.streams.find(_viewer(request, response_id), response_id)
        return found[0] if found else None

    async def _kept(self, request: web.Request, response_id: str) -> KeptAnswer | None:
        """A stored response, if the caller may read it. Other replies, such as messages of a thread, are none."""
        if not response_id.startswith(PREFIX):
            return None
        return await self._requests.kept_answers.read(request[CALLER].limited_to, response_id)

    async def _stored(self, request: web.Request, response_id: str) -> StoredResponse:
        answer = await self._kept(request, response_id)
        if answer is None:
            raise UnknownAnswerError(self._requests.kept_answers.missing(response_id), param="id")
        return read_stored(answer.data)

    async def _stream_again(self, request: web.Request, stored: StoredResponse, after: int) -> web.StreamResponse:
        """Send the events of a response that has ended."""
        if request.method == "HEAD":
            return web.Response(headers=HEADERS)
        options = self._context.options
        frames = [
            named_frame(str(event.__struct_config__.tag), event)
            for event in events_again(stored)
            if event.sequence_number > after
        ]
        stream = EventStream(request, options.stall_limit_s, self._context.watchdog)
        await stream.start()
        for start in range(0, len(frames), 256):
            await stream.send(*frames[start : start + 256])
        return stream.response


def _identity(body: ResponsesBody) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY}


def _delivery(body: ResponsesBody, prepared: PreparedRequest, *, is_stored: bool) -> ResponseDelivery:
    sampling = prepared.choices[0].request.sampling
    reasoning = body.reasoning
    return ResponseDelivery(
        repeated_fields(body, sampling.temperature, sampling.top_p, is_stored=is_stored),
        neutral_tools(body.tools or ())[1],
        ItemOptions(
            as_summary=reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None,
            shows_opaque=OPAQUE in (body.include or ()),
        ),
        shows_logprobs(body),
    )


def _of_recipe(recipe: StreamRecipe, status: str) -> ResponseObject:
    return response_of(recipe.id, recipe.model, recipe.created, status, recipe.repeated)


def _viewer(request: web.Request, response_id: str) -> StreamViewer:
    """The caller as a reader of running answers: the id of a response without a key ends with its secret."""
    return StreamViewer(request[CALLER].limited_to, hash_of_secret(secret_of(response_id)))


def _stream_of(request: web.Request) -> tuple[bool, int]:
    """(whether to stream, the sequence number after which the stream begins). Raises InputError."""
    given, after = request.query.get("stream", "false"), request.query.get("starting_after")
    if given not in ("true", "false"):
        raise InputError(f'stream must be "true" or "false", not {quoted(given)}', param="stream")
    if after is None:
        return given == "true", -1
    if given != "true":
        raise InputError("starting_after is only allowed together with stream=true", param="starting_after")
    if not re.fullmatch(r"[0-9]{1,9}", after):
        message = f"starting_after must be the sequence number of an event, not {quoted(after)}"
        raise InputError(message, param="starting_after")
    return True, int(after)
