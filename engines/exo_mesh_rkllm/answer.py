"""Makes the events of one answer from the chunks that RKLLAMA sends: limit, stop strings, reasoning, calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage
from exo_mesh.domain.whole.text_request import TextEnd
from exo_mesh.errors import ContextLengthError, EngineError
from exo_mesh.text.stop import StopStrings
from exo_mesh_rkllm.replies import Chunk
from exo_mesh_rkllm.thinking import ThoughtSplitter


class BoardAnswer:
    """One answer. RKLLAMA knows no stop strings and reports "stop" at its limit too, so both are decided here.

    max_calls: further tool calls are dropped. context_limit: tokens of prompt and output; 0 if it is not known.
    is_complete: nothing that the server still sends belongs to the answer.
    """

    def __init__(
        self,
        max_tokens: int,
        stops: Sequence[str] = (),
        *,
        max_calls: int | None = None,
        context_limit: int = 0,
    ) -> None:
        self.is_complete = False
        self._has_end = False
        self._max_tokens = max_tokens
        self._max_calls = max_calls
        self._context_limit = context_limit
        self._stops = StopStrings(stops)
        self._splitter = ThoughtSplitter()
        self._num_tokens = 0
        self._num_calls = 0
        self._was_cut = False
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None

    @property
    def has_end(self) -> bool:
        """Whether the server has said that the answer ends, or the answer is complete without it."""
        return self._has_end or self.is_complete

    def push(self, chunk: Chunk) -> list[TextPiece]:
        """Take a chunk and return the pieces that it completes. Raises EngineError if the server gave up."""
        if chunk.was_aborted:
            raise EngineError(
                "RKLLAMA gave the answer up after its own timeout; ask for less, or raise max_seconds_waiting_worker_"
                "response in its configuration"
            )
        self._has_end = self._has_end or chunk.is_end
        self._prompt_tokens = chunk.prompt_tokens or self._prompt_tokens
        self._output_tokens = chunk.output_tokens or self._output_tokens
        if self._num_tokens >= self._max_tokens and chunk.is_token:
            # this token is one too many: the server does not know the limit
            self.is_complete = self._was_cut = True
            return self.flush()
        self._num_tokens += chunk.is_token
        pieces = [TextPiece("reasoning", chunk.reasoning)] if chunk.reasoning else []
        pieces += self._split(self._stops.push(chunk.text))
        pieces += self._calls(chunk)
        if self._stops.stopped:
            self.is_complete = True
            pieces += self.flush()
        return pieces

    def flush(self) -> list[TextPiece]:
        """The pieces that were held back, once no chunk follows."""
        pieces = self._split(self._stops.flush())
        return [*pieces, *(TextPiece(kind, text) for kind, text in self._splitter.flush())]

    def end(self) -> TextEnd:
        """The last event, after `flush`. Raises ContextLengthError if the prompt left no room for a token."""
        usage = TextUsage(self._prompt_tokens, self._counted() or None)
        total = self._counted() + (self._prompt_tokens or 0)
        is_full = 0 < self._context_limit <= total and self._prompt_tokens is not None
        if is_full and not self._counted():
            raise ContextLengthError(
                f"the prompt has {self._prompt_tokens} tokens, and the model has room for {self._context_limit} of "
                "prompt and answer"
            )
        is_at_limit = self._was_cut or self._counted() >= self._max_tokens or is_full
        # an answer that ends with calls, or before a stop string, is finished, whatever its length
        is_finished = self._num_calls or self._stops.stopped
        return TextEnd(FinishReason.LENGTH if is_at_limit and not is_finished else FinishReason.STOP, usage)

    def _counted(self) -> int:
        """Tokens of the output: by the server's count, which it sends at the end, else one for each chunk."""
        if self._was_cut:
            return self._num_tokens
        return max(self._num_tokens, self._output_tokens or 0)

    def _split(self, text: str) -> list[TextPiece]:
        return [TextPiece(kind, part) for kind, part in self._splitter.push(text)] if text else []

    def _calls(self, chunk: Chunk) -> list[TextPiece]:
        pieces = []
        for call in chunk.calls:
            if self._max_calls is None or self._num_calls < self._max_calls:
                pieces.append(TextPiece("call", call.arguments, self._num_calls, call.call_id, call.name))
                self._num_calls += 1
        return pieces
