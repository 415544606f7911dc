"""Handler for /v1/rerank, in the form of Jina and Cohere."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from aiohttp import web

from exo_mesh.api.body import read_as
from exo_mesh.api.context import REQUEST_ID, ApiContext
from exo_mesh.api.core.neutral_fields import ANY, NeutralTable
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.embedding.embeddings import floats
from exo_mesh.api.embedding.schema import EmbeddingUsage, RerankBody, RerankReply, RerankResult
from exo_mesh.api.embedding.vectors import CHARS_PER_TOKEN, MAX_TEXTS, EmbeddingModel, EncodedText, Vectors
from exo_mesh.api.errors import json_response
from exo_mesh.domain.embedding import RERANK, EmbedSpec
from exo_mesh.errors import InputError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.text_guard import TextGuard

NEUTRAL: NeutralTable = {
    "max_chunks_per_doc": ANY,
    "overlap_tokens": ANY,
    "priority": (0,),
    "rank_fields": (["text"],),
    "request_id": ANY,
    "timeout": ANY,
}
"""Fields of other servers and clients, with the values that have no effect."""


class RerankRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._vectors = context.shared(Vectors)

    async def rerank(self, request: web.Request) -> web.Response:
        """POST /v1/rerank"""
        decode = partial(decode_body, kind=RerankBody, tables={RerankBody: NEUTRAL})
        body = await read_as(request, self._context.options.body_silence_s, decode)
        documents = _texts_of(body)
        model = await self._vectors.model(request, body.model, RERANK)
        if not (model.settings.whole or model.settings.choice):
            message = f"{model.name} is a language model with a classifier, whose scores exo-mesh cannot compute"
            raise InputError(message, param="model")
        if (num_scores := model.settings.num_scores) != 1:
            message = f"{model.name} gives {num_scores} scores for a text, not one, so it cannot rerank"
            raise InputError(message, param="model")
        cuts = body.truncate is not False
        choice = model.settings.choice
        if choice:
            pairs = await self._judged(model, body, documents, cuts=cuts)
        else:
            if body.instruction:
                raise InputError(f"{model.name} takes no instruction", param="instruction")
            pairs = [
                await self._vectors.encode(model, body.query, f"documents[{index}]", text, truncate=cuts)
                for index, text in enumerate(documents)
            ]
        spec = EmbedSpec("score", normalise=False, whole=model.settings.whole, choice=choice)
        found = await self._vectors.vectors(request, model, pairs, spec, prefix="rerank-")
        scores = [floats(vector)[0] for vector in found]
        if not body.raw_scores:
            scores = [_sigmoid(score) for score in scores]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = [RerankResult(index=index, relevance_score=scores[index]) for index in order]
        if body.return_documents:
            for result in results:
                given = body.documents[result.index]
                result.document = {"text": given} if isinstance(given, str) else given
        num_tokens = sum(len(pair.ids) for pair in pairs)
        usage = EmbeddingUsage(num_tokens, num_tokens)
        meta = {"billed_units": {"search_units": 1, "total_tokens": num_tokens}, "tokens": {"input_tokens": num_tokens}}
        return json_response(
            RerankReply(id=request[REQUEST_ID], model=model.name, results=results, usage=usage, meta=meta)
        )

    async def _judged(
        self, model: EmbeddingModel, body: RerankBody, documents: list[str], *, cuts: bool
    ) -> list[EncodedText]:
        """The prompts with which a language model judges documents. A document that is too long is cut, or refused."""
        template = model.text.template
        if template is None or not template.traits.judges:
            raise InputError(f"{model.name} has no chat template with the roles query and document", param="model")
        task = body.instruction or model.settings.prompt(None, "instruction")
        before = [*([("system", task)] if task else []), ("query", body.query)]
        leaves_texts = self._context.options.defaults().control_tokens_in_text

        async def prompt_of(document: str) -> ChatPrompt:
            guard = TextGuard() if leaves_texts else model.text.guard()
            said = [*before, ("document", document)]

            def guarded() -> list[dict[str, str]]:
                return [{"role": role, "content": guard.text(text)} for role, text in said]

            messages = await self._context.texts.work(guarded)
            rendered = await self._context.texts.render(
                model.text, template, messages, variables={}, add_generation_prompt=True
            )
            return ChatPrompt(rendered, guard.mark)

        room = model.limit - len(await self._ids(model, await prompt_of("")))
        pairs = []
        for index, document in enumerate(documents):
            if cuts:
                ids = await self._ids(model, ChatPrompt(document[: CHARS_PER_TOKEN * model.limit]))
                if len(ids) > room:
                    document = await self._context.texts.work(partial(model.text.decode, ids[: max(1, room)]))
            encoded = EncodedText(tuple(await self._ids(model, await prompt_of(document))))
            pairs.append(self._vectors.checked(model, encoded, f"documents[{index}]"))
        return pairs

    async def _ids(self, model: EmbeddingModel, prompt: ChatPrompt) -> list[int]:
        return await self._context.texts.work(partial(model.text.encode_chat, prompt))


def _texts_of(body: RerankBody) -> list[str]:
    """The texts of the documents. Raises InputError for an empty query, no document, too many, and one without text."""
    if not body.query:
        raise InputError("query is empty", param="query")
    if not body.documents:
        raise InputError("documents is empty; send a list of texts", param="documents")
    if len(body.documents) > MAX_TEXTS:
        message = f"documents has {len(body.documents)} texts; at most {MAX_TEXTS} are allowed in one call"
        raise InputError(message, param="documents")
    return [_text_of(given, index) for index, given in enumerate(body.documents)]


def _text_of(given: str | dict[str, Any], index: int) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str) or not text:
        raise InputError(f"documents[{index}] has no text", param=f"documents[{index}]")
    return text


def _sigmoid(value: float) -> float:
    """The logistic function, exact also where exp would overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
