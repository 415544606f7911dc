"""Collects the events of an answer and assigns the tokens to its parts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from exo_mesh.text.assembler import TokenSpan
from exo_mesh.text.output.events import (
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from exo_mesh.text.output.json_text import is_json
from exo_mesh.text.output.reader import Reader

SEPARATOR = "\n\n"
"""Inserted between two texts of an answer with reasoning or a call between them."""

PartKind = type[TextPart] | type[ReasoningPart]


class EventWriter:
    """Collects the events since the last `take`. Consecutive pieces of the same part become one event.

    White space between two parts is dropped, because models write line breaks between reasoning, calls and the answer.
    Two texts with another part between them are joined with a blank line.
    """

    def __init__(self, reader: Reader, *, trims: bool, max_calls: int | None = None) -> None:
        """trims: whether white space between parts is dropped; False for a format that has only text. max_calls:
        further calls are dropped."""
        self._reader = reader
        self._trims = trims
        self._max_calls = max_calls
        self._tokens: deque[TokenSpan] = deque()
        self._events: list[OutputEvent] = []
        self._open: list[str] = []
        self._open_tokens: list[TokenSpan] = []
        self._kind: PartKind = TextPart
        self._space: list[str] = []
        self._is_at_start = False
        self._has_text = False
        self._arguments: list[str] = []
        self.num_calls = 0
        self.in_call = False
        self.num_reasoning_tokens = 0

    @property
    def has_answer(self) -> bool:
        """Whether the answer has any text or call so far."""
        return self._has_text or self.num_calls > 0

    def add_tokens(self, tokens: Iterable[TokenSpan]) -> None:
        """Add the tokens of the text that was pushed to the reader."""
        self._tokens.extend(tokens)

    def text(self, text: str) -> None:
        """Add the next piece of the answer, which the reader has just read."""
        self._part(TextPart, text)

    def reasoning(self, text: str) -> None:
        """Add the next piece of reasoning, which the reader has just read."""
        self._part(ReasoningPart, text)

    def marker(self, *, in_reasoning: bool = False) -> None:
        """Skip text that belongs to no part: a marker, or the text of a call. White space before it is dropped."""
        self._close()
        self._space.clear()
        self._is_at_start = self._trims
        self._drop_tokens(self._reader.position, in_reasoning=in_reasoning)

    def stray(self) -> None:
        """Skip a marker without its partner; the text around it continues."""
        self._close()
        self._drop_tokens(self._reader.position)

    def begin(self, name: str) -> None:
        """Begin a call. The text that was read of it can no longer become text of the answer."""
        self._reader.recorded()
        self.marker()
        self.in_call = True
        if self._event(ToolCallBegin(self.num_calls, name)):
            self._arguments.clear()

    def arguments(self, text: str) -> None:
        """Add the next piece of the arguments of the open call, as JSON."""
        if text and (self._max_calls is None or self.num_calls < self._max_calls):
            self._open.append(text)
            self._arguments.append(text)

    def end(self) -> None:
        """End the open call."""
        self.marker()
        self._event(ToolCallEnd(self.num_calls))
        self.in_call = False
        self.num_calls += 1

    def is_last_call_whole(self) -> bool:
        """Whether the arguments of the last call are JSON."""
        return is_json("".join(self._arguments))

    def finish(self) -> None:
        """End the answer. White space at the end of its text is kept, because no other part follows."""
        if self.in_call:
            self.end()
        if self._space and self._kind is TextPart:
            self._emit("".join(self._space), self._reader.position)
        if not self._is_at_start:
            self._open_tokens += self._tokens
            self._tokens.clear()
        self._close()

    def take(self) -> list[OutputEvent]:
        """Remove and return the new events."""
        self._close()
        events, self._events = self._events, []
        return events

    def _event(self, event: ToolCallBegin | ToolCallEnd) -> bool:
        """Add an event. Returns False for a call that is dropped."""
        is_kept = self._max_calls is None or self.num_calls < self._max_calls
        if is_kept:
            self._events.append(event)
        return is_kept

    def _part(self, kind: PartKind, text: str) -> None:
        if kind is not self._kind:  # another part begins: white space between two parts is dropped
            self._close()
            self._space.clear()
            self._kind = kind
        if not self._trims:
            self._emit(text, self._reader.position)
            return
        if self._is_at_start:
            text = text.lstrip()
            self._drop_tokens(self._reader.position - len(text))
            if not text:
                return
            self._is_at_start = False
            text = (SEPARATOR if kind is TextPart and self._has_text else "") + text
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        space = text[len(body) :]
        self._emit("".join(self._space) + body, self._reader.position - len(space))
        self._space = [space] if space else []

    def _emit(self, text: str, stop: int) -> None:
        tokens = self._tokens_until(stop)
        if self._kind is ReasoningPart:
            self.num_reasoning_tokens += len(tokens)
        else:
            self._has_text = True
        self._open.append(text)
        self._open_tokens += tokens

    def _drop_tokens(self, stop: int, *, in_reasoning: bool = False) -> None:
        """Drop the tokens up to position `stop`; they are in no part. Reasoning tokens are still counted."""
        dropped = self._tokens_until(stop)
        if in_reasoning or self._kind is ReasoningPart:
            self.num_reasoning_tokens += len(dropped)

    def _tokens_until(self, stop: int) -> list[TokenSpan]:
        """Remove and return the tokens whose text ends at or before `stop`. A token without text belongs to the
        character after it."""
        tokens: list[TokenSpan] = []
        while self._tokens and self._tokens[0].start < stop and self._tokens[0].stop <= stop:
            tokens.append(self._tokens.popleft())
        return tokens

    def _close(self) -> None:
        """Turn the collected text of a part, or the collected arguments, into an event."""
        if not self._open and not self._open_tokens:
            return
        text = "".join(self._open)
        self._open = []
        if self.in_call:
            self._events.append(ToolCallArguments(self.num_calls, text))
            return
        self._events.append(self._kind(text, tuple(self._open_tokens)))
        self._open_tokens = []
