"""A long prompt that comes while others stream holds none of them up for longer than a chunk of it, and a lap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import Peer, await_all, mesh

WIDE = "wide"
NUM_STAGES = 2
NUM_STREAMS = 4
STREAM_TOKENS = 250
QUIET_TOKENS = 40
"""So many tokens every stream gets before the long prompt comes."""
PROMPT_TOKENS = 3000
"""A token is a character."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Wide enough that a chunk takes several times as long as a step. One thread each: the stages share few cores."""
    models = tmp_path_factory.mktemp("models")
    write_checkpoint(models / WIDE, TinyModel(layers=4, hidden=128, intermediate=256, context=4096))
    flags = ["--models-dir", str(models)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        with mesh(tmp_path_factory.mktemp("long"), [flags] * NUM_STAGES, engine="numpy") as peers:
            peers[0].place(model=WIDE, min_peers=NUM_STAGES, context_limit=4096)
            yield peers


@dataclass(frozen=True)
class Lap:
    """A frame with a row of a request, as its trace has it; seconds of the clock of that request."""

    step: int
    is_prefill: bool
    began_s: float
    ended_s: float
    waited_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@pytest.mark.slow
async def test_no_gap_is_longer_than_one_chunk_and_one_lap(two: list[Peer]) -> None:
    async with aiohttp.ClientSession() as http:
        streams = [Stream(http, two[n % 2], n, "Tell me more: " + "x" * n, STREAM_TOKENS) for n in range(NUM_STREAMS)]
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        await asyncio.gather(*(stream.has(QUIET_TOKENS) for stream in streams))
        long = Stream(http, two[0], NUM_STREAMS, "x" * PROMPT_TOKENS, 2)
        await long.read()
        assert not any(task.done() for task in reading), "the streams ended before the prompt was computed"
        await asyncio.gather(*reading)
        chunks = [lap for lap in await long.laps() if lap.is_prefill]
        laps = [[lap for lap in await stream.laps() if not lap.is_prefill] for stream in streams]
    await asyncio.to_thread(await_all, two, Peer.idle)
    assert len(chunks) > 4 and all(len(own) == STREAM_TOKENS for own in laps)
    for own in laps:
        check_gaps(own, chunks)


def check_gaps(laps: Sequence[Lap], chunks: Sequence[Lap]) -> None:
    """Between two steps of a stream at most as many chunks are sent as there are stages, which compute them at the same
    time; and it is held up no longer than for the lap of one of them."""
    quiet_s = max(b.ended_s - a.ended_s for a, b in pairwise(laps) if b.step < chunks[0].step)
    delayed = 0
    for before, after in pairwise(laps):
        between = [chunk for chunk in chunks if before.step < chunk.step < after.step]
        assert len(between) <= NUM_STAGES, f"{len(between)} chunks between steps {before.step} and {after.step}"
        if between:
            delayed += 1
            one_lap_s = max(quiet_s, after.seconds - after.waited_s)
            gap_s = after.ended_s - before.ended_s
            chunk_s = max(chunk.seconds for chunk in between)
            assert gap_s <= chunk_s + one_lap_s, (gap_s, between, after, quiet_s)
    assert delayed >= len(chunks) // 2, "the streams went on while the prompt was computed"


class Stream:
    """A greedy request, traced, whose tokens are counted as they come."""

    def __init__(self, http: aiohttp.ClientSession, peer: Peer, number: int, prompt: str, tokens: int) -> None:
        self._http, self._peer = http, peer
        self._trace_id = f"{number + 1:032x}"
        self._body = {"model": WIDE, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        self._body |= {"ignore_eos": True, "logprobs": 0}  # with them, each token is an event, whatever its text
        self._num_tokens = 0
        self._come = asyncio.Condition()

    async def read(self) -> None:
        headers = {"traceparent": f"00-{self._trace_id}-{'1' * 16}-01"}
        async with self._http.post(f"{self._peer.url}/v1/completions", json=self._body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            async for event in events(reply):
                async with self._come:
                    self._num_tokens += len((event["choices"][0]["logprobs"] or {"tokens": ()})["tokens"])
                    self._come.notify_all()

    async def has(self, tokens: int) -> None:
        async with asyncio.timeout(60), self._come:
            await self._come.wait_for(lambda: self._num_tokens >= tokens)

    async def laps(self) -> list[Lap]:
        """All of them, in order, once it has ended."""
        async with self._http.get(f"{self._peer.url}/v1/traces/{self._trace_id}") as reply:
            return laps_of((await reply.json())["traceEvents"])


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event


def laps_of(spans: Sequence[dict[str, Any]]) -> list[Lap]:
    """From the spans of a trace: each stage's waiting and computing of each frame, in microseconds."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for span in spans:
        if "step" in span.get("args", {}):
            by_step.setdefault(span["args"]["step"], []).append(span)
    return [
        Lap(
            step,
            any(span["name"].startswith("prefill") for span in own),
            min(span["ts"] for span in own) / 1e6,
            max(span["ts"] + span["dur"] for span in own) / 1e6,
            sum(span["dur"] for span in own if span["cat"] == "wait") / 1e6,
        )
        for step, own in sorted(by_step.items())
    ]
