"""A thousand requests through a ring of two peers: no process of it grows. The extended test asks three hundred.

`pytest -m slow -s tests/soak` prints a line for each process; docs/measurements/memory-over-requests.md has them.
SOAK_REQUESTS=10000 asks more, and sees smaller leaks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import psutil
import pytest

from exo_mesh.engine.registry import load_registry
from tests.support.own_memory import own_bytes
from tests.support.peers import MODEL, Peer, await_all, mesh
from tests.support.slope import second_half

pytestmark = pytest.mark.timeout(3600)

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
AT_ONCE = 8
SAMPLE_EVERY = 20
ALLOWANCE_BYTES = 2**20
"""Python takes memory from the system in pieces of 1 MiB: one more or less in 500 requests says nothing. What is left
unseen is a leak of 2 KB a request; with SOAK_REQUESTS=10000 one of 200 bytes."""
FLAGS = ["--request-log-max", "50"]
"""So that the list of the last requests is full before the second half."""
OPTIONS = {"torch": ("--engine-option", "threads=1")}
"""Two runners on one machine would otherwise fight for each core."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dummy", "numpy", "torch"])
def test_no_process_grows_with_the_requests(tmp_path: Path, engine: str) -> None:
    assert risen(tmp_path, engine, REQUESTS, ALLOWANCE_BYTES) == []


@pytest.mark.extended
def test_no_process_grows_by_a_megabyte_in_a_hundred_requests(tmp_path: Path) -> None:
    assert risen(tmp_path, "dummy", 300, 1.5 * 2**20) == []


def risen(folder: Path, engine: str, requests: int, allowance_bytes: float) -> list[str]:
    """The processes that grow by more than that while the second half of the requests is answered."""
    if reason := why_not(engine):
        pytest.skip(reason)
    flags = [*FLAGS, *OPTIONS.get(engine, ())]
    with mesh(folder, [flags, flags], engine=engine) as peers:
        peers[0].place(min_peers=2)
        processes = {f"node {index}": psutil.Process(peer.child.pid) for index, peer in enumerate(peers)}
        processes |= {f"runner {index}": process for index, peer in enumerate(peers) for process in peer.runners()}
        counts, samples = asyncio.run(load(peers, list(processes.values()), requests))
        await_all(peers, Peer.idle)
    grown = []
    for index, name in enumerate(processes):
        found = second_half(counts, [sample[index] for sample in samples])
        print(f"| {engine} | {name} | {samples[-1][index] / 1e6:.1f} MB | {found.slope:+.0f} bytes | "
              f"{found.growth / 1e6:+.2f} MB | {found.spread / 1e6:.2f} MB |")  # fmt: skip
        grown += [name] if found.rises(allowance_bytes) else []
    return grown


def why_not(engine: str) -> str:
    look = load_registry().provider(engine).availability()
    return "" if look.available else f"{engine}: {look.reason}"


async def load(
    peers: Sequence[Peer], processes: Sequence[psutil.Process], requests: int
) -> tuple[list[int], list[list[int]]]:
    """(requests so far, bytes of each process's own memory then), every SAMPLE_EVERY requests."""
    counts, samples = [], []
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:

        async def one(number: int) -> None:
            async with places:
                await ask(http, peers[number % len(peers)], number)

        for first in range(0, requests, SAMPLE_EVERY):
            await asyncio.gather(*(one(first + index) for index in range(SAMPLE_EVERY)))
            counts.append(first + SAMPLE_EVERY)
            samples.append([own_bytes(process) for process in processes])
    return counts, samples


async def ask(http: aiohttp.ClientSession, peer: Peer, number: int) -> None:
    """Two in three as a stream; one in ten goes away before its answer is whole."""
    wanted = {"model": MODEL, "prompt": f"Count from {number} to", "max_tokens": 8, "temperature": 0}
    body = {**wanted, "ignore_eos": True, "stream": bool(number % 3)}
    async with http.post(f"{peer.url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        if number % 10 != 9:
            await reply.read()
