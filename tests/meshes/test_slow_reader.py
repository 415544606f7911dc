"""A client that reads a byte a second, among four that read at once.

`pytest -m slow -s tests/meshes/test_slow_reader.py` prints what it measured.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.meshes.test_serving import parked
from tests.support.belongings import family
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import Peer, await_all, mesh
from tests.support.processes import eventually

LONG = "long"
ROUNDS = 5
FAST, FAST_TOKENS = 4, 400
LEAST_SHARE = 0.9
MOST_GROWTH = 0.02
"""Of the memory of all processes, over all rounds; about what it wanders by without a slow reader."""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_fast_keep_their_pace_and_memory_stays_flat(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_checkpoint(models / LONG, TinyModel(layers=4, hidden=16, intermediate=32, context=200_000))
    flags = ["--models-dir", str(models), "--engine-option", "cost_ms=4"]  # a device's time, not this machine's
    with mesh(tmp_path / "mesh", [flags, flags], engine="dummy") as peers:
        await asyncio.to_thread(peers[0].place, model=LONG, min_peers=2, context_limit=100_000)
        await pace(peers)
        without, beside = [], []
        sizes: list[int] = []
        for _ in range(ROUNDS):
            without.append(await pace(peers))
            with slow_reader(peers[1]):
                assert await asyncio.to_thread(eventually, lambda: parked(peers[1]), 60.0)
                beside.append(await pace(peers))
                sizes.append(sum(process.memory_info().rss for process in family(peers)))
                assert parked(peers[1]), "one, and all the time"
            await asyncio.to_thread(await_all, peers, Peer.idle)
    share = statistics.median(beside) / statistics.median(without)
    growth = sizes[-1] / sizes[1] - 1
    print(f"\nfast ones: {statistics.median(without):.1f} tokens/s alone, {share:.3f} of it beside; {growth=:.4f}")
    assert share >= LEAST_SHARE, (without, beside)
    assert growth <= MOST_GROWTH, sizes


async def pace(peers: list[Peer]) -> float:
    """Tokens per second of the fast ones together."""
    clock = asyncio.get_running_loop().time
    async with aiohttp.ClientSession() as http:
        began = clock()
        await asyncio.gather(*(ask(http, peers[n % 2], n) for n in range(FAST)))
        return FAST * FAST_TOKENS / (clock() - began)


def body(number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": LONG, "prompt": f"question {number}", "max_tokens": tokens, "temperature": 0, **fields}


async def ask(http: aiohttp.ClientSession, peer: Peer, number: int) -> None:
    async with http.post(f"{peer.url}/v1/completions", json=body(number, FAST_TOKENS)) as reply:
        assert reply.status == 200 and (await reply.json())["usage"]["completion_tokens"] == FAST_TOKENS


@contextmanager
def slow_reader(peer: Peer) -> Iterator[None]:
    """Reads a byte of its stream each second; each token is kilobytes."""
    host, port = peer.url.removeprefix("http://").split(":")
    asked = json.dumps(body(99, 90_000, stream=True, logprobs=20)).encode()
    stopped = threading.Event()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        slow.sendall(head.encode() + f"Content-Length: {len(asked)}\r\n\r\n".encode() + asked)

        def read() -> None:
            while not stopped.wait(1.0):
                assert slow.recv(1)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            stopped.set()
            reader.join()
