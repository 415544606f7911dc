"""Real nodes: a running answer is read through another peer, stopped from there, and ends typed if its entry dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.peers import Peer, await_all, chat_body, mesh

pytestmark = pytest.mark.extended

PROMPT = "Count from one to fifty. " * 40
SECRET = "x-exo-mesh-stream-secret"
COST = ["--engine-option", "cost_ms=10"]


async def lines_until_end(reply: aiohttp.ClientResponse) -> list[Any]:
    """The data of all events."""
    found: list[Any] = []
    async for line in reply.content:
        if line.startswith(b"data: {"):
            found.append(json.loads(line.removeprefix(b"data: ")))
    return found


def text_in(events: list[Any]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one.get("choices"))


class Asked:
    """An answer that runs: asked for at one peer, seen from another."""

    def __init__(self, http: aiohttp.ClientSession, entry: Peer, other: Peer, **fields: Any) -> None:
        self._http = http
        self._url = other.url
        self._body = chat_body(PROMPT, stream=True, ignore_eos=True, **fields)
        self._entry = entry
        self.headers: dict[str, str] = {}

    async def begin(self) -> aiohttp.ClientResponse:
        reply = await self._http.post(f"{self._entry.url}/v1/chat/completions", json=self._body)
        assert reply.status == 200, await reply.text()
        self.headers = {SECRET: reply.headers[SECRET]}
        async with self._http.get(f"{self._url}/v1/streams", headers=self.headers) as listed:
            (row,) = (await listed.json())["data"]
        assert row["peer"] == self._entry.id
        self.path = f"{self._url}/v1/streams/{row['id']}"
        return reply


def test_an_answer_is_read_stopped_and_lost_through_another_peer(tmp_path: Path) -> None:
    """The entry peer is not in the ring: what it alone knows is who may read the answer."""
    with mesh(tmp_path, [COST, COST, []], engine="dummy") as peers:
        entry, other = peers[2], peers[0]
        other.place(min_peers=2, exclude_peers=[entry.id])
        await_all(peers, lambda peer: [one["state"] for one in peer.instances()] == ["ready"])
        asyncio.run(both_read_the_same(entry, other))
        asyncio.run(stopped_from_elsewhere(entry, other))
        asyncio.run(entry_dies(entry, other))
        await_all([other], Peer.idle)


async def both_read_the_same(entry: Peer, other: Peer) -> None:
    async with aiohttp.ClientSession() as http:
        asked = Asked(http, entry, other, max_tokens=60)
        own = await asked.begin()
        async with http.get(asked.path) as refused, http.get(asked.path, headers=asked.headers) as reader:
            assert (refused.status, reader.status) == (404, 200)
            mine, theirs = await asyncio.gather(lines_until_end(own), lines_until_end(reader))
    assert theirs == mine and len(text_in(mine)) > 50


async def stopped_from_elsewhere(entry: Peer, other: Peer) -> None:
    async with aiohttp.ClientSession() as http:
        asked = Asked(http, entry, other, max_tokens=2000)
        own = await asked.begin()
        async with http.get(asked.path, headers=asked.headers) as reader:
            async with http.delete(asked.path, headers=asked.headers) as stopped:
                assert stopped.status == 200
            ends = [(await lines_until_end(one))[-1]["error"]["code"] for one in (own, reader)]
    assert ends == ["cancelled", "cancelled"]


async def entry_dies(entry: Peer, other: Peer) -> None:
    async with aiohttp.ClientSession() as http:
        asked = Asked(http, entry, other, max_tokens=2000)
        await asked.begin()
        async with http.get(asked.path, headers=asked.headers) as reader:
            assert await reader.content.readline()
            os.kill(entry.child.pid, signal.SIGKILL)
            events = await asyncio.wait_for(lines_until_end(reader), 30)
        assert events[-1]["error"]["code"] == "transport_error", events[-1]
