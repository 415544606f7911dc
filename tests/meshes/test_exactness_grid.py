"""Rings of real processes under 1 to 32 different requests at once: each gets what it gets alone on the same ring.

The extended test has one ring. `pytest -m slow -s tests/meshes/test_exactness_grid.py` runs the whole grid and prints
the table of docs/measurements/exactness.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import MODEL, Peer, await_all, chat_body, mesh
from tests.support.processes import eventually

AT_ONCE = (1, 2, 4, 8, 16, 32)
FLAT = "flat"
FLAT_TOKENS = 16
PROMPT_SIZES = (3, 17, 1, 64, 150, 40, 2, 33, 5, 100)
"""Tokens of the prompts of the flat model, over and over; a token is a character."""
RANGES = [(first, first + 2 + first % 6) for first in range(3, 67, 2)]
"""What the demo model is asked to count."""

ENGINES = {
    "numpy": ["--engine-option", "mode=deterministic"],
    "mlx": ["--engine-option", "batch_attention=off"],
    "mlx-blocks": [],
    "torch": ["--engine-option", "dtype=float32,threads=1"],
}
"""Options by the name of the engine, and a suffix if it is there twice."""
EPSILON = {"numpy": 0.0, "mlx": 0.0, "mlx-blocks": 1e-4, "torch": 1e-4}
"""Top-two margin below which a token may differ; 0: every bit of every log-probability is the same. The logits of the
flat model have an rms of 1, so that this is the margin of tests/support/exactness.py, float32."""


@dataclass(frozen=True)
class Reply:
    """margins[i]: between the two likeliest tokens at step i, in nats."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Outcome:
    """Of many requests at once, beside each alone. worst: largest difference of a log-probability, of tokens that both
    have at the same place after the same text. differing: smallest margins at which texts part."""

    asked: int
    same_text: int
    same_bits: int
    worst: float
    parting: tuple[float, ...]


def flat_body(number: int) -> dict[str, Any]:
    size = PROMPT_SIZES[number % len(PROMPT_SIZES)]
    prompt = "".join(map(chr, np.random.default_rng(number).integers(32, 127, size)))
    return {"model": FLAT, "prompt": prompt, "max_tokens": FLAT_TOKENS, "temperature": 0, "logprobs": 2}


def demo_body(number: int) -> dict[str, Any]:
    first, last = RANGES[number]
    return chat_body(f"Count from {first} to {last}.", logprobs=True, top_logprobs=2, max_tokens=40)


async def ask(http: aiohttp.ClientSession, peer: Peer, body: dict[str, Any]) -> Reply:
    path = "chat/completions" if "messages" in body else "completions"
    async with http.post(f"{peer.url}/v1/{path}", json=body) as reply:
        assert reply.status == 200, await reply.text()
        (choice,) = (await reply.json())["choices"]
    if "messages" in body:
        steps = choice["logprobs"]["content"]
        tops = [[top["logprob"] for top in step["top_logprobs"]] for step in steps]
        tokens, logprobs = [step["token"] for step in steps], [step["logprob"] for step in steps]
        return Reply(choice["message"]["content"], tokens, logprobs, [a - b for a, b in tops])
    told = choice["logprobs"]
    tops = [sorted(top.values(), reverse=True) for top in told["top_logprobs"]]
    return Reply(choice["text"], told["tokens"], told["token_logprobs"], [top[0] - top[-1] for top in tops])


def compare(together: Sequence[Reply], alone: Sequence[Reply]) -> Outcome:
    worst, parting = 0.0, []
    for got, want in zip(together, alone, strict=False):
        common = next((i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), None)
        if common is not None:
            parting.append(want.margins[common])
        pairs = list(zip(got.logprobs, want.logprobs, strict=False))[:common]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    pairs_of_replies = list(zip(together, alone, strict=False))
    return Outcome(
        len(together),
        sum(got.text == want.text for got, want in pairs_of_replies),
        sum(got == want for got, want in pairs_of_replies),
        worst,
        tuple(parting),
    )


class Ring:
    """An instance on some of the peers; asked through all of them in turn."""

    def __init__(self, peers: Sequence[Peer], http: aiohttp.ClientSession) -> None:
        self._peers = cycle(peers)
        self._http = http

    async def together(self, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
        return await asyncio.gather(*(ask(self._http, next(self._peers), body) for body in bodies))

    async def alone(self, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
        return [await ask(self._http, next(self._peers), body) for body in bodies]


@asynccontextmanager
async def placed(peers: Sequence[Peer], model: str, num_stages: int) -> AsyncIterator[Ring]:
    """The model over as many peers, and nothing afterwards."""
    instance = await asyncio.to_thread(peers[0].place, model=model, min_peers=num_stages)
    assert len({stage["peer"] for stage in instance["stages"]}) == num_stages
    try:
        async with aiohttp.ClientSession() as http:
            yield Ring(peers, http)
        await asyncio.to_thread(await_all, peers, Peer.idle)
    finally:
        await asyncio.to_thread(peers[0].api.delete, f"/instance/{instance['id']}", 15)
    assert await asyncio.to_thread(eventually, lambda: not any(peer.instances() for peer in peers))


def nodes(root: Path, engine: str, count: int) -> Any:
    write_checkpoint(root / "models" / FLAT, TinyModel(layers=4, hidden=64, intermediate=128, context=1024))
    flags = ["--models-dir", str(root / "models"), *ENGINES[engine]]
    return mesh(root / "mesh", [flags] * count, engine=engine.partition("-")[0])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    with nodes(tmp_path_factory.mktemp("two"), "numpy", 2) as peers:
        yield peers


@pytest.mark.extended
async def test_a_ring_of_processes_gives_each_of_32_the_bits_that_it_gives_it_alone(two: list[Peer]) -> None:
    bodies = [flat_body(number) for number in range(32)]
    async with placed(two, FLAT, 2) as ring:
        together = await ring.together(bodies)
        outcome = compare(together, await ring.alone(bodies))
    assert (outcome.same_text, outcome.same_bits) == (32, 32), outcome
    assert len({reply.text for reply in together}) == 32 and min(min(reply.margins) for reply in together) < 0.05


async def measure(ring: Ring, engine: str, num_stages: int, model: str) -> None:
    """A row of the table for each number at once."""
    bodies = [flat_body(number) if model == FLAT else demo_body(number) for number in range(max(AT_ONCE))]
    alone = await ring.alone(bodies)
    for at_once in AT_ONCE:
        replies = await ring.together(bodies[:at_once])
        outcome = compare(replies, alone)
        right = ""
        if model != FLAT:
            wanted = [", ".join(map(str, range(first, last + 1))) for first, last in RANGES]
            right = f"{sum(reply.text == want for reply, want in zip(replies, wanted, strict=False))} of {at_once}"
            assert right == f"{at_once} of {at_once}"
        print(
            f"| {engine} | {num_stages} | {model} | {at_once} | {outcome.same_text} of {at_once} "
            f"| {outcome.same_bits} of {at_once} | {outcome.worst:.1e} | {right} |"
        )
        assert max(outcome.parting, default=0.0) <= EPSILON[engine], outcome
        if not EPSILON[engine]:
            assert outcome.same_bits == at_once, outcome


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
async def test_the_whole_grid(tmp_path: Path, engine: str, num_stages: int) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    print(f"\n{engine}: | engine | stages | model | at once | same text | same bits | worst | counts right |")
    with nodes(tmp_path, engine, num_stages) as peers:
        for model in (FLAT, MODEL):
            async with placed(peers, model, num_stages) as ring:
                await measure(ring, engine, num_stages, model)
