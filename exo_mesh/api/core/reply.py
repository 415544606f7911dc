"""The reply to a request, in the dialect of its route: as a whole, or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from exo_mesh.api.core.answer import AnswerStep
from exo_mesh.api.sse import EVENTS, StreamForm, comment_frame, data_frame


class Reply(ABC):
    """Builds the reply to one request from the steps of its answer. Use one object either for a whole reply or for a
    stream."""

    form: StreamForm = EVENTS
    """The form of the stream; it also frames an error that ends the stream."""

    @abstractmethod
    def whole(self, steps: Iterable[AnswerStep]) -> Any:
        """The reply to a request without streaming, from all of its steps."""

    @abstractmethod
    def chunks(self, step: AnswerStep) -> list[Any]:
        """The chunks of a stream for one step. Call it for every step, in order."""

    def frame(self, chunk: Any, event_id: int | None) -> bytes:
        """Encode a chunk. event_id: see data_frame; only the last chunk of a step has one."""
        return data_frame(chunk, event_id)

    def opening(self) -> list[bytes]:
        """What a stream begins with, before the first step."""
        return []

    def waiting(self, progress: str) -> bytes:
        """What a stream sends while it waits. progress: one line for people."""
        return comment_frame(progress)

    def closing(self) -> bytes:
        """What a stream ends with, after the last step."""
        return b""
