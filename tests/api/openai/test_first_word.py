"""When the status of a stream goes out, and what its comments say: refusals keep their own status code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import FinishReason, GenerateRequest, Progress, TokenEvent
from exo_mesh.errors import OverloadError
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served

ASKED = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
KEEP_ALIVE_S = 0.05


@pytest.fixture
async def api(mesh: ScriptedMesh) -> AsyncIterator[Served]:
    options = ApiOptions(keep_alive_s=KEEP_ALIVE_S, head_hold_s=6 * KEEP_ALIVE_S, access=OPEN_ADMIN)
    async with served(mesh, options) as server:
        yield server


def refused_after(progress: Sequence[Progress], pause_s: float, api: Served) -> None:
    """Requests hear this, and are refused so much later."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        for one in progress:
            yield one
        await asyncio.sleep(pause_s)
        raise OverloadError("32 requests are waiting already", retry_after_s=4)

    api.mesh.script = script


@pytest.mark.parametrize("progress", [[], [Progress("placing")]])
async def test_a_refusal_that_comes_later_than_a_comment_has_a_status(api: Served, progress: list[Progress]) -> None:
    refused_after(progress, 3 * KEEP_ALIVE_S, api)
    async with api.http.post("/v1/chat/completions", json=ASKED) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (429, "4")
        assert (await reply.json())["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("progress", "pause_s"),
    [([Progress("queued", 1, 2)], 3 * KEEP_ALIVE_S), ([Progress("loading", 1, 8)], 3 * KEEP_ALIVE_S), ([], 0.5)],
)
async def test_the_first_comment_ends_the_wait_for_a_status(
    api: Served, progress: list[Progress], pause_s: float
) -> None:
    """Of a request that the mesh has taken the first comment is due at once; of another one after head_hold_s."""
    refused_after(progress, pause_s, api)
    async with api.http.post("/v1/chat/completions", json=ASKED) as reply:
        assert reply.status == 200
        assert b'"code":"overloaded"' in await reply.read()


async def test_all_choices_of_a_request_are_waited_for(api: Served) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        if len(api.mesh.requests) == 1:
            yield Progress("queued", 1, 1)
            await asyncio.sleep(30)
        await asyncio.sleep(3 * KEEP_ALIVE_S)
        raise OverloadError("32 requests are waiting already")

    api.mesh.script = script
    async with api.http.post("/v1/chat/completions", json={**ASKED, "n": 2}) as reply:
        assert reply.status == 429


async def test_between_tokens_a_stream_says_nothing_of_its_prefill(api: Served) -> None:
    async def script(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("prefill", 99, 100)
        await asyncio.sleep(2 * KEEP_ALIVE_S)
        yield TokenEvent(0, api.mesh.text.encode_text("Hello")[0])
        await asyncio.sleep(3 * KEEP_ALIVE_S)
        yield TokenEvent(1, None, finish=FinishReason.STOP)

    api.mesh.script = script
    async with api.http.post("/v1/chat/completions", json=ASKED) as reply:
        before, _, after = (await reply.text()).partition("data: ")
    assert ": prefill 99 %" in before and ": prefill" not in after
    assert ": keep-alive" in after
