"""An engine that has loaded a model of a fake RKLLAMA, and whole answers of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from exo_mesh_rkllm.engine import RkllmEngine

from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.domain.whole.text_pieces import PieceKind, TextPiece, TextUsage, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.whole import WholeLoadRequest
from tests.support.fake_rkllama import MODELS, FakeRkllama, serving

DIALECTS = ("ollama", "openai", "native", "documented")


@dataclass(frozen=True)
class Got:
    """A whole answer."""

    pieces: tuple[TextPiece, ...]
    reason: FinishReason
    usage: TextUsage

    def text(self, kind: PieceKind = "text") -> str:
        return text_of(self.pieces, kind)

    @property
    def calls(self) -> list[tuple[int, str, str, str]]:
        return [(one.call, one.call_id, one.name, one.text) for one in self.pieces if one.kind == "call"]


def chat(text: str, max_tokens: int = 100, *, stops: tuple[str, ...] = (), **body: Any) -> TextRequest:
    """A chat of one message. body: further keys."""
    messages = [{"role": "user", "content": text}]
    return TextRequest("test", {"messages": messages, **body}, max_tokens, SamplingParams(temperature=0.0), stops)


@asynccontextmanager
async def loaded(
    fake: FakeRkllama, *, model: str = MODELS[0], free_s: float = 5.0, context_limit: int = 0, **options: str
) -> AsyncIterator[RkllmEngine]:
    """An engine that has loaded a model of the server, which runs meanwhile."""
    async with (
        serving(fake) as address,
        loaded_at(address, model=model, free_s=free_s, context_limit=context_limit, **options) as engine,
    ):
        yield engine


@asynccontextmanager
async def loaded_at(
    address: str, *, model: str = MODELS[0], free_s: float = 5.0, context_limit: int = 0, **options: str
) -> AsyncIterator[RkllmEngine]:
    """An engine that has loaded a model of the server at an address."""
    engine = RkllmEngine(free_s=free_s)
    served = ServedModel("m", "rkllm", address, model, context_limit=context_limit)
    try:
        await engine.load(WholeLoadRequest(served, options), lambda done, total: None)
        yield engine
    finally:
        await engine.close()


async def answer(engine: RkllmEngine, request: TextRequest) -> Got:
    """The whole answer."""
    events = [event async for event in engine.generate(request)]
    *pieces, end = events
    assert isinstance(end, TextEnd)
    assert all(isinstance(piece, TextPiece) for piece in pieces)
    return Got(tuple(piece for piece in pieces if isinstance(piece, TextPiece)), end.reason, end.usage)


async def begin(events: AsyncGenerator[TextEvent, None], count: int = 2) -> list[TextEvent]:
    """The first events of an answer, which is then cancelled."""
    async with aclosing(events):
        return [await anext(events) for _ in range(count)]
