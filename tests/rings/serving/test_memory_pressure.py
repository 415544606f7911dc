"""Memory runs short on one machine of a ring while it serves: the newest wait, new ones go elsewhere, no text suffers.

Real nodes and runners; only what the nodes read as the memory of their machines is made up.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from exo_mesh.errors import MeshError, OverloadError
from tests.rings.serving.dispatchers import MODEL, ROOM, SMALL, Ring
from tests.support.dummy_oracle import dummy_text
from tests.support.peers import Peer, await_all
from tests.support.processes import eventually

TOKENS = 1200
SHORT = "16GiB 0.4GiB"


@dataclass
class Reader:
    """A client: what it has read so far."""

    text: str = ""
    tokens: int = 0
    status: int = 0
    finish: list[str] = field(default_factory=list)

    async def ask(self, http: aiohttp.ClientSession, peer: Peer, prompt: str, tokens: int = TOKENS) -> None:
        wanted: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        async with http.post(f"{peer.url}/v1/completions", json={**wanted, "stream": True}) as reply:
            self.status = reply.status
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["text"]
                        self.tokens += bool(choice["text"])
                        self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []


def driver(ring: Ring) -> dict[str, Any]:
    """The queue of the ring, wherever its driver is."""
    queues = [one for peer in ring.peers for one in peer.api.get("/queue")["instances"]]
    (found,) = [one for one in queues if one["instance"] == f"{MODEL}-1"]
    return dict(found)


def evictions(ring: Ring) -> float:
    lines = [line for peer in ring.peers for line in peer.api.text("/metrics").splitlines()]
    return sum(float(line.split()[-1]) for line in lines if line.startswith("exo_mesh_evictions_total{"))


async def until(condition: Any) -> None:
    assert await asyncio.to_thread(eventually, condition, 30)


@pytest.mark.extended
@pytest.mark.parametrize(
    "short",
    [
        pytest.param(0, id="a machine that does not drive"),
        pytest.param(1, id="the one that drives", marks=pytest.mark.slow),
    ],
)
async def test_the_newest_wait_new_ones_go_elsewhere_and_every_text_is_whole(ring: Ring, short: int) -> None:
    before = evictions(ring)
    async with aiohttp.ClientSession() as http:
        readers: list[Reader] = []
        tasks = []
        for number in range(3):  # one after the other, so that there is a newest
            readers.append(reader := Reader())
            tasks.append(asyncio.create_task(reader.ask(http, ring.peers[number % 2], f"question {number}")))
            await until(lambda reader=reader: reader.tokens > 5)
        ring.say(short, SHORT)
        await until(lambda: driver(ring)["running"] == 1 and driver(ring)["waiting"] == 2)
        assert ring.peers[short].api.get("/memory")["level"] == "critical"
        assert ring.peers[1 - short].api.get("/memory")["level"] == "ok", "the whole ring heeds its weakest machine"
        waiting = [reader.tokens for reader in readers]
        late = Reader()
        await late.ask(http, ring.peers[0], "question 0", 8)
        assert late.text == dummy_text(ring.folder / MODEL, "question 0", 8), "the other machine alone has room for it"
        (ring_2,) = [one for one in ring.peers[0].api.get("/state")["view"]["instances"] if one["id"] == f"{MODEL}-2"]
        assert [stage["peer"] for stage in ring_2["stages"]] == [ring.peers[1 - short].api.get("/state")["node_id"]]
        ring.peers[0].api.delete(f"/instance/{MODEL}-2")
        await until(lambda: readers[0].tokens > waiting[0])
        assert [reader.tokens for reader in readers][1:] == waiting[1:], "the oldest goes on, the newer ones wait"
        ring.say(short, ROOM)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert [reader.finish for reader in readers] == [["length"]] * 3
    for number, reader in enumerate(readers):
        assert reader.text == dummy_text(ring.folder / MODEL, f"question {number}", TOKENS)
    assert evictions(ring) >= before + 2
    await_all(ring.peers, Peer.idle)


@pytest.mark.extended
async def test_a_lone_request_without_memory_anywhere_ends_with_what_it_has(ring: Ring) -> None:
    async with aiohttp.ClientSession() as http:
        reader = Reader()
        task = asyncio.create_task(reader.ask(http, ring.peers[0], "question 0", 20 * TOKENS))
        await until(lambda: reader.tokens > 5)
        ring.say(0, SHORT)
        ring.say(1, SHORT)
        async with asyncio.timeout(30):
            await task
    assert reader.status == 200 and reader.finish == ["length"] and 5 < reader.tokens < 20 * TOKENS
    assert reader.text == dummy_text(ring.folder / MODEL, "question 0", 20 * TOKENS)[: len(reader.text)]
    assert ring.peers[0].api.get("/requests/recent")["requests"][0]["status"] == "pressure_abort"
    ring.say(0, ROOM)
    ring.say(1, ROOM)
    await until(lambda: all(peer.api.get("/memory")["level"] == "ok" for peer in ring.peers))


@pytest.mark.extended
async def test_without_memory_anywhere_a_new_request_is_refused_at_once_and_a_running_one_ends_beside_it(
    ring: Ring,
) -> None:
    def refused(prompt: object, **fields: object) -> tuple[str, float]:
        with pytest.raises(MeshError) as caught:
            ring.peers[0].api.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields}, 10)
        assert isinstance(caught.value, OverloadError)
        return caught.value.code, caught.value.retry_after_s

    async with aiohttp.ClientSession() as http:
        running = Reader()
        task = asyncio.create_task(running.ask(http, ring.peers[0], "question 0", 20 * TOKENS))
        await until(lambda: running.tokens > 5)
        for index in (0, 1):
            ring.say(index, SHORT)
        await until(lambda: all(peer.api.get("/memory")["level"] == "critical" for peer in ring.peers))
        busy = [await asyncio.to_thread(refused, "beside it", model=MODEL)]
        async with asyncio.timeout(30):
            await task  # although others ask
        idle = [await asyncio.to_thread(refused, "alone", model=MODEL)]
        idle += [await asyncio.to_thread(refused, ["one", "two"], model=MODEL, n=2)]
        idle += [await asyncio.to_thread(refused, "not placed", model=SMALL)]
    assert running.status == 200 and running.finish == ["length"] and 5 < running.tokens < 20 * TOKENS
    assert {code for code, _ in busy + idle} == {"memory_pressure"} and min(after for _, after in busy + idle) >= 1
    for index in (0, 1):
        ring.say(index, ROOM)
    await until(lambda: all(peer.api.get("/memory")["level"] == "ok" for peer in ring.peers))
    async with aiohttp.ClientSession() as http:
        reader = Reader()
        await reader.ask(http, ring.peers[0], "question 0", 8)
    assert reader.text == dummy_text(ring.folder / MODEL, "question 0", 8), "the last report said critical"


@pytest.mark.extended
async def test_a_machine_that_warns_serves_one_after_the_other(ring: Ring) -> None:
    """Before it is critical nobody new comes beside those that run; nobody is refused either."""
    ring.say(0, "16GiB 0.7GiB")  # critical below 0.5 GiB
    await until(lambda: ring.peers[0].api.get("/memory")["level"] == "warn")
    async with aiohttp.ClientSession() as http:
        readers = [Reader(), Reader()]
        first = asyncio.create_task(readers[0].ask(http, ring.peers[0], "question 0", TOKENS // 2))
        await until(lambda: readers[0].tokens > 5 and driver(ring)["running"] == 1)
        second = asyncio.create_task(readers[1].ask(http, ring.peers[0], "question 1", 50))
        await until(lambda: driver(ring)["waiting"] == 1)
        ring.say(0, ROOM)
        async with asyncio.timeout(60):
            await asyncio.gather(first, second)
    assert [reader.status for reader in readers] == [200, 200]
    assert readers[1].text == dummy_text(ring.folder / MODEL, "question 1", 50)


def kept(ring: Ring) -> list[int]:
    """The sequences that each stage of the ring keeps for later prompts."""
    stages = [stage for peer in ring.peers for stage in peer.api.get("/memory")["stages"]]
    return [stage["prefix_cache"]["sequences"] for stage in stages if stage["instance"] == f"{MODEL}-1"]


@pytest.mark.extended
@pytest.mark.parametrize("short", [0, 1])
async def test_the_whole_ring_gives_up_what_it_keeps_for_its_weakest_machine(ring: Ring, short: int) -> None:
    async with aiohttp.ClientSession() as http:
        for number in range(2):
            reader = Reader()
            await reader.ask(http, ring.peers[0], f"{short}{number} is a long question " * 20, 8)
            assert reader.finish == ["length"]
    await until(lambda: len(kept(ring)) == 2 and min(kept(ring)) >= 2)
    ring.say(short, SHORT)
    await until(lambda: kept(ring) == [0, 0])
    assert ring.peers[1 - short].api.get("/memory")["level"] == "ok"
    ring.say(short, ROOM)
    await until(lambda: all(peer.api.get("/memory")["level"] == "ok" for peer in ring.peers))
