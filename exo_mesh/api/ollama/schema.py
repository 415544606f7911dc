"""The bodies of Ollama's routes: every field that changes the answer.

A field that is neither here nor in exo_mesh.api.ollama.lenient is refused with a 400 that names it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Level = Literal["low", "medium", "high"]


class OllamaFunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the assistant made earlier. arguments: a JSON object; a string with one is accepted, too."""

    name: str
    arguments: Any = None
    index: int | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call in a message."""

    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. tool_name: the tool whose result a message with the role tool has. name: the same
    in older clients; of other messages it has no effect. images: in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class OllamaFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class OllamaTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are supported."""

    function: OllamaFunction
    type: Literal["function"] | None = None


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The options of a request that change the answer."""

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaNamedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that names a model. name: another name of the field model, which older clients use."""

    model: str | None = None
    name: str | None = None


class OllamaEmbedBody(OllamaNamedBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. truncate: cut texts that are too long, the default. Of the options only num_ctx has an effect:
    the most tokens of a text. Without input the reply has no vectors."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None
    options: OllamaOptions | None = None


class OllamaEmbeddingsBody(OllamaNamedBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings."""

    prompt: str | None = None
    keep_alive: float | str | None = None
    options: OllamaOptions | None = None


class OllamaGenerationBody(OllamaNamedBody, kw_only=True, forbid_unknown_fields=True):
    """The common fields of /api/chat and /api/generate. null always means the same as a missing field.

    format: "json" or a JSON schema. stream: true by default. think: whether, or how hard, the model thinks.
    """

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | Level | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatBody(OllamaGenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat. Without messages, the model is loaded or unloaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateBody(OllamaGenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate. Without a prompt, the model is loaded or unloaded. raw: no chat template is applied."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaShowBody(OllamaNamedBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show. verbose: accepted; the reply is always the same."""

    verbose: bool | None = None


class OllamaPullBody(OllamaNamedBody, kw_only=True, forbid_unknown_fields=True):
    """POST /api/pull. stream: true by default. insecure: accepted; the hub is always called securely."""

    stream: bool | None = None
    insecure: bool | None = None
