"""The dummy WholeModelEngine: answers that follow from the question alone, at a configurable speed, without a server.

Its "server" is a set of options: for tests, demos and measuring the mesh itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.contract import LoadProgress
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, ModelError, StageLostError
from exo_mesh_dummy.text_options import TextOptions, is_up, parse_text_options

_WORDS = ("rain", "stone", "river", "glass", "lamp", "field", "bell", "road", "salt", "wind", "clock", "paper")


def words_for(question: str, num_words: int) -> list[str]:
    """The answer to a question: equal for equal questions, on every machine."""
    digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
    return [_WORDS[digest[index % len(digest)] % len(_WORDS)] for index in range(num_words)]


class DummyText:
    """Writes words that follow from the last message, one piece each."""

    slots = 1
    continues = False

    def __init__(self) -> None:
        self._options = TextOptions()

    async def load(self, request: WholeLoadRequest, progress: LoadProgress) -> None:
        self._options = options = parse_text_options(request.options)
        if request.model.served_name not in options.models:
            raise ModelError(f"the dummy server has no model {request.model.served_name}")
        if not is_up(options):
            raise EngineError("the dummy server is down")
        self.slots, self.continues = options.slots, options.continues
        progress(1, 1)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        question = question_of(request.body)
        words = words_for(question, self._options.words)
        num_prompt = len(re.findall(r"\S+", question))
        text = " ".join(words)
        begun = text_of(request.begun)
        if not text.startswith(begun):
            raise EngineError("the beginning of the answer is not one of this engine")
        num_begun = len(re.findall(r"\S+", begun))
        pieces = re.findall(r"\s*\S+", text[len(begun) :])
        for number, piece in enumerate(pieces, num_begun):
            if number == request.max_tokens:
                yield TextEnd(FinishReason.LENGTH, TextUsage(num_prompt, number))
                return
            await asyncio.sleep(self._options.delay_ms / 1000)
            if not is_up(self._options):
                raise StageLostError("the dummy server is down")
            yield TextPiece("text", piece)
        yield TextEnd(FinishReason.STOP, TextUsage(num_prompt, num_begun + len(pieces)))

    async def check(self) -> None:
        if not is_up(self._options):
            raise EngineError("the dummy server is down")

    def memory_bytes(self) -> int:
        return 0

    async def close(self) -> None:
        pass


def question_of(body: Mapping[str, Any]) -> str:
    """The last message of a conversation, or the prompt."""
    if "prompt" in body:
        return str(body["prompt"])
    messages = body["messages"]
    return str(messages[-1].get("content", "")) if messages else ""
