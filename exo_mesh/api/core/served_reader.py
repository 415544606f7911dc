"""Turns the pieces of text of a model server into neutral events, also where a ring began or finishes the answer."""

from __future__ import annotations

from exo_mesh.api.core.preparing import PreparedRequest
from exo_mesh.domain.request import TokenEvent
from exo_mesh.domain.whole.text_pieces import PieceKind, TextPiece
from exo_mesh.text.assembler import Piece, TextAssembler
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from exo_mesh.text.output.parser import OutputParser


class ServedReader:
    """Reads one answer from its first piece of text on. assembler: of the whole answer; it finds the stop strings."""

    def __init__(self, assembler: TextAssembler, prepared: PreparedRequest) -> None:
        self.has_begun = False
        self.is_over = False
        self.num_pieces = 0
        self.num_reasoning_pieces = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        """Tokens as the server counted them; None before the end, or if it did not."""
        self._assembler = assembler
        self._prepared = prepared
        self._parser: OutputParser | None = None
        self._kind: PieceKind = "text"
        self._open_call: int | None = None
        self._num_calls = 0
        self._stop_string = ""
        """The stop string at which the server ended the answer."""

    def push(self, event: TokenEvent) -> list[OutputEvent]:
        """Take an event and return the neutral events that it completes. After `is_over`, push nothing more."""
        self.has_begun = True
        if event.usage is not None:
            self.prompt_tokens, self.output_tokens = event.usage.prompt_tokens, event.usage.output_tokens
            if event.usage.stop_string in self._prepared.stops:
                self._stop_string = event.usage.stop_string
        if event.token_id is not None:
            return self._push_token(event)
        if event.respelling is not None:
            self._assembler.respell(event.respelling)
            self._parser = None  # what it holds back is not among the text that is known
            self.num_pieces = 0  # from now on its tokens are counted
        made = [] if event.piece is None else self._push_piece(event.piece)
        if event.finish is not None and not self.is_over:
            made += self._end(self._assembler.push_text("", event.finish))
        return made

    def _push_piece(self, piece: TextPiece) -> list[OutputEvent]:
        self.num_pieces += 1
        self._parser, self._kind = None, piece.kind
        if piece.kind == "reasoning":
            self.num_reasoning_pieces += 1
            return [ReasoningPart(piece.text)] if piece.text else []
        if piece.kind == "call":
            return self._push_call(piece)
        given = self._assembler.push_text(piece.text)
        if given.finish is not None:  # a stop string
            return self._end(given)
        return [TextPart(given.text, given.tokens)] if given.text else []

    def _push_call(self, piece: TextPiece) -> list[OutputEvent]:
        if piece.call and not self._prepared.parallel_calls:
            return []  # the client allows one call
        made: list[OutputEvent] = []
        if piece.name and piece.call != self._open_call:
            made += self._close_call()
            self._open_call, self._num_calls = piece.call, self._num_calls + 1
            made.append(ToolCallBegin(piece.call, piece.name))
        if piece.text:
            made.append(ToolCallArguments(piece.call, piece.text))
        return made

    def _push_token(self, event: TokenEvent) -> list[OutputEvent]:
        """A token of the ring on which the answer continues."""
        if self._parser is None and self._prepared.needs_parser:
            self._parser = OutputParser(
                self._prepared.output,
                tools=self._prepared.tools,
                starts_in_reasoning=self._kind == "reasoning",
                max_calls=None if self._prepared.parallel_calls else 1,
                is_continued=True,
            )
        given = self._assembler.push(event)
        self.is_over = given.finish is not None
        if self._parser is not None:
            events = self._parser.push(given)
            for made_event in events:
                if isinstance(made_event, ReasoningPart | TextPart):
                    self._kind = "reasoning" if isinstance(made_event, ReasoningPart) else "text"
            return events
        made: list[OutputEvent] = [TextPart(given.text, given.tokens)] if given.text else []
        return [*made, OutputEnd(given.finish.value, given.stop_string)] if given.finish is not None else made

    def _end(self, given: Piece) -> list[OutputEvent]:
        assert given.finish is not None, "the answer ends"
        self.is_over = True
        made: list[OutputEvent] = [TextPart(given.text, given.tokens)] if given.text else []
        made += self._close_call()
        stop_string = given.stop_string or ("" if self._num_calls else self._stop_string)
        return [*made, OutputEnd("tool_calls" if self._num_calls else given.finish.value, stop_string)]

    def _close_call(self) -> list[OutputEvent]:
        closed, self._open_call = self._open_call, None
        return [] if closed is None else [ToolCallEnd(closed)]
