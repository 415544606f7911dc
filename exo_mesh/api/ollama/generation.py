"""Handlers for Ollama's /api/chat and /api/generate, which also load and unload models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from exo_mesh.api.access import CALLER
from exo_mesh.api.body import read_as, run_apart
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.answering import Answering, WantedAnswer
from exo_mesh.api.core.preparing import choose_model
from exo_mesh.api.core.request import NeutralRequest, Prompts
from exo_mesh.api.errors import json_response
from exo_mesh.api.model_names import find_model, model_of_request
from exo_mesh.api.ollama.delivery import REPLIES, OllamaDialect, ollama_recipe
from exo_mesh.api.ollama.lenient import decode_ollama_body
from exo_mesh.api.ollama.objects import OllamaAnswerMessage, OllamaChat, OllamaGenerated
from exo_mesh.api.ollama.replies import OllamaDelivery, rfc3339
from exo_mesh.api.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaGenerationBody
from exo_mesh.api.ollama.translate import asks_for_no_limit, keeps_for_s, named, neutral_chat, neutral_generate
from exo_mesh.base.clock import monotonic
from exo_mesh.errors import InputError
from exo_mesh.models.entry import ModelEntry
from exo_mesh.rings.placing.spec import InstanceSpec

G = TypeVar("G", bound=OllamaGenerationBody)

_DELIVERY = ("stream", "keep_alive")
"""Fields that do not change the answer, only its delivery."""

_PREFIXES: dict[OllamaDialect, str] = {"ollama_chat": "ollama-chat-", "ollama_generate": "ollama-generate-"}


class OllamaGenerationRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models
        self._instances = context.services.instances
        self._answering = Answering(context)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /api/chat: answer a conversation; without messages, load or unload the model."""
        made = await self._wanted(request, OllamaChatBody, _chat, "ollama_chat")
        if isinstance(made, WantedAnswer):
            return await self._answering.answer(request, made)
        return json_response(OllamaChat(message=OllamaAnswerMessage(), **await self._loaded(request, made)))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /api/generate: answer a prompt; without a prompt, load or unload the model."""
        made = await self._wanted(request, OllamaGenerateBody, _generate, "ollama_generate")
        if isinstance(made, WantedAnswer):
            return await self._answering.answer(request, made)
        return json_response(OllamaGenerated(response="", **await self._loaded(request, made)))

    async def _wanted(
        self,
        request: web.Request,
        kind: type[G],
        neutral: Callable[[G], tuple[NeutralRequest, bool]],
        dialect: OllamaDialect,
    ) -> WantedAnswer | OllamaGenerationBody:
        """What a body asks for; the body itself if it only loads or unloads a model. neutral: returns the request, and
        whether it wants an answer."""
        began = monotonic()
        decode = partial(decode_ollama_body, kind=kind)
        body = await read_as(request, self._context.options.body_silence_s, decode)
        # apart from the decoding, because the bytes of the body are free by now
        asked, has_prompt = await run_apart(request, lambda: neutral(body))
        if not has_prompt:
            return body
        if body.think:
            _check_can_think(await self._model(request, named(body)))
        if isinstance(asked.subject, Prompts) and not asks_for_no_limit(body):
            asked = replace(asked, default_tokens=self._context.options.defaults().max_tokens)
        shows_logprobs, name = bool(body.logprobs), named(body)

        def delivery(model: str) -> OllamaDelivery:
            return OllamaDelivery(name or model, self._context.now(), began, shows_logprobs)

        return WantedAnswer(
            asked,
            identity=partial(_identity, body),
            prefix=_PREFIXES[dialect],
            is_streamed=body.stream is not False,
            is_unlimited=asks_for_no_limit(body),
            reply=lambda answer, _: REPLIES[dialect](answer, delivery(answer.prepared.model)),
            recipe=lambda prepared, created: ollama_recipe(dialect, prepared, created, shows_logprobs=shows_logprobs),
        )

    async def _loaded(self, request: web.Request, body: OllamaGenerationBody) -> dict[str, Any]:
        """Load the model, or with a keep_alive of 0 unload it once its requests have ended. Returns the common fields
        of the reply."""
        keep_s = keeps_for_s(body)
        entry = await self._model(request, named(body), may_download=keep_s != 0)
        instance_ids = list(entry.instance_ids)
        if keep_s != 0 and not instance_ids:
            instance_ids = [(await self._instances.create(InstanceSpec(entry.name))).id]
        if keep_s is not None:
            for instance_id in instance_ids:
                self._instances.keep_loaded(instance_id, keep_s)
        return {
            "model": named(body) or entry.name,
            "created_at": rfc3339(self._context.now()),
            "done": True,
            "done_reason": "unload" if keep_s == 0 else "load",
        }

    async def _model(self, request: web.Request, name: str | None, *, may_download: bool = True) -> ModelEntry:
        """The model of a request; the node's default or only model if it names none. may_download: a model that no peer
        has may be downloaded, if the caller may do so."""
        found = await model_of_request(request, self._models, name, self._context.options.defaults().model)
        chosen = choose_model(found, self._models.all())
        if not may_download:
            return await self._models.named(chosen)
        return await find_model(self._models, chosen, may_download=request[CALLER].may_download)


def _chat(body: OllamaChatBody) -> tuple[NeutralRequest, bool]:
    return neutral_chat(body), bool(body.messages)


def _generate(body: OllamaGenerateBody) -> tuple[NeutralRequest, bool]:
    return neutral_generate(body), bool(body.prompt)


def _identity(body: OllamaGenerationBody) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(body).items() if name not in _DELIVERY}


def _check_can_think(entry: ModelEntry) -> None:
    """Raises InputError for a model that does not think."""
    if entry.profile is not None and not entry.profile.supports_thinking:
        raise InputError(f"{entry.name} does not support thinking; leave out think", param="think")
