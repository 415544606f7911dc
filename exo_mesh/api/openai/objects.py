"""The objects of OpenAI's replies. A field that is UNSET is left out; OpenAI's clients expect all other fields."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens. cached_tokens: prompt tokens that came from a cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Details of the answer's tokens. reasoning_tokens: answer tokens that are reasoning. accepted_prediction_tokens,
    rejected_prediction_tokens: drafts that became part of the answer, and those that did not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """The number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingsObject(msgspec.Struct):
    """Timings in llama.cpp's format. cache_n: prompt tokens from a cache; prompt_n: computed prompt tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class TopLogprob(msgspec.Struct):
    """An alternative token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """A token of the answer with its log-probability and alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of the answer, without reasoning and tool calls."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """The function of a tool call. arguments: JSON text."""

    name: str
    arguments: str


class ToolCallObject(msgspec.Struct):
    """A tool call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The answer. reasoning is another name of reasoning_content; both are present only if the model has reasoned."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallObject] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class PromptTokenLogprob(msgspec.Struct):
    """The actual token or an alternative at a position of the prompt. rank: 1 for the likeliest token; null if the
    token is not among the requested alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptScores = list[dict[str, PromptTokenLogprob] | None]


class ChatCompletion(msgspec.Struct):
    """The reply to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    timings: TimingsObject | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """A piece of a function call: first the name, then pieces of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A piece of a tool call. Only the first piece has id and type."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A piece of the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(msgspec.Struct):
    """An event of a streamed reply to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    timings: TimingsObject | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of the text; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One text, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_logprobs: PromptScores | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """The reply to bare prompts; the events of a stream have the same object name."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: TimingsObject | UnsetType = UNSET
