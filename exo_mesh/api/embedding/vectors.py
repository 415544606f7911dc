"""Runs the texts of a call on the mesh and collects their vectors, for the handlers of all dialects."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import msgspec
from aiohttp import web
from msgspec.structs import replace

from exo_mesh.api.access import CALLER
from exo_mesh.api.context import REQUEST_ID, ApiContext
from exo_mesh.api.core.preparing import choose_model
from exo_mesh.api.core.running import MAX_AT_ONCE, Feed
from exo_mesh.api.model_names import find_model, model_of_request
from exo_mesh.base.printable import counted
from exo_mesh.base.random_hex import random_hex
from exo_mesh.domain.embedding import EmbedSpec, why_not
from exo_mesh.domain.request import GenerateRequest, RequestEvent, TokenEvent
from exo_mesh.errors import ContextLengthError, EngineError, InputError, OverloadError
from exo_mesh.rings.serving.call_tally import CallTally
from exo_mesh.text.embedding import EmbeddingSettings, read_embedding_settings
from exo_mesh.text.tokenizer import TextModel

MAX_TEXTS = 2048
"""Most texts of one call, as OpenAI documents it."""

MAX_CALLS = 64
"""Most calls that run or wait here at once; one more gets a 429."""

CHARS_PER_TOKEN = 64
"""A text that may be cut is first cut to this many characters for each token that fits: tokenizing more would cost time
and memory for nothing."""


class EmbeddingModel(msgspec.Struct, frozen=True):
    """A model that was found for a call. limit: most tokens of a text."""

    name: str
    text: TextModel
    settings: EmbeddingSettings
    limit: int

    def shortened(self, limit: int) -> EmbeddingModel:
        """The same model for texts of at most `limit` tokens; -1 keeps its own limit."""
        return self if limit < 0 else replace(self, limit=min(limit, self.limit))


class EncodedText(msgspec.Struct, frozen=True):
    """A text in tokens, or a pair of texts. second: see EmbedSpec."""

    ids: tuple[int, ...]
    second: int = 0


class Vectors:
    """Makes vectors for the calls of one node. Calls take turns text by text, so a long call does not hold up others,
    and so that all calls together do not fill the queue of a ring."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._models = context.services.models
        self._instances = context.services.instances
        self._requests = context.services.requests
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_calls = 0

    async def model(self, request: web.Request, name: str | None, task: str) -> EmbeddingModel:
        """Find the model of a call. Raises InputError if it cannot do the task, and the errors of ModelService."""
        name = await model_of_request(request, self._models, name, self._context.options.defaults().model)
        chosen = choose_model(name, self._models.all())
        entry = await find_model(self._models, chosen, may_download=request[CALLER].may_download)
        if unable := why_not(entry.name, entry.tasks, task):
            raise InputError(unable, param="model")
        if entry.served is not None:
            raise InputError(f"{entry.name} is in a model server, whose vectors exo-mesh cannot get", param="model")
        directory = await self._models.text_files(entry.name)
        text = await self._context.texts.get(directory)
        settings = await self._context.texts.work(partial(read_embedding_settings, directory))
        limit = await self._instances.context_limit(entry.name)
        return EmbeddingModel(entry.name, text, settings, min(limit, settings.max_tokens or limit))

    async def encode(
        self, model: EmbeddingModel, text: str, param: str, pair: str | None = None, *, truncate: bool = False
    ) -> EncodedText:
        """The tokens of a text, or of a pair of texts. truncate: cut a text that is too long. param: the field of the
        text. Raises InputError for a text without tokens, and ContextLengthError with the arithmetic."""
        most_chars = CHARS_PER_TOKEN * model.limit

        def encode() -> tuple[list[int], int]:
            if truncate:
                cut = None if pair is None else pair[:most_chars]
                return model.text.encode_for_vector(text[:most_chars], cut, model.limit)
            for one in (text, pair):
                if one is not None:
                    model.text.check_length(one, model.limit, param)
            return model.text.encode_for_vector(text, pair)

        ids, second = await self._context.texts.work(encode)
        return self.checked(model, EncodedText(tuple(ids), second), param)

    def checked(self, model: EmbeddingModel, encoded: EncodedText, param: str) -> EncodedText:
        """The same text. Raises InputError if it has no tokens, or tokens that the model does not have, and
        ContextLengthError if it is too long."""
        if not encoded.ids:
            raise InputError(f"{param}: the text has no tokens", param=param)
        for token_id in encoded.ids:
            if not model.text.has_id(token_id):
                # Python cannot convert a very long integer to text
                shown = token_id if token_id.bit_length() < 64 else "a huge number"
                raise InputError(f"{param} contains {shown}, which is not a token id of this model", param=param)
        if (surplus := len(encoded.ids) - model.limit) > 0:
            raise ContextLengthError(
                f"{param} has {counted(len(encoded.ids), 'token')}, but {model.name} takes texts of at most "
                f"{model.limit} tokens; shorten it by {counted(surplus, 'token')}",
                param=param,
            )
        return encoded

    async def vectors(
        self,
        request: web.Request,
        model: EmbeddingModel,
        texts: Sequence[EncodedText],
        spec: EmbedSpec,
        *,
        prefix: str,
        keep_alive_s: float | None = None,
    ) -> list[bytes]:
        """The vectors of the texts in order: float32 values, little-endian. prefix: of the ids of the requests. Raises
        OverloadError if too many calls wait, and those of RequestService.generate."""
        if self._num_calls >= MAX_CALLS:
            raise OverloadError(f"{self._num_calls} calls for vectors run or wait on this node already")
        caller, call_id = request[CALLER], prefix + random_hex(12)
        tally = CallTally(call_id)
        first = GenerateRequest(
            call_id,
            texts[0].ids,
            0,
            client=caller.key_id or request.remote or "",
            key_id=caller.key_id,
            names=(call_id, request[REQUEST_ID]),
            tally=tally,
            embed=spec,
            keep_alive_s=keep_alive_s,
        )
        sources = [self._run(model.name, _of_text(first, index, text)) for index, text in enumerate(texts)]
        found: dict[int, bytes] = {}
        self._num_calls += 1
        try:
            async with Feed(sources, self._context.watchdog) as feed:
                while len(found) < len(texts):
                    for index, event in await feed.take():
                        if isinstance(event, TokenEvent) and event.finish is not None:
                            found[index] = _vector_of(event)
        finally:
            self._num_calls -= 1
            tally.close()
        return [found[index] for index in range(len(texts))]

    async def _run(self, model: str, wanted: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        async with self._turns:
            async for event in self._requests.generate(model, wanted):
                yield event


def _of_text(first: GenerateRequest, index: int, text: EncodedText) -> GenerateRequest:
    """The request for one text. first: the request for the first text."""
    assert first.embed is not None, "it is for a vector"
    embed = replace(first.embed, second=text.second)
    return dataclasses.replace(first, request_id=f"{first.request_id}.{index}", prompt_ids=text.ids, embed=embed)


def _vector_of(event: TokenEvent) -> bytes:
    if event.vector is None:
        raise EngineError("the request ended without a vector")
    return event.vector
