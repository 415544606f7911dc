"""An answer with an idempotency key: its entry peer dies, or its client asks again, and it goes on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from exo_mesh.domain.request import GenerateRequest, SamplingParams, TokenEvent
from exo_mesh.errors import KeyReusedError, SupersededError
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, a_request, instances, mesh, tokens, until

SLOW = {"cost_ms": "10"}


def keyed(max_tokens: int = 30, key: str = "k", fingerprint: str = "f", logprobs: int | None = None) -> GenerateRequest:
    request = a_request(f"reply-{key}", max_tokens)
    sampling = SamplingParams(temperature=0, logprobs=logprobs)
    hashes = {"key_hash": key.encode().ljust(32), "fingerprint": fingerprint.encode().ljust(32)}
    return replace(request, sampling=sampling, **hashes)


async def follow(node: Node, request: GenerateRequest, into: list[TokenEvent]) -> None:
    async with aclosing(node.requests.generate(MODEL, request)) as items:
        async for item in items:
            if isinstance(item, TokenEvent):
                into.append(item)


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


async def both_know(nodes: list[Node]) -> None:
    await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
    await until(lambda: all(instances(node) for node in nodes))


async def test_any_peer_goes_on_with_the_answer_of_an_entry_peer_that_vanished(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        await both_know(nodes)
        expected = await tokens(nodes[0], a_request("undisturbed", 30))
        got: list[TokenEvent] = []
        first = asyncio.create_task(follow(nodes[0], keyed(), got))
        await until(lambda: len(got) > 10)
        first.cancel()  # the connection to its client, and with it the call to the driver, is gone
        await asyncio.gather(first, return_exceptions=True)
        steps = sum(log_frames(node) for node in nodes)
        again: list[TokenEvent] = []
        await follow(nodes[1], keyed(), again)
        assert ids(again) == expected and ids(again)[: len(ids(got))] == ids(got)
        assert [event.index for event in again if event.token_id is not None] == list(range(30))
        await until(lambda: sum(log_frames(node) for node in nodes) > steps)
        told_again: list[TokenEvent] = []
        steps = sum(log_frames(node) for node in nodes)
        await follow(nodes[0], keyed(), told_again)
        assert told_again == again, "a finished answer is told again"
        assert [len(node._serving.journal) for node in nodes] == [0, 0]


def log_frames(node: Node) -> int:
    return sum(stage.beat.decode_frames for stage in node._hosting.host.beats())


@pytest.mark.extended
async def test_who_asks_again_takes_over_and_the_first_one_is_told(tmp_path: Path) -> None:
    """As when the mesh has not noticed yet that the first caller is gone."""
    async with mesh(tmp_path, 2, engine_options=SLOW) as nodes:
        await both_know(nodes)
        expected = await tokens(nodes[0], a_request("undisturbed", 30))
        for second in nodes:  # at another peer, and then at the same one
            got: list[TokenEvent] = []
            request = keyed(30, key=second.settings.name)
            first = asyncio.create_task(follow(nodes[0], request, got))
            await until(lambda got=got: len(got) > 10)  # type: ignore[misc]
            again: list[TokenEvent] = []
            await follow(second, request, again)
            with pytest.raises(SupersededError):
                await first
            assert ids(again) == expected and again[: len(got)] == got
        assert [len(node._serving.journal) for node in nodes] == [0, 0]


async def test_another_request_with_the_same_key_is_refused_at_every_peer(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await both_know(nodes)
        await follow(nodes[0], keyed(5), [])
        for node in nodes:
            with pytest.raises(KeyReusedError):
                await follow(node, keyed(5, fingerprint="other"), [])


async def test_log_probabilities_are_told_again_as_they_were(tmp_path: Path) -> None:
    async with mesh(tmp_path, 2) as nodes:
        await both_know(nodes)
        first: list[TokenEvent] = []
        again: list[TokenEvent] = []
        await follow(nodes[0], keyed(8, logprobs=3), first)
        await follow(nodes[1], keyed(8, logprobs=3), again)
        assert again == first and first[0].logprob is not None and len(first[0].top) == 3


@pytest.mark.extended
async def test_an_entry_peer_remembers_though_the_ring_is_gone(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, engine_options=SLOW) as (node,):
        whole: list[TokenEvent] = []
        await follow(node, keyed(10, key="finished"), whole)
        part: list[TokenEvent] = []
        first = asyncio.create_task(follow(node, keyed(30, key="part"), part))
        await until(lambda: len(part) > 10)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await node.instances.delete(instances(node)[0].id)
        told: list[TokenEvent] = []
        await follow(node, keyed(10, key="finished"), told)
        assert told == whole and not instances(node), "nothing was placed for it"
        rest: list[TokenEvent] = []
        await follow(node, keyed(30, key="part"), rest)
        assert ids(rest) == await tokens(node, a_request("undisturbed", 30))
        assert rest[: len(part)] == part
