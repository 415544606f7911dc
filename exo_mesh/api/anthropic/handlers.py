"""Handlers for Anthropic's routes: messages, and the number of their tokens."""

from __future__ import annotations

import msgspec
from aiohttp import web

from exo_mesh.api.anthropic.delivery import message_recipe
from exo_mesh.api.anthropic.objects import AnthropicError, MessageObject, TokenCount
from exo_mesh.api.anthropic.replies import MessageReply
from exo_mesh.api.anthropic.schema import CountTokensBody, MessagesBody, decode_count_body, decode_messages_body
from exo_mesh.api.anthropic.translate import neutral_conversation, neutral_message
from exo_mesh.api.body import read_body
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answering import Answering, WantedAnswer
from exo_mesh.api.core.prompt_tokens import PromptTokens
from exo_mesh.api.core.request import FieldNames
from exo_mesh.api.errors import json_response
from exo_mesh.api.routes import GENERATION_ERRORS, USE, Route, RouteTable

_DELIVERY = ("stream", "metadata", "service_tier")
"""Fields that do not change the answer, only its delivery."""


class AnthropicRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._answering = Answering(context)
        self._prompts = PromptTokens(context)

    def table(self) -> RouteTable:
        """The routes."""
        # fmt: off
        return [
            Route(
                "POST", ("/v1/messages",), self.messages, USE, "Answer a conversation, as Anthropic's API does",
                body=MessagesBody, reply=MessageObject, errors=GENERATION_ERRORS, events=True, error=AnthropicError,
            ),
            Route(
                "POST", ("/v1/messages/count_tokens",), self.count_tokens, USE,
                "The number of tokens of a conversation", body=CountTokensBody, reply=TokenCount,
                errors=(400, 403, 404, 408, 413, 503, 504), error=AnthropicError,
            ),
        ]
        # fmt: on

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        body = decode_messages_body(await read_body(request, self._context.options.body_silence_s))
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        wanted = WantedAnswer(
            neutral_message(body),
            identity={name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY},
            prefix="msg_",
            is_streamed=bool(body.stream),
            reply=lambda answer, _: MessageReply(answer, hides_thinking=hides_thinking),
            recipe=lambda prepared, created: message_recipe(prepared, created, hides_thinking=hides_thinking),
        )
        return await self._answering.answer(request, wanted)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens: the tokens of the prompt that the same messages would make."""
        body = decode_count_body(await read_body(request, self._context.options.body_silence_s))
        conversation = neutral_conversation(body)
        model, text = await self._prompts.model(request, body.model)
        limit = await self._context.service.context_limit(model)
        prompt = await self._prompts.prompt(conversation, text, FieldNames())
        return json_response(TokenCount(len(await self._prompts.encode(text, prompt, limit, "messages"))))
