"""Handlers for Anthropic's routes: messages, and the number of their tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.api.anthropic.delivery import message_recipe
from exo_mesh.api.anthropic.objects import ContentObject, TokenCount
from exo_mesh.api.anthropic.replies import MessageReply
from exo_mesh.api.anthropic.schema import MessagesBody, decode_count_body, decode_messages_body
from exo_mesh.api.anthropic.threads import PREFIX, held_answer, is_held, with_thread
from exo_mesh.api.anthropic.translate import neutral_conversation, neutral_message
from exo_mesh.api.body import read_as, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answer import Answer
from exo_mesh.api.core.answering import Answering, WantedAnswer
from exo_mesh.api.core.prompt_tokens import PromptTokens
from exo_mesh.api.core.request import FieldNames
from exo_mesh.api.errors import json_response

_DELIVERY = ("stream", "metadata", "service_tier")
"""Fields that do not change the answer, only its delivery."""


class AnthropicRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._answering = Answering(context)
        self._prompts = PromptTokens(context)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        return await self._answering.answer(request, await self._wanted(request))

    async def _wanted(self, request: web.Request) -> WantedAnswer:
        body = await read_as(request, self._context.options.body_silence_s, decode_messages_body)
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        kept, caller = self._context.services.requests.kept_answers, request[CALLER]
        holds = is_held(body, kept)
        whole, num_held = await with_thread(body, kept, caller.limited_to)
        asked = await run_apart(request, partial(neutral_message, whole, num_held))
        held = partial(held_answer, body, caller) if holds else None

        def reply(answer: Answer, _: int) -> MessageReply:
            def keep(content: list[ContentObject]) -> None:
                if held is not None:
                    kept.keep(held(answer.prepared.id, content))

            return MessageReply(answer, hides_thinking=hides_thinking, keep=keep if holds else None)

        return WantedAnswer(
            asked,
            identity=partial(_identity, body),
            prefix=PREFIX,
            is_streamed=bool(body.stream),
            reply=reply,
            recipe=lambda prepared, created: message_recipe(prepared, created, hides_thinking=hides_thinking),
            owner=kept.owner if holds else "",
            is_id_secret=holds,
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens: the tokens of the prompt that the same messages would make."""
        body = await read_as(request, self._context.options.body_silence_s, decode_count_body)
        kept = self._context.services.requests.kept_answers
        whole, num_held = await with_thread(body, kept, request[CALLER].limited_to)
        conversation = await run_apart(request, partial(neutral_conversation, whole, num_held))
        model, text = await self._prompts.model(request, body.model)
        limit = await self._context.services.instances.context_limit(model)
        prompt = await self._prompts.prompt(conversation, text, FieldNames())
        return json_response(TokenCount(len(await self._prompts.encode(text, prompt, limit, "messages"))))


def _identity(body: MessagesBody) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY}
