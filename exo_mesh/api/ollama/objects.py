"""The replies of Ollama's routes, as msgspec structs. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class OllamaError(Struct):
    """The body of every error."""

    error: str


class OllamaCalledFunction(Struct):
    """The function of a call; arguments are a JSON object."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    """A call that the model makes."""

    function: OllamaCalledFunction


class OllamaAnswerMessage(Struct):
    """The message of the assistant, or its next piece in a stream."""

    content: str = ""
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaTopLogprob(Struct):
    """A token with its log-probability. bytes: its own, which may be only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    """A token of the answer with its likeliest alternatives."""

    top_logprobs: list[OllamaTopLogprob] = []


class OllamaPart(Struct, kw_only=True):
    """The common fields of all lines of an answer; the last line of an answer has the fields from done_reason on."""

    model: str
    created_at: str
    done: bool
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaPart, kw_only=True):
    """The reply of /api/chat, or one line of its stream."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaPart, kw_only=True):
    """The reply of /api/generate, or one line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedded(Struct, kw_only=True):
    """The reply of /api/embed. The durations are in ns."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """The reply of /api/embeddings."""

    embedding: list[float]


class OllamaDetails(Struct):
    """What kind of model it is. parameter_size, quantization_level: "" if unknown."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    """A model in a list. size: bytes of all weights. The last three: only in /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct):
    """The reply of /api/tags and /api/ps."""

    models: list[OllamaModel]


class OllamaShown(Struct, kw_only=True):
    """The reply of /api/show."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaProgress(Struct, kw_only=True):
    """A line of /api/pull: what happens, and how many bytes of how many are there."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaVersion(Struct):
    """The reply of /api/version."""

    version: str
