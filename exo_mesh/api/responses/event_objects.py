"""The events of a stream. Each has the number of its place in the stream."""

from __future__ import annotations

import msgspec

from exo_mesh.api.responses.objects import (
    EventLogprob,
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
)


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all events have."""

    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    """An event about the whole response."""

    response: ResponseObject


class ResponseCreated(ResponseEvent, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(ResponseEvent, kw_only=True, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(ResponseEvent, kw_only=True, tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(ResponseEvent, kw_only=True, tag="response.incomplete"):
    """The last event of a response that its token limit ended."""


class ResponseFailed(ResponseEvent, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""


class ErrorEvent(Event, kw_only=True, tag="error"):
    """Why the stream failed."""

    code: str
    message: str
    param: str | None


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: OutputItem


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class ItemEvent(Event, kw_only=True):
    """An event about an item."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, kw_only=True, tag="response.content_part.added"):
    """A part of an item's content begins, empty."""

    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(ItemEvent, kw_only=True, tag="response.content_part.done"):
    """A part of an item's content is complete."""

    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(ItemEvent, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int = 0
    delta: str
    logprobs: list[EventLogprob] = []


class OutputTextDone(ItemEvent, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    content_index: int = 0
    text: str
    logprobs: list[EventLogprob] = []


class ReasoningDelta(ItemEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    content_index: int = 0
    delta: str


class ReasoningDone(ItemEvent, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    content_index: int = 0
    text: str


class SummaryAdded(ItemEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    """A part of a summary begins, empty."""

    summary_index: int = 0
    part: SummaryText


class SummaryDelta(ItemEvent, kw_only=True, tag="response.reasoning_summary_text.delta"):
    """More of a summary."""

    summary_index: int = 0
    delta: str


class SummaryDone(ItemEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    """The whole part of a summary."""

    summary_index: int = 0
    text: str


class SummaryPartDone(ItemEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    """A part of a summary is complete."""

    summary_index: int = 0
    part: SummaryText


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    name: str
    arguments: str


class CustomInputDelta(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """The input of a custom tool."""

    delta: str


class CustomInputDone(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The whole input of a custom tool."""

    input: str
