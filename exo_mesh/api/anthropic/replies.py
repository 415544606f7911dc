"""Turns neutral events into Anthropic's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from exo_mesh.api.anthropic.failures import ANTHROPIC_EVENTS
from exo_mesh.api.anthropic.objects import (
    SIGNATURE,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentObject,
    DeltaUsage,
    InputDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextDelta,
    TextObject,
    ThinkingDelta,
    ThinkingObject,
    ThinkingTokens,
    ToolUseObject,
)
from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.call_arguments import object_of
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.sse import named_frame
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageReply(Reply):
    """Builds `message` and its events. hides_thinking: blocks of thinking are empty. keep: gets the content of the
    message, thinking included, before its last event is sent."""

    form = ANTHROPIC_EVENTS

    def __init__(
        self,
        answer: Answer,
        *,
        hides_thinking: bool = False,
        keep: Callable[[list[ContentObject]], None] | None = None,
    ) -> None:
        self._answer = answer
        self._hides_thinking = hides_thinking
        self._keep = keep
        self._content: list[ContentObject] = []
        """The blocks so far, of a whole message or of a kept one."""
        self._arguments: dict[int, str] = {}
        self._open: ContentObject | None = None
        """The block that is being written."""
        self._num_blocks = 0

    def whole(self, steps: Iterable[AnswerStep]) -> MessageObject:
        made = self._message([])
        for event in (event for step in steps for event in self._events(step)):
            self._collect(event)
            if isinstance(event, MessageDelta):
                made.stop_reason, made.stop_sequence = event.delta.stop_reason, event.delta.stop_sequence
        for block in self._content:
            if isinstance(block, ThinkingObject) and self._hides_thinking:
                block.thinking = ""
        made.content, made.usage = self._content, MessageUsage(**self._counts())
        return made

    def chunks(self, step: AnswerStep) -> list[Any]:
        made = self._events(step)
        if self._keep is not None:
            for event in made:
                self._collect(event)
        return [event for event in made if not (self._hides_thinking and _is_thinking(event))]

    def _events(self, step: AnswerStep) -> list[Event]:
        made: list[Event] = []
        for event in step.events:
            self._write(event, step.choice, made)
        return made

    def _collect(self, event: Event) -> None:
        """Add an event to the content."""
        match event:
            case BlockStart(content_block=block):
                self._content.append(msgspec.structs.replace(block))
            case BlockDelta(index=index, delta=delta):
                _extend(self._content[index], delta, index, self._arguments)
            case MessageStop():
                for index, text in self._arguments.items():
                    called = self._content[index]
                    assert isinstance(called, ToolUseObject)
                    called.input = object_of(text)
                if self._keep is not None:
                    self._keep(self._content)
            case _:
                pass

    def frame(self, chunk: Any, event_id: int | None) -> bytes:
        return named_frame(chunk.__struct_config__.tag, chunk, event_id)

    def opening(self) -> list[bytes]:
        return [self.frame(MessageStart(self._message([])), None)]

    def waiting(self, progress: str) -> bytes:
        return named_frame("ping", {"type": "ping"})

    def _write(self, event: OutputEvent, choice: int, made: list[Event]) -> None:
        """Append Anthropic's events for a neutral event."""
        match event:
            case TextPart(text=text):
                if text:
                    self._begin(TextObject(""), made)
                    made.append(BlockDelta(self._num_blocks - 1, TextDelta(text)))
            case ReasoningPart(text=text):
                if text:
                    self._begin(ThinkingObject("", ""), made)
                    made.append(BlockDelta(self._num_blocks - 1, ThinkingDelta(text)))
            case ToolCallBegin(index=index, name=name):
                self._close(made)
                self._begin(ToolUseObject(self._answer.call_id(choice, index, "toolu_"), name, {}), made)
            case ToolCallArguments(text=text):
                made.append(BlockDelta(self._num_blocks - 1, InputDelta(text)))
            case ToolCallEnd():
                self._close(made)
            case OutputEnd():
                self._close(made)
                made += [MessageDelta(_stop(event), DeltaUsage(**self._counts())), MessageStop()]

    def _begin(self, block: ContentObject, made: list[Event]) -> None:
        """Begin a block, unless one of its kind is being written."""
        if type(self._open) is type(block):
            return
        self._close(made)
        made.append(BlockStart(self._num_blocks, block))
        self._open = block
        self._num_blocks += 1

    def _close(self, made: list[Event]) -> None:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingObject):
            made.append(BlockDelta(self._num_blocks - 1, SignatureDelta(SIGNATURE)))
        made.append(BlockStop(self._num_blocks - 1))
        self._open = None

    def _message(self, content: list[ContentObject]) -> MessageObject:
        prepared = self._answer.prepared
        return MessageObject(
            id=prepared.id, model=prepared.model, content=content, usage=MessageUsage(**self._counts())
        )

    def _counts(self) -> dict[str, Any]:
        cached = self._answer.num_cached_tokens
        return {
            "input_tokens": self._answer.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.num_tokens,
            "output_tokens_details": self._thinking_tokens(),
        }

    def _thinking_tokens(self) -> ThinkingTokens | None:
        count = self._answer.num_reasoning_tokens
        return ThinkingTokens(count) if count else None


def _is_thinking(event: Event) -> bool:
    return isinstance(event, BlockDelta) and isinstance(event.delta, ThinkingDelta)


def _stop(end: OutputEnd) -> StopDelta:
    if end.stop_string:
        return StopDelta("stop_sequence", end.stop_string)
    return StopDelta(_REASONS[end.reason], None)


def _extend(block: ContentObject, delta: Any, index: int, arguments: dict[int, str]) -> None:
    """Add a part to a block. The parts of a call's arguments are collected, because only the whole is JSON."""
    match block, delta:
        case TextObject(), TextDelta(text=text):
            block.text += text
        case ThinkingObject(), ThinkingDelta(thinking=thinking):
            block.thinking += thinking
        case ThinkingObject(), SignatureDelta(signature=signature):
            block.signature = signature
        case ToolUseObject(), InputDelta(partial_json=text):
            arguments[index] = arguments.get(index, "") + text
