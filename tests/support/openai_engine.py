"""An engine of exo_mesh_openai that is loaded from a fake on the same event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from exo_mesh_openai import provider
from exo_mesh_openai.client import Deadlines
from exo_mesh_openai.engine import OpenAiEngine

from exo_mesh.domain.request import SamplingParams
from exo_mesh.domain.whole.text_pieces import PieceKind, TextPiece, text_of
from exo_mesh.domain.whole.text_request import TextEnd, TextRequest
from exo_mesh.engine.whole import WholeLoadRequest
from tests.support.fake_openai import FakeModelServer, serving_fake

GREEDY = SamplingParams(temperature=0.0)


@contextlib.asynccontextmanager
async def loaded_from(
    server: FakeModelServer, deadlines: Deadlines | None = None, **options: str
) -> AsyncIterator[OpenAiEngine]:
    async with serving_fake(server) as url:
        given = {"servers": url, **options}
        (report,) = await provider.look(given)
        engine = OpenAiEngine(deadlines)
        try:
            await engine.load(WholeLoadRequest(report.models[0], given), lambda done, total: None)
            yield engine
        finally:
            await engine.close()


def chat(
    text: str = "Hello", *, max_tokens: int = 12, begun: Sequence[TextPiece] = (), sampling: SamplingParams = GREEDY,
    stops: Sequence[str] = (), **body: Any
) -> TextRequest:  # fmt: skip
    messages = [{"role": "user", "content": text}]
    return TextRequest("r1", {"messages": messages, **body}, max_tokens, sampling, tuple(stops), tuple(begun))


async def collect(engine: OpenAiEngine, request: TextRequest) -> tuple[list[TextPiece], TextEnd]:
    """All pieces of an answer, and its end."""
    *pieces, end = [event async for event in engine.generate(request)]
    assert isinstance(end, TextEnd)
    return [piece for piece in pieces if isinstance(piece, TextPiece)], end


def joined(pieces: Sequence[TextPiece], kind: PieceKind = "text") -> str:
    return text_of(pieces, kind)
