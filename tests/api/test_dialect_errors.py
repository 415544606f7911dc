"""Each dialect has errors of its own shape, whole and at the end of a stream that has begun."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import EngineError, OverloadError
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Hi"}
BROKEN = "the engine broke"


@dataclass(frozen=True)
class Dialect:
    """A route, a body for it, and how its errors look. shape: the keys of an error, and of what is in it. message: of
    an error. last: the message of the error that ends a stream."""

    path: str
    body: Json
    shape: tuple[set[str], set[str]]
    message: Callable[[Json], str]
    last: Callable[[str], str]


def data_of(text: str) -> list[Json]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def named(text: str, name: str) -> list[Json]:
    """The data of the events with a name."""
    return [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if f"event: {name}\n" in block]


OPENAI: tuple[set[str], set[str]] = ({"error"}, {"message", "type", "param", "code"})
ANTHROPIC: tuple[set[str], set[str]] = ({"type", "error", "request_id"}, {"type", "message"})
DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions", {"messages": [USER]}, OPENAI,
        lambda body: str(body["error"]["message"]), lambda text: str(data_of(text)[-1]["error"]["message"]),
    ),
    "completion": Dialect(
        "/v1/completions", {"prompt": "Hi", "max_tokens": 20}, OPENAI,
        lambda body: str(body["error"]["message"]), lambda text: str(data_of(text)[-1]["error"]["message"]),
    ),
    "response": Dialect(
        "/v1/responses", {"input": "Hi"}, OPENAI,
        lambda body: str(body["error"]["message"]),
        lambda text: str(named(text, "response.failed")[-1]["response"]["error"]["message"]),
    ),
    "message": Dialect(
        "/v1/messages", {"messages": [USER], "max_tokens": 20}, ANTHROPIC,
        lambda body: str(body["error"]["message"]), lambda text: str(named(text, "error")[-1]["error"]["message"]),
    ),
    "ollama": Dialect(
        "/api/chat", {"messages": [USER], "model": "exo-mesh-demo"}, ({"error"}, set()),
        lambda body: str(body["error"]), lambda text: str(json.loads(text.splitlines()[-1])["error"]),
    ),
}  # fmt: skip


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@pytest.fixture
async def api_of_all(tmp_path: Path) -> AsyncIterator[Served]:
    mesh = ScriptedMesh(write_text_model(tmp_path / "m", TEMPLATE), limit=4096)
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield server


async def refused(api: Served, dialect: Dialect, **fields: Any) -> tuple[int, str, str | None]:
    """(status, message, Retry-After) of a request that fails, in the dialect's shape."""
    async with api.http.post(dialect.path, json={**dialect.body, **fields}) as reply:
        body = await reply.json()
    outer, inner = dialect.shape
    assert body.keys() == outer and (not inner or body["error"].keys() == inner), body
    return reply.status, dialect.message(body), reply.headers.get("Retry-After")


async def test_a_wrong_field_and_an_unknown_model_are_refused_in_the_own_shape(
    api_of_all: Served, dialect: Dialect
) -> None:
    status, message, _ = await refused(api_of_all, dialect, colour=1)
    assert status == 400 and "colour" in message
    status, message, _ = await refused(api_of_all, dialect, model="nobody/has-it")
    assert status == 404 and "nobody/has-it" in message


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_mesh_that_is_full_says_when_to_retry(api_of_all: Served, dialect: Dialect, is_streamed: bool) -> None:
    async def full(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        raise OverloadError("the queue is full", retry_after_s=3)
        yield

    api_of_all.mesh.script = full
    assert await refused(api_of_all, dialect, stream=is_streamed) == (429, "the queue is full", "3")


async def test_a_stream_that_fails_ends_with_an_error_and_never_silently(api_of_all: Served, dialect: Dialect) -> None:
    mesh = api_of_all.mesh

    async def breaks(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        for event in mesh.events(mesh.text.encode_text("Hello, world!"), request)[:3]:
            yield event
        raise EngineError(BROKEN)

    mesh.script = breaks
    async with api_of_all.http.post(dialect.path, json={**dialect.body, "stream": True}) as reply:
        text = await reply.text()
    assert reply.status == 200 and "Hell" in text and dialect.last(text) == BROKEN
    for end in ("[DONE]", "response.completed", "message_stop", '"done":true'):
        assert end not in text
