"""Converts the beginning of an answer between token ids and text, so that it continues on another kind of engine."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.request import TokenEvent
from exo_mesh.domain.whole.text_pieces import Respelling, TextPiece, text_of
from exo_mesh.errors import EngineError, InputError
from exo_mesh.text.assembler import TextAssembler
from exo_mesh.text.output.events import ReasoningPart, TextPart, ToolCallArguments, ToolCallBegin, ToolCallEnd
from exo_mesh.text.output.parser import OutputParser
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.respelling import respell
from exo_mesh.text.tokenizer import TextModel


class AnswerBridge:
    """Implements TextBridge with the text side of one model, for one conversation. Blocking, for milliseconds."""

    def __init__(
        self, text: TextModel, tools: Sequence[Tool] = (), *, starts_in_reasoning: bool = False, is_bare: bool = False
    ) -> None:
        """is_bare: the request is a bare prompt, whose answer is plain text without markers."""
        self._text = text
        self._tools = tools
        self._starts_in_reasoning = starts_in_reasoning
        self._is_bare = is_bare

    def respelling(self, pieces: Sequence[TextPiece]) -> Respelling:
        """See TextBridge. Calls cannot be converted: each model writes them in a form of its own."""
        if any(piece.kind == "call" for piece in pieces):
            raise EngineError("this answer cannot continue on a ring: it has begun a tool call on a model server")
        output, reasoning, text = self._text.output, text_of(pieces, "reasoning"), text_of(pieces)
        written = ""
        if reasoning or self._starts_in_reasoning:
            if not output.reasoning_start:
                raise EngineError("this answer cannot continue on a ring: the model marks no reasoning there")
            written = reasoning if self._starts_in_reasoning else output.reasoning_start + "\n" + reasoning
            written += f"\n{output.reasoning_end}\n\n" if text else ""
        try:
            return respell(self._text, written + text)
        except InputError as exc:
            raise EngineError(f"this answer cannot continue on a ring: {exc}") from exc

    def pieces_of(self, token_ids: Sequence[int]) -> tuple[TextPiece, ...]:
        """See TextBridge."""
        if self._is_bare:
            return (TextPiece("text", self._text.decode(token_ids)),)
        output = self._text.output
        parser = OutputParser(output, tools=self._tools, starts_in_reasoning=self._starts_in_reasoning)
        assembler = TextAssembler(self._text.detokenizer(output.markers(has_tools=bool(self._tools))))
        found: list[TextPiece] = []
        for index, token_id in enumerate(token_ids):
            for event in parser.push(assembler.push(TokenEvent(index, token_id))):
                match event:
                    case TextPart(text=text) if text:
                        found.append(TextPiece("text", text))
                    case ReasoningPart(text=text) if text:
                        found.append(TextPiece("reasoning", text))
                    case ToolCallBegin(index=call, name=name):
                        found.append(TextPiece("call", "", call, name=name))
                    case ToolCallArguments(index=call, text=text):
                        found.append(TextPiece("call", text, call))
                    case ToolCallEnd():
                        pass
        return tuple(found)
