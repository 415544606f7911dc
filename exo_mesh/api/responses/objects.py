"""The objects of replies and events. A field that is UNSET is left out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from exo_mesh.api.openai.objects import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class EventTopLogprob(msgspec.Struct):
    """An alternative token in an event."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """A token of the text in an event; the whole text has the bytes, too."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """Reasoning of the model, for clients that ask for a summary."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer's text."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer. Its text is in content, or in summary if the client asked for a summary.
    encrypted_content: see exo_mesh.api.responses.opaque."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. arguments: JSON text, if the call is complete."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall


class InputDetails(msgspec.Struct):
    """Details of the input's tokens: read from a cache, and written to a cache."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Details of the output's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """The number of tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """The reply of POST /v1/responses. The fields from instructions on repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float = 1.0
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None


class DeletedResponse(msgspec.Struct):
    """The reply of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """The reply of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct):
    """A page of the input items of a response."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
