"""Handler for OpenAI's /v1/embeddings."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Any

from aiohttp import web

from exo_mesh.api.body import read_as, release_body
from exo_mesh.api.context import ApiContext
from exo_mesh.api.core.checks import token_ids_of
from exo_mesh.api.core.neutral_fields import ANY, NeutralTable
from exo_mesh.api.decoding import decode_body
from exo_mesh.api.embedding.schema import EmbeddingObject, EmbeddingsBody, EmbeddingsReply, EmbeddingUsage
from exo_mesh.api.embedding.vectors import MAX_TEXTS, EmbeddingModel, EncodedText, Vectors
from exo_mesh.api.errors import json_response
from exo_mesh.domain.embedding import EMBEDDINGS, MAX_WIDTH, EmbedSpec
from exo_mesh.errors import InputError

NEUTRAL: NeutralTable = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "priority": (0,),
    "request_id": ANY,
    "timeout": ANY,
}
"""Fields of other servers and clients, with the values that have no effect."""


class EmbeddingRoutes:
    """Each method answers one route. Methods raise errors; the middleware turns them into replies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._vectors = context.shared(Vectors)

    async def embeddings(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings"""
        body, inputs = await read_as(request, self._context.options.body_silence_s, _read)
        dimensions = checked_dimensions(body.dimensions, 1)
        model = await self._vectors.model(request, body.model, EMBEDDINGS)
        texts = await self._encoded(model, body, inputs)
        del inputs
        body.input = ""
        release_body(request)
        settings = model.settings
        spec = EmbedSpec(settings.pooling, body.normalize is not False, dimensions, settings.whole)
        found = await self._vectors.vectors(request, model, texts, spec, prefix="embd-")
        check_width(found[0], dimensions)
        num_tokens = sum(len(text.ids) for text in texts)
        shown = _in_base64 if body.encoding_format == "base64" else floats
        data = [EmbeddingObject(index=index, embedding=shown(vector)) for index, vector in enumerate(found)]
        return json_response(EmbeddingsReply(data=data, model=model.name, usage=EmbeddingUsage(num_tokens, num_tokens)))

    async def _encoded(
        self, model: EmbeddingModel, body: EmbeddingsBody, inputs: list[str | tuple[int, ...]]
    ) -> list[EncodedText]:
        prompt = model.settings.prompt(body.prompt_name, "prompt_name")
        if body.input_type is not None and body.prompt_name is None:
            prompt = model.settings.prompt_for(body.input_type)
        cuts, limit = body.truncate is True, body.truncate_prompt_tokens
        if limit is not None and (limit == 0 or limit < -1):
            message = f"truncate_prompt_tokens is {limit}; it must be -1 or more than 0"
            raise InputError(message, param="truncate_prompt_tokens")
        if limit is not None:
            cuts, model = True, model.shortened(limit)
        found = []
        for index, one in enumerate(inputs):
            param = "input" if len(inputs) == 1 else f"input[{index}]"
            if isinstance(one, str):
                found.append(await self._vectors.encode(model, prompt + one, param, truncate=cuts))
            else:
                ids = one[: model.limit] if cuts else one
                found.append(self._vectors.checked(model, EncodedText(ids), param))
        return found


def _read(received: bytes) -> tuple[EmbeddingsBody, list[str | tuple[int, ...]]]:
    body = decode_body(received, EmbeddingsBody, {EmbeddingsBody: NEUTRAL})
    return body, inputs_of(body.input)


def inputs_of(given: str | list[Any]) -> list[str | tuple[int, ...]]:
    """The texts of a call, each as text or as token ids. Raises InputError for no text, too many, and anything else."""
    if isinstance(given, str) or (given and token_ids_of(given) is not None):
        given = [given]
    if not given:
        raise InputError("input is empty; send a text or a list of texts", param="input")
    if len(given) > MAX_TEXTS:
        raise InputError(f"input has {len(given)} texts; at most {MAX_TEXTS} are allowed in one call", param="input")
    found: list[str | tuple[int, ...]] = []
    for index, one in enumerate(given):
        if isinstance(one, str) and one:
            found.append(one)
        elif ids := token_ids_of(one):
            found.append(ids)
        elif one in ("", []):
            raise InputError(f"input[{index}] is empty", param="input")
        else:
            raise InputError(f"input[{index}] is neither a text nor a list of token ids", param="input")
    return found


def checked_dimensions(wanted: int | None, least: int) -> int:
    """The wanted number of values of each vector; 0 for all. Raises InputError below `least` or above MAX_WIDTH."""
    if wanted is not None and not least <= wanted <= MAX_WIDTH:
        raise InputError(f"dimensions is {wanted}; it must be {least} to {MAX_WIDTH}", param="dimensions")
    return wanted or 0


def check_width(vector: bytes, dimensions: int) -> None:
    """Raises InputError if a vector has fewer values than were asked for."""
    if len(vector) // 4 < dimensions:
        message = f"dimensions is {dimensions}, but the vectors of this model have {len(vector) // 4} values"
        raise InputError(message, param="dimensions")


def floats(vector: bytes) -> list[float]:
    """The values of a vector of float32, little-endian."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _in_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
