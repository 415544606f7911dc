"""More than the KV pool of a ring can hold: some wait again, nobody is cut short, and the pool is empty afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.rings.serving.dispatchers import SMALL, Ring
from tests.support.dummy_oracle import dummy_text
from tests.support.peers import Peer, await_all
from tests.support.processes import eventually

REQUESTS, TOKENS = 16, 600
"""9,600 positions and the prompts; a pool has 8,192, or one context if that is more."""


async def ask(http: aiohttp.ClientSession, peer: Peer, number: int) -> str:
    wanted = {"model": SMALL, "prompt": f"question {number}", "max_tokens": TOKENS, "temperature": 0}
    async with http.post(f"{peer.url}/v1/completions", json={**wanted, "ignore_eos": True}) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return str(answer["choices"][0]["text"])


def kv(ring: Ring) -> dict[str, int]:
    """Of the driver of the small model's ring, as its node's /memory tells it."""
    (found,) = [
        stage
        for stage in ring.peers[1].api.get("/memory")["stages"]
        if stage["instance"].startswith(SMALL) and "kv_pool_tokens" in stage
    ]
    return dict(found)


@pytest.mark.slow
async def test_sixteen_answers_that_do_not_fit_together_are_all_whole(ring: Ring) -> None:
    ring.peers[0].place(model=SMALL, min_peers=2, context_limit=1000)
    assert eventually(lambda: kv(ring)["kv_pool_tokens"] == 8192)
    async with aiohttp.ClientSession() as http:
        texts = await asyncio.gather(*(ask(http, ring.peers[n % 2], n) for n in range(REQUESTS)))
    for number, text in enumerate(texts):
        assert text == dummy_text(ring.folder / SMALL, f"question {number}", TOKENS)
    assert eventually(lambda: kv(ring)["evictions"] > 0 and kv(ring)["kv_tokens"] == 0)
    await_all(ring.peers, Peer.idle)
