"""A ring of two peers under many requests: who gets an answer, who is told to come back, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.belongings import CpuMeter, descriptors, family, no_more, settled
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.dummy_oracle import dummy_text
from tests.support.peers import Peer, await_all, mesh
from tests.support.processes import eventually

LONG = "long"
TOKENS = 64
QUEUE = 5
RUNNING = 32
"""What a driver runs at once (Limits.max_running)."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that can talk for long."""
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / LONG, TinyModel(layers=4, hidden=16, intermediate=32, context=200_000))
    return root


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[list[Peer]]:
    """Stages that take 0.3 ms for a frame."""
    flags = ["--models-dir", str(models), "--engine-option", "cost_ms=0.3", "--max-queued", str(QUEUE)]
    with mesh(tmp_path_factory.mktemp("serving"), [flags, flags], engine="dummy") as peers:
        peers[0].place(model=LONG, min_peers=2, context_limit=100_000)
        yield peers


def body(number: int, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return {"model": LONG, "prompt": f"question {number}", "max_tokens": tokens, "temperature": 0, **fields}


async def ask(http: aiohttp.ClientSession, peer: Peer, number: int) -> tuple[int, str, str]:
    """(status, text, Retry-After)"""
    async with http.post(f"{peer.url}/v1/completions", json=body(number)) as reply:
        answer = await reply.json()
        text = answer["choices"][0]["text"] if reply.status == 200 else answer["error"]["code"]
        return reply.status, text, reply.headers.get("Retry-After", "")


async def test_a_crowd_gets_the_text_that_each_gets_alone(two: list[Peer], models: Path) -> None:
    async with aiohttp.ClientSession() as http:
        together = await asyncio.gather(*(ask(http, two[n % 2], n) for n in range(RUNNING)))
        alone = await ask(http, two[0], 0)
    expected = [(200, dummy_text(models / LONG, f"question {n}", TOKENS), "") for n in range(RUNNING)]
    assert together == expected and alone == expected[0]
    assert len({text for _, text, _ in together}) > RUNNING // 4


async def test_where_all_places_are_taken_the_rest_is_told_to_come_back(two: list[Peer]) -> None:
    total = sum(peer.api.get("/requests/stats")["total"] for peer in two)
    async with aiohttp.ClientSession() as http:
        asked = [http.post(f"{two[n % 2].url}/v1/completions", json=endless(n)) for n in range(RUNNING + QUEUE)]
        held = [asyncio.ensure_future(one) for one in asked]
        while not full(await asyncio.to_thread(two[1].api.get, "/queue")):
            await asyncio.sleep(0.05)
        refused = await asyncio.gather(*(ask(http, two[n % 2], n) for n in range(13)))
        assert set(refused) == {(429, "overloaded", "1")}
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    await_all(two, Peer.idle)
    async with aiohttp.ClientSession() as http:
        assert {status for status, _, _ in await asyncio.gather(*(ask(http, two[0], n) for n in range(13)))} == {200}
    stats = [peer.api.get("/requests/stats") for peer in two]
    assert sum(one["total"] for one in stats) == total + RUNNING + QUEUE + 13 + 13, "none lost, none counted twice"
    assert sum(one["outcomes"].get("overloaded", 0) for one in stats) == 13
    recent = two[0].api.get("/requests/recent?n=13")["requests"]
    assert [one["outcome"] for one in recent] == ["length"] * 13 and {one["model"] for one in recent} == {LONG}


def endless(number: int) -> dict[str, Any]:
    return body(number, tokens=50_000)


def full(queue: dict[str, Any]) -> bool:
    assert queue["max"] == QUEUE
    return bool(queue["in_progress"] == RUNNING and queue["waiting"] == QUEUE)


@pytest.mark.extended
async def test_of_fifty_at_once_each_gets_its_answer_or_is_told_to_come_back(two: list[Peer]) -> None:
    """None is lost, none is done twice: the driver has drawn each token that somebody got, and no other."""
    drawn = await asyncio.to_thread(settled, lambda: drawn_tokens(two))
    async with aiohttp.ClientSession() as http:
        replies = await asyncio.gather(*(ask(http, two[n % 2], n % 10) for n in range(50)))
        served = [n for n, (status, _, _) in enumerate(replies) if status == 200]
        assert len(served) >= RUNNING + QUEUE
        assert {reply for n, reply in enumerate(replies) if n not in served} <= {(429, "overloaded", "1")}
        await asyncio.to_thread(await_all, two, Peer.idle)
        assert await asyncio.to_thread(settled, lambda: drawn_tokens(two)) - drawn == TOKENS * len(served)
        alone = [await ask(http, two[0], n) for n in range(10)]
    assert [replies[n] for n in served] == [alone[n % 10] for n in served]


def drawn_tokens(peers: list[Peer]) -> int:
    """By the drivers here since their start, as their last heartbeats say."""
    return sum(beat["tokens"] for peer in peers for beat in peer.state()["stages_here"].values())


@pytest.mark.extended
async def test_two_hundred_that_walk_away_leave_nothing_behind(two: list[Peer]) -> None:
    """No row, no descriptor of each; and the machine is as idle as before. The clients hang up at once, or after the
    first token."""

    async def walk_away(http: aiohttp.ClientSession, number: int) -> None:
        wanted = body(number, tokens=50_000, stream=True)
        async with http.post(f"{two[number % 2].url}/v1/completions", json=wanted) as reply:
            if reply.status == 200 and number % 4:
                await reply.content.readline()

    async def all_walk_away(count: int) -> None:
        async with aiohttp.ClientSession() as http:
            for first in range(0, count, 20):
                await asyncio.gather(*(walk_away(http, n) for n in range(first, first + 20)))

    processes = family(two)
    await all_walk_away(40)  # what is opened once stays: channels, worker threads
    await_all(two, Peer.idle)
    before, meter = descriptors(processes), CpuMeter(processes)
    quiet = meter.next()
    await all_walk_away(200)
    busy = meter.next()
    await_all(two, Peer.idle)
    queue = two[1].api.get("/queue")
    assert (queue["depth"], queue["entered"]) == (0, 0)
    assert eventually(lambda: no_more(processes, before)), (before, descriptors(processes))
    assert eventually(lambda: meter.is_below(quiet + (busy - quiet) / 4), 20), (quiet, busy)
    (beat,) = two[1].state()["stages_here"].values()
    assert eventually(lambda: later(two[1]) == later(two[1]) >= beat["laps"]), "a ring that nobody asks stands still"


def later(peer: Peer) -> int:
    """Laps so far."""
    (beat,) = peer.state()["stages_here"].values()
    return int(beat["laps"])


@pytest.mark.extended
async def test_who_reads_nothing_is_parked_and_the_others_are_served(two: list[Peer]) -> None:
    """What he does not read fills the buffers of his connections, and then his mailbox; then his row stops."""
    host, port = two[1].url.removeprefix("http://").split(":")
    asked = json.dumps(body(0, tokens=90_000, stream=True, logprobs=20)).encode()  # kilobytes for each token
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        slow.sendall(head.encode() + f"Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        async with aiohttp.ClientSession() as http:
            while not parked(two[1]):
                replies = await asyncio.gather(*(ask(http, two[0], n) for n in range(4)))
                assert [status for status, _, _ in replies] == [200] * 4
            replies = await asyncio.gather(*(ask(http, two[0], n) for n in range(4)))
            assert [status for status, _, _ in replies] == [200] * 4
        assert eventually(lambda: two[1].api.get("/queue")["in_progress"] == 1), "he keeps his place"
        assert parked(two[1])
    await_all(two, Peer.idle)


def parked(peer: Peer) -> bool:
    metrics = peer.api.text("/metrics").splitlines()
    return [line[-4:] for line in metrics if line.startswith("exo_mesh_requests_parked{")] == [" 1.0"]
