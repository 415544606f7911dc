"""The bodies and replies of the routes for vectors and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. input: a text, token ids, or a list of texts or of lists of token ids.

    dimensions: keep the first values only. normalize: whether vectors have length 1, the default. prompt_name: a prompt
    of the model that is put before each text. input_type: the use of the texts, which chooses a prompt likewise.
    truncate, truncate_prompt_tokens: cut texts that are too long, which are refused otherwise. user has no effect.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One vector, as numbers or as base64 of float32 values, little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    """The vectors in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank. documents: texts, or objects with a text. top_n: how many results to return, the best first.

    return_documents: add each document to its result. raw_scores: the outputs of the classifier, and not
    probabilities. truncate: cut pairs that are too long, the default; false refuses them. instruction: the task, for
    models with a chat template.
    """

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None
    user: str | None = None


class RerankResult(msgspec.Struct, kw_only=True):
    """The score of one document, by its index in the request."""

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    """The results, the most relevant first. meta: for clients of Cohere."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: dict[str, Any]
