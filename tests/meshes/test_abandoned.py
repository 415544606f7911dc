"""Requests whose clients hang up while the model is still loading."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import aiohttp
import psutil
import pytest

from exo_mesh.node.node import Node
from tests.support import nodes as in_process
from tests.support.belongings import CpuMeter, descriptors, no_more
from tests.support.peers import MODEL, Peer, await_all, chat_body, mesh
from tests.support.processes import eventually

LOADING = ["--engine-option", "load_ms=3000"]


def nodes_of(peers: list[Peer]) -> list[psutil.Process]:
    return [psutil.Process(peer.child.pid) for peer in peers]


@pytest.mark.slow
async def test_two_hundred_hang_up_while_the_model_loads_and_the_next_is_served(tmp_path: Path) -> None:
    """Requests and leases are back, no descriptor is left of each, and the model that they asked for is there once."""
    with mesh(tmp_path, [LOADING] * 2, engine="dummy") as peers:
        nodes = nodes_of(peers)
        await asyncio.to_thread(serve_and_free, peers)  # what is opened once stays
        before, meter = descriptors(nodes), CpuMeter(nodes)
        quiet = await asyncio.to_thread(meter.next)
        async with aiohttp.ClientSession() as http:
            await hang_up(http, peers, 20)
            assert all(instance["state"] != "ready" for peer in peers for instance in peer.instances())
            await hang_up(http, peers, 180)
        assert await asyncio.to_thread(eventually, lambda: not waiting(peers))
        busy = await asyncio.to_thread(meter.next)
        await asyncio.to_thread(serve_and_free, peers)
        assert await asyncio.to_thread(eventually, lambda: no_more(nodes, before)), (before, descriptors(nodes))
        assert await asyncio.to_thread(eventually, lambda: meter.is_below(quiet + (busy - quiet) / 4), 20.0)


def serve_and_free(peers: list[Peer]) -> None:
    """The model answers over one ring, and with that all leases are gone."""
    assert peers[1].chat("Count from 3 to 5.", max_tokens=5)["usage"]["completion_tokens"] == 5
    await_all(peers, Peer.idle)
    (instance,) = peers[0].instances()
    assert peers[0].api.delete(f"/instance/{instance['id']}", 15)["deleted"]
    assert eventually(lambda: not any(peer.instances() for peer in peers) and not reserved(peers))


def reserved(peers: list[Peer]) -> int:
    return sum(int(telemetry["reserved_bytes"]) for telemetry in peers[0].state()["telemetry"].values())


def waiting(peers: list[Peer]) -> int:
    """Requests that have entered and not ended."""
    return sum(peer.api.get("/queue")["entered"] for peer in peers)


async def hang_up(http: aiohttp.ClientSession, peers: list[Peer], count: int) -> None:
    """Requests of which twenty at once are under way, and then cut off."""
    body = chat_body("Count from 7 to 12.", stream=True, max_tokens=1000)
    for first in range(0, count, 20):
        numbers = range(first, min(count, first + 20))
        asked = [
            asyncio.ensure_future(http.post(f"{peers[n % 2].url}/v1/chat/completions", json=body)) for n in numbers
        ]
        await asyncio.to_thread(eventually, lambda numbers=numbers: waiting(peers) >= len(numbers), 5.0)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.slow
async def test_no_task_is_left_of_requests_that_end_while_the_model_loads(tmp_path: Path) -> None:
    """Nodes in this process, so that their tasks can be counted."""
    async with in_process.mesh(tmp_path, 2, engine_options={"load_ms": "2000"}) as nodes:
        before = tasks()
        await in_process.tokens(nodes[0], in_process.a_request("first"))
        await back_to(before, nodes)
        asked = [asyncio.ensure_future(first_event(nodes[n % 2], f"r{n}")) for n in range(50)]
        await in_process.until(lambda: len(nodes[0]._serving.journal) + len(nodes[1]._serving.journal) == len(asked))
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert len(nodes[0]._serving.journal) + len(nodes[1]._serving.journal) == 0
        await back_to(before, nodes)


async def back_to(before: Counter[str], nodes: list[Node]) -> None:
    """End what has been placed, as soon as it is there, and wait for the tasks to end."""
    try:
        async with asyncio.timeout(40):
            while tasks() - before:
                for node in nodes:
                    for instance in in_process.instances(node):
                        if instance.state == "ready":
                            await node.instances.delete(instance.id)
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"still there: {tasks() - before}")


def tasks() -> Counter[str]:
    """How many run, by what they run."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


async def first_event(node: Node, request_id: str) -> None:
    async with aclosing(node.requests.generate(MODEL, in_process.a_request(request_id))) as events:
        async for _ in events:
            pass
