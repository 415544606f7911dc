"""Splits the text of an answer into events, piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.request import FinishReason
from exo_mesh.text.assembler import Piece
from exo_mesh.text.output.events import OutputEnd, OutputEvent
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import OutputFormat
from exo_mesh.text.output.harmony import HarmonyReading
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas, Tool
from exo_mesh.text.output.writer import EventWriter


class OutputParser:
    """Splits one answer into events. The joined events depend only on its text, never on how the text was cut.

    If a text looks like a call but breaks the format, it stays text of the answer, unchanged. Once a call has begun,
    its arguments are passed on as they arrive; if they stop early, the client keeps the part that it has.
    """

    def __init__(
        self,
        output: OutputFormat,
        *,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        max_calls: int | None = None,
        is_continued: bool = False,
    ) -> None:
        """tools: the tools that the request offers; without tools no text is read as a call. max_calls: further calls
        are dropped. is_continued: the first text continues a part that has begun, so its white space is kept."""
        self._reader = Reader()
        trims = bool(output.is_harmony or output.reasoning_start or (tools and output.tool_family))
        self._writer = EventWriter(self._reader, trims=trims, max_calls=max_calls)
        if output.is_harmony:
            self._steps = HarmonyReading(self._reader, self._writer, Schemas(tools)).read()
        else:
            self._steps = _Flat(self._reader, self._writer, output, tools).read(
                starts_in_reasoning, is_continued=is_continued
            )
        self._is_done = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, including its markers."""
        return self._writer.num_reasoning_tokens

    @property
    def num_held(self) -> int:
        """Characters that have arrived and are held back, because they may begin a marker."""
        return self._reader.num_held

    def push(self, piece: Piece) -> list[OutputEvent]:
        """Take a piece and return the events that it completes. After the piece with `finish`, push nothing more."""
        self._writer.add_tokens(piece.tokens)
        self._reader.push(piece.text)
        if piece.finish is not None:
            self._reader.end(was_cut=piece.finish is FinishReason.LENGTH)
        if not self._is_done:
            self._is_done = next(self._steps, self) is self  # the default means that the generator has ended
        if piece.finish is None:
            return self._writer.take()
        self._writer.finish()
        reason = piece.finish.value
        is_cut = bool(piece.stop_string) and not self._writer.is_last_call_whole()
        if piece.finish is FinishReason.STOP and self._writer.num_calls and not is_cut:
            reason = "tool_calls"
        return [*self._writer.take(), OutputEnd(reason, piece.stop_string)]


class _Flat:
    """Reads an answer in any format but Harmony: text, with reasoning and calls between markers."""

    def __init__(self, reader: Reader, writer: EventWriter, output: OutputFormat, tools: Sequence[Tool]) -> None:
        self._reader = reader
        self._writer = writer
        self._output = output
        self._schemas = Schemas(tools)
        self._family = family = FAMILIES.get(output.tool_family) if tools else None
        self._starts = family.starts if family else ()
        self._inner = family.inner if family else ()
        self._bare_starts = family.bare_starts if family else ""
        thought = (output.reasoning_start, output.reasoning_end)
        self._in_text = markers(*thought, *output.dropped, *self._starts, *self._inner)
        self._in_thought = markers(output.reasoning_end, *(self._starts if family and family.ends_reasoning else ()))
        self._keeps_inner = False

    def read(self, starts_in_reasoning: bool, *, is_continued: bool) -> More[None]:
        """Read the whole answer."""
        marker = ""
        if starts_in_reasoning:
            if not is_continued:
                self._writer.marker(in_reasoning=True)
            marker = yield from self._read_thought()
        while True:
            if not marker and (yield from self._comes_bare_call()):
                yield from self._read_calls("")
            if marker in self._starts:
                yield from self._read_calls(marker)
            marker = yield from self._reader.until(self._in_text, self._writer.text)
            if not marker:
                return
            if marker == self._output.reasoning_start:
                self._writer.marker(in_reasoning=True)
                yield from self._reader.accept(self._output.reasoning_label)
                marker = yield from self._read_thought()
            elif marker not in self._starts:
                self._skip(marker)

    def _read_thought(self) -> More[str]:
        """Read reasoning; its start was already read. Returns the marker of a call that ended the reasoning, or ""."""
        marker = yield from self._reader.until(self._in_thought, self._writer.reasoning)
        if marker in self._starts:
            return marker
        self._writer.marker(in_reasoning=True)
        return ""

    def _comes_bare_call(self) -> More[bool]:
        """Whether the answer so far is empty and the next character may begin a call without a marker."""
        if not self._bare_starts:
            return False
        following = yield from self._reader.peek()
        return bool(following) and following in self._bare_starts and not self._writer.has_answer

    def _skip(self, marker: str) -> None:
        """Drop a marker, or write it as text if it belongs to a failed call that became text."""
        if marker in self._output.dropped:
            self._writer.marker()
        elif marker in self._inner and self._keeps_inner:
            self._writer.text(marker)
        else:
            self._writer.stray()

    def _read_calls(self, marker: str) -> More[None]:
        """Read the calls after a start marker ("" for a call without one); if there is no call, marker and text become
        text of the answer."""
        assert self._family is not None
        num_before = self._writer.num_calls
        self._keeps_inner = False
        self._reader.record()
        try:
            yield from self._family.read(self._reader, self._writer, self._schemas, marker)
            self._reader.recorded()
            yield from self._read_surplus()
        except Malformed:
            if self._writer.in_call:
                self._writer.end()
            elif (text := self._reader.recorded()) is not None:
                self._keeps_inner = bool(marker)
                self._writer.text((marker if self._writer.num_calls == num_before else "") + text)

    def _read_surplus(self) -> More[None]:
        """Drop unmatched closing brackets, which some models write after a call."""
        while (following := (yield from self._reader.space())) and following in "]}":
            self._reader.take(1)
        self._writer.marker()
