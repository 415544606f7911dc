"""Turns neutral events into responses and their events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.failure import Failure
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.openai.token_logprobs import token_logprobs
from exo_mesh.api.responses.event_objects import (
    ErrorEvent,
    Event,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from exo_mesh.api.responses.ids import ItemKind, item_id
from exo_mesh.api.responses.objects import (
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputDetails,
    OutputItem,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from exo_mesh.api.responses.tools import ToolName
from exo_mesh.api.responses.writers import (
    CustomCallWriter,
    FunctionCallWriter,
    ItemOptions,
    ItemWriter,
    MessageWriter,
    PieceSize,
    ReasoningWriter,
)
from exo_mesh.api.sse import HEADERS, StreamForm, named_frame
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

CREATED, IN_PROGRESS, FIRST_OF_ANSWER = 0, 1, 2
"""The sequence numbers of the first events."""

_FAILURES = {429: "rate_limit_exceeded"}


class ResponseDelivery(msgspec.Struct, frozen=True):
    """The options of a response that do not change the answer. repeated: the fields that repeat the request. tools: the
    client's names of tools by those for the model. after: events up to this sequence number are left out."""

    repeated: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: Mapping[str, ToolName] = msgspec.field(default_factory=dict)
    items: ItemOptions = msgspec.field(default_factory=ItemOptions)
    shows_logprobs: bool = False
    after: int = -1


class FinishedResponse(msgspec.Struct, frozen=True):
    """A response that has ended. sizes: of the pieces of each item, as they were streamed; see ItemWriter."""

    response: ResponseObject
    sizes: list[list[PieceSize]]


class ResponseReply(Reply):
    """Builds a response and its events. on_end: called with the finished response before its last event is sent."""

    def __init__(
        self,
        answer: Answer,
        delivery: ResponseDelivery,
        created: int,
        on_end: Callable[[FinishedResponse], None] = lambda finished: None,
    ) -> None:
        self.form = StreamForm(HEADERS, self._error_frames)
        self._answer = answer
        self._delivery = delivery
        self._created = created
        self._on_end = on_end
        self._output: list[OutputItem] = []
        self._sizes: list[list[PieceSize]] = []
        self._open: ItemWriter | None = None
        """The item that is being written."""
        self._next = FIRST_OF_ANSWER
        """The sequence number of the next event."""
        self._finished: FinishedResponse | None = None

    def whole(self, steps: Iterable[AnswerStep]) -> ResponseObject:
        for step in steps:
            self.chunks(step)
        assert self._finished is not None, "the answer has ended"
        return self._finished.response

    def chunks(self, step: AnswerStep) -> list[Event]:
        made: list[Event] = []
        for event in step.events:
            made += self._events(event, step.choice)
        for one in made:
            one.sequence_number = self._next
            self._next += 1
        return [one for one in made if one.sequence_number > self._delivery.after]

    def frame(self, chunk: Any, event_id: int | None) -> bytes:
        return named_frame(chunk.__struct_config__.tag, chunk, event_id)

    def opening(self) -> list[bytes]:
        events = first_events(self._response("in_progress"))
        return [self.frame(one, None) for one in events if one.sequence_number > self._delivery.after]

    def _events(self, event: OutputEvent, choice: int) -> list[Event]:
        match event:
            case TextPart(text=text, tokens=tokens):
                logprobs = token_logprobs(self._answer.prepared.text, tokens) if self._delivery.shows_logprobs else []
                if not text and not logprobs:
                    return []
                begun = self._begin(MessageWriter, "msg")
                assert self._open is not None
                return begun + self._open.add(text, logprobs)
            case ReasoningPart(text=text):
                if not text:
                    return []
                begun = self._begin(lambda name, place: ReasoningWriter(name, place, self._delivery.items), "rs")
                assert self._open is not None
                return begun + self._open.add(text)
            case ToolCallBegin(index=index, name=name):
                return self._begin_call(name, self._answer.call_id(choice, index))
            case ToolCallArguments(text=text):
                assert self._open is not None, "a call has begun"
                return self._open.add(text)
            case ToolCallEnd():
                return self._close("completed")
            case OutputEnd(reason=reason):
                return self._end("incomplete" if reason == "length" else "completed")

    def _begin(self, writer: Callable[[str, int], ItemWriter], kind: ItemKind) -> list[Event]:
        """Begin an item of text, unless one of its kind is being written."""
        if self._open is not None and self._open.item_id.startswith(f"{kind}_"):
            return []
        closed = self._close("completed")
        place = len(self._output)
        self._open = writer(item_id(kind, self._answer.prepared.id, place), place)
        return closed + self._open.begin()

    def _begin_call(self, name: str, call_id: str) -> list[Event]:
        closed = self._close("completed")
        place = len(self._output)
        response_id = self._answer.prepared.id
        tool = self._delivery.tools.get(name) or ToolName(name)
        if tool.is_custom:
            self._open = CustomCallWriter(item_id("ctc", response_id, place), place, call_id, tool)
        else:
            self._open = FunctionCallWriter(item_id("fc", response_id, place), place, call_id, tool)
        return closed + self._open.begin()

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self._output.append(item)
        self._sizes.append(self._open.sizes)
        self._open = None
        return events

    def _end(self, status: ItemStatus) -> list[Event]:
        closed = self._close(status)
        response = self._response(status)
        response.output, response.usage = list(self._output), self._usage()
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._finished = FinishedResponse(response, self._sizes)
        self._on_end(self._finished)
        return [*closed, last_event(response)]

    def _error_frames(self, failure: Failure) -> bytes:
        """The events that end a stream which has failed."""
        response = self._response("failed")
        response.output = list(self._output)
        code = _FAILURES.get(failure.status, "server_error" if failure.status >= 499 else "invalid_prompt")
        response.error = ResponseFailure(code, failure.message)
        error = ErrorEvent(sequence_number=self._next, code=failure.code, message=failure.message, param=failure.param)
        failed = ResponseFailed(sequence_number=self._next + 1, response=response)
        return self.frame(error, None) + self.frame(failed, None)

    def _response(self, status: Any) -> ResponseObject:
        prepared = self._answer.prepared
        return response_of(prepared.id, prepared.model, self._created, status, self._delivery.repeated)

    def _usage(self) -> ResponseUsage:
        num_input, num_output = self._answer.num_prompt_tokens, self._answer.num_tokens
        details = OutputDetails(self._answer.num_reasoning_tokens)
        cached = InputDetails(self._answer.num_cached_tokens)
        return ResponseUsage(num_input, cached, num_output, details, num_input + num_output)


def first_events(response: ResponseObject) -> list[Event]:
    """The events before the first item. response: without output."""
    return [
        ResponseCreated(sequence_number=CREATED, response=response),
        ResponseInProgress(sequence_number=IN_PROGRESS, response=response),
    ]


def last_event(response: ResponseObject) -> Event:
    """The event that ends the stream of a finished response; its number is not set."""
    return (
        ResponseCompleted(response=response)
        if response.status == "completed"
        else ResponseIncomplete(response=response)
    )


def response_of(response_id: str, model: str, created: int, status: Any, repeated: dict[str, Any]) -> ResponseObject:
    """A response without output. repeated: see ResponseDelivery; fields of other versions are left out."""
    known = {name: value for name, value in repeated.items() if name in ResponseObject.__struct_fields__}
    return ResponseObject(id=response_id, created_at=created, status=status, model=model, output=[], **known)
