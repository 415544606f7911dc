"""Streams that wait hear that they do, in comments that clients skip; and what a client leaves is work no longer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.meshes import test_openai_node
from tests.support.peers import Peer, await_all, chat_body, mesh

RUNNING = 32
"""What a driver runs at once."""
QUESTION = "Count from 7 to 12."
SCRIPT = Path(__file__).with_name("waiting_client.mjs")
LAP_S = 2 * 0.02


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Each stage takes 20 ms for a frame."""
    flags = ["--engine-option", "cost_ms=20"]
    with mesh(tmp_path_factory.mktemp("waiting"), [flags] * 2, engine="dummy") as peers:
        peers[0].place(min_peers=2)
        yield peers


@asynccontextmanager
async def full_ring(http: aiohttp.ClientSession, peers: list[Peer]) -> AsyncIterator[None]:
    """As many endless requests as the ring takes."""
    body = chat_body(QUESTION, stream=True, ignore_eos=True, max_tokens=4000)
    asked = [
        asyncio.ensure_future(http.post(f"{peers[n % 2].url}/v1/chat/completions", json=body)) for n in range(RUNNING)
    ]
    replies = await asyncio.gather(*asked)
    assert {reply.status for reply in replies} == {200}
    try:
        yield
    finally:
        for reply in replies:
            reply.close()


async def lines_of(http: aiohttp.ClientSession, peer: Peer, body: dict[str, Any]) -> AsyncIterator[str]:
    async with http.post(f"{peer.url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.strip():
                yield line.decode().strip()


async def python_client(peer: Peer, body: dict[str, Any]) -> str:
    async with AsyncOpenAI(base_url=f"{peer.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        stream = await client.chat.completions.create(**body)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def node_client(peer: Peer, body: dict[str, Any]) -> str:
    process = await asyncio.create_subprocess_exec(
        "node", str(SCRIPT), f"{peer.url}/v1", json.dumps(body), stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    text, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return text.decode()


@pytest.mark.extended
async def test_a_queued_stream_hears_its_place_and_clients_do_not_mind(two: list[Peer]) -> None:
    body = chat_body(QUESTION, stream=True, max_tokens=20)
    alone = two[0].chat(QUESTION, max_tokens=20)["choices"][0]["message"]["content"]
    clients = [python_client] if test_openai_node.why_not() else [python_client, node_client]
    limitless = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limitless) as http:
        async with full_ring(http, two):
            waiting = [asyncio.create_task(client(two[0], body)) for client in clients]
            await asyncio.to_thread(await_all, two[1:], lambda peer: peer.api.get("/queue")["waiting"] == len(clients))
            lines = lines_of(http, two[1], body)
            place = len(clients) + 1
            assert (await anext(lines)).startswith(f": queued {place} of {place}")
            assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == [alone] * len(clients)
        rest = [line async for line in lines]
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == alone
    await asyncio.to_thread(await_all, two, Peer.idle)


@pytest.mark.slow
async def test_a_long_prefill_tells_how_far_it_is(tmp_path: Path) -> None:
    """Half a second for each chunk, in each of two stages; clients hear of it every two."""
    with mesh(tmp_path, [["--engine-option", "cost_ms=500"]] * 2, engine="dummy") as peers:
        peers[0].place(min_peers=2)
        body = chat_body("x " * 3000, stream=True, max_tokens=1)
        async with aiohttp.ClientSession() as http:
            heard = [line async for line in lines_of(http, peers[1], body)]
    comments = [line for line in heard if line.startswith(":")]
    shares = [int(line.removeprefix(": prefill ").removesuffix(" %")) for line in comments]
    assert len(shares) >= 2 and shares == sorted(set(shares)) and 0 < shares[-1] < 100
    assert heard[len(comments)].startswith("data: {") and heard[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(QUESTION, id="decoding", marks=pytest.mark.extended),
        pytest.param("x " * 3000, id="prefilling", marks=pytest.mark.extended),
    ],
)
async def test_when_the_client_has_gone_the_stages_stop_within_a_second(two: list[Peer], prompt: str) -> None:
    """Counted in frames: a second is so many laps, and of prefill twice as many chunks, for two are under way."""
    at_most = 2 * int(1 / LAP_S)
    body = chat_body(prompt, stream=True, ignore_eos=True, max_tokens=1000)
    async with aiohttp.ClientSession() as http:
        reply = asyncio.create_task(http.post(f"{two[1].url}/v1/chat/completions", json=body))
        await asyncio.to_thread(await_all, two, Peer.busy)
        before = [frames(peer) for peer in two]
        reply.cancel()
        await asyncio.gather(reply, return_exceptions=True)
    await asyncio.to_thread(await_all, two, Peer.idle)
    after = [frames(peer) for peer in two]
    assert all(b - a <= at_most for a, b in zip(before, after, strict=True)), (before, after)


def frames(peer: Peer) -> int:
    (beat,) = peer.state()["stages_here"].values()
    return int(beat["frames_in"])
