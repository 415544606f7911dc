"""Handlers for Ollama's /api/embed and its predecessor /api/embeddings."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from exo_mesh.api.body import read_as, release_body
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.checks import check_range
from exo_mesh.api.core.keeping import keep_alive_s
from exo_mesh.api.embedding.embeddings import check_width, checked_dimensions, floats
from exo_mesh.api.embedding.vectors import MAX_TEXTS, EmbeddingModel, EncodedText, Vectors
from exo_mesh.api.errors import json_response
from exo_mesh.api.ollama.lenient import B, decode_ollama_body
from exo_mesh.api.ollama.objects import OllamaEmbedded, OllamaEmbedding
from exo_mesh.api.ollama.schema import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaOptions
from exo_mesh.api.ollama.translate import named
from exo_mesh.base.clock import monotonic
from exo_mesh.domain.embedding import EMBEDDINGS, EmbedSpec
from exo_mesh.errors import InputError

PREFIX = "ollama-embd-"


class OllamaEmbeddingRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._vectors = context.shared(Vectors)

    async def embed(self, request: web.Request) -> web.Response:
        """POST /api/embed: vectors of length 1. Texts that are too long are cut, unless truncate is false."""
        began = monotonic()
        body = await self._read(request, OllamaEmbedBody)
        texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
        if len(texts) > MAX_TEXTS:
            message = f"input has {len(texts)} texts; at most {MAX_TEXTS} are allowed in one call"
            raise InputError(message, param="input")
        dimensions = checked_dimensions(body.dimensions, 0)
        model = await self._vectors.model(request, named(body), EMBEDDINGS)
        model, loaded_at = _shortened(model, body.options), monotonic()
        encoded = [await self._encoded(model, text, "input", cuts=body.truncate is not False) for text in texts]
        spec = EmbedSpec(model.settings.pooling, dimensions=dimensions, whole=model.settings.whole)
        texts, body.input = [], None
        release_body(request)
        found = []
        if encoded:
            found = await self._vectors.vectors(
                request, model, encoded, spec, prefix=PREFIX, keep_alive_s=keep_alive_s(body.keep_alive, "keep_alive")
            )
            check_width(found[0], dimensions)
        embedded = OllamaEmbedded(
            model=named(body) or model.name,
            embeddings=[floats(vector) for vector in found],
            total_duration=int(1e9 * (monotonic() - began)),
            load_duration=int(1e9 * (loaded_at - began)),
            prompt_eval_count=sum(len(text.ids) for text in encoded),
        )
        return json_response(embedded)

    async def embeddings(self, request: web.Request) -> web.Response:
        """POST /api/embeddings: the vector of one text as the model makes it. A text that is too long is cut."""
        body = await self._read(request, OllamaEmbeddingsBody)
        model = await self._vectors.model(request, named(body), EMBEDDINGS)
        if not body.prompt:
            return json_response(OllamaEmbedding([]))
        model = _shortened(model, body.options)
        encoded = await self._encoded(model, body.prompt, "prompt", cuts=True)
        spec = EmbedSpec(model.settings.pooling, normalise=False, whole=model.settings.whole)
        (vector,) = await self._vectors.vectors(
            request, model, [encoded], spec, prefix=PREFIX, keep_alive_s=keep_alive_s(body.keep_alive, "keep_alive")
        )
        return json_response(OllamaEmbedding(floats(vector)))

    async def _encoded(self, model: EmbeddingModel, text: str, param: str, *, cuts: bool) -> EncodedText:
        prompt = model.settings.prompt(None, param)
        return await self._vectors.encode(model, prompt + text, param, truncate=cuts)

    async def _read(self, request: web.Request, kind: type[B]) -> B:
        return await read_as(request, self._context.options.body_silence_s, partial(decode_ollama_body, kind=kind))


def _shortened(model: EmbeddingModel, options: OllamaOptions | None) -> EmbeddingModel:
    """The model for texts of at most num_ctx tokens, if the options have it. Raises InputError."""
    most = None if options is None else options.num_ctx
    check_range("options.num_ctx", most, 0, 2**31 - 1)
    return model.shortened(most) if most else model
