"""Collects the events of an answer, and finds out which tokens belong to which part of it. Pure."""

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
from exo_mesh.text.output.reader import Reader

SEPARATOR = "\n\n"
"""Between two texts of an answer that a thought or a call parts."""

PartKind = type[TextPart] | type[ReasoningPart]


class EventWriter:
    """Events since the last `take`. Pieces of the same part that come together are one event.

    White space around a part is dropped where another part stands on that side: models write line breaks between a
    thought, a call and the answer. Texts that were parted so are joined with a blank line.
    """

    def __init__(self, reader: Reader, *, trims: bool, max_calls: int | None = None) -> None:
        """trims: False for a format that has only text. Calls beyond max_calls are dropped."""
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
        self.num_calls = 0
        self.in_call = False
        self.num_reasoning_tokens = 0

    @property
    def has_answer(self) -> bool:
        """Whether there was text or a call."""
        return self._has_text or self.num_calls > 0

    def add_tokens(self, tokens: Iterable[TokenSpan]) -> None:
        """The tokens of the text that the reader has got."""
        self._tokens.extend(tokens)

    def text(self, text: str) -> None:
        """The next piece of the answer; the reader has just read it."""
        self._part(TextPart, text)

    def reasoning(self, text: str) -> None:
        """The next piece of a thought; the reader has just read it."""
        self._part(ReasoningPart, text)

    def marker(self, *, in_reasoning: bool = False) -> None:
        """What the reader read last is no part: a marker, or the text of a call. The white space before it goes."""
        self._close()
        self._space.clear()
        self._is_at_start = self._trims
        self._drop_tokens(self._reader.position, in_reasoning=in_reasoning)

    def stray(self) -> None:
        """What the reader read last is a marker without its partner, inside a text that goes on."""
        self._close()
        self._drop_tokens(self._reader.position)

    def begin(self, name: str) -> None:
        """A call begins. What was read of it can no longer become text."""
        self._reader.recorded()
        self.marker()
        self.in_call = True
        self._event(ToolCallBegin(self.num_calls, name))

    def arguments(self, text: str) -> None:
        """The next piece of the arguments of the open call, as JSON."""
        if text and (self._max_calls is None or self.num_calls < self._max_calls):
            self._open.append(text)

    def end(self) -> None:
        """The open call is complete."""
        self.marker()
        self._event(ToolCallEnd(self.num_calls))
        self.in_call = False
        self.num_calls += 1

    def finish(self) -> None:
        """The answer is over. White space at the end of its text is text, as there is no other part behind it."""
        if self.in_call:
            self.end()
        if self._space and self._kind is TextPart:
            self._emit("".join(self._space), self._reader.position)
        if not self._is_at_start:
            self._open_tokens += self._tokens
            self._tokens.clear()
        self._close()

    def take(self) -> list[OutputEvent]:
        """The events that are new."""
        self._close()
        events, self._events = self._events, []
        return events

    def _event(self, event: ToolCallBegin | ToolCallEnd) -> None:
        if self._max_calls is None or self.num_calls < self._max_calls:
            self._events.append(event)

    def _part(self, kind: PartKind, text: str) -> None:
        if kind is not self._kind:
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
        """Tokens up to there are in no part."""
        dropped = self._tokens_until(stop)
        if in_reasoning or self._kind is ReasoningPart:
            self.num_reasoning_tokens += len(dropped)

    def _tokens_until(self, stop: int) -> list[TokenSpan]:
        """Tokens whose text ends up to there; one without text belongs to the character after it."""
        tokens: list[TokenSpan] = []
        while self._tokens and self._tokens[0].start < stop and self._tokens[0].stop <= stop:
            tokens.append(self._tokens.popleft())
        return tokens

    def _close(self) -> None:
        """Make an event of the part or the arguments that were collected."""
        if not self._open and not self._open_tokens:
            return
        text = "".join(self._open)
        self._open = []
        if self.in_call:
            self._events.append(ToolCallArguments(self.num_calls, text))
            return
        self._events.append(self._kind(text, tuple(self._open_tokens)))
        self._open_tokens = []
