"""The state of one answer: what has come of it, and whether it is over."""

from __future__ import annotations

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.repeating import Repeated
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage
from exo_mesh.domain.whole.text_request import TextEnd, TextRequest
from exo_mesh.errors import StageLostError
from exo_mesh_openai.answer import AnswerReader
from exo_mesh_openai.body import Begin
from exo_mesh_openai.failures import error_of_event
from exo_mesh_openai.sse import StreamEvent

PIECES_PER_TOKEN = 4
"""A server that sends more pieces for each token of its limit is cut off: it ignores the limit."""


class AnswerProgress:
    """Follows one answer through its events. begun_tokens: of a beginning that is continued.

    num_pieces: pieces that have come, including those that were only compared with the beginning. is_over: nothing more
    is to be read.
    """

    def __init__(self, request: TextRequest, begin: Begin, where: str, begun_tokens: int = 0) -> None:
        self.num_pieces = 0
        self.is_over = False
        self._where = where
        self._reader = AnswerReader(where)
        self._repeated = Repeated(request.begun if begin is Begin.REPEAT else ())
        self._begun_tokens = begun_tokens
        self._most_pieces = PIECES_PER_TOKEN * request.max_tokens
        self._is_cut = False

    @property
    def is_finished(self) -> bool:
        """Whether the server has said why the answer ended. Token counts may follow."""
        return self._reader.finish is not None

    def pieces_of(self, event: StreamEvent) -> list[TextPiece]:
        """The new pieces in one event. Raises the error that the server sent in mid-answer, or EngineError."""
        if self.is_over:
            return []
        if event.is_error:
            raise error_of_event(event.data, self._where)
        if event.data == "[DONE]":
            self.is_over = True
            return []
        found: list[TextPiece] = []
        for piece in self._reader.read(event.data):
            self.num_pieces += 1
            if (new := self._repeated.take(piece)) is not None:
                found.append(new)
            if self.num_pieces >= self._most_pieces:
                self.is_over = self._is_cut = True
                break
        return found

    def end(self) -> TextEnd:
        """The end of the answer. Raises StageLostError if the stream ended in its middle, and EngineError if a repeated
        answer ended before it came to the new part."""
        if self._is_cut:
            return TextEnd(FinishReason.LENGTH)
        if self._reader.finish is None:
            raise StageLostError(f"the model server {self._where} ended the stream in mid-answer")
        if not self._repeated.is_over:
            raise self._repeated.differs()
        return TextEnd(self._reader.finish, self._usage())

    def _usage(self) -> TextUsage:
        """The counts for the whole answer: for the server, a beginning that it continues is a part of the prompt."""
        prompt, output = self._reader.usage.prompt_tokens, self._reader.usage.output_tokens
        return TextUsage(
            prompt if prompt is None else max(0, prompt - self._begun_tokens),
            output if output is None else output + self._begun_tokens,
            self._reader.stop_string,
        )
