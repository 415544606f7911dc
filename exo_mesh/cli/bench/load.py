"""Sends many requests at once to the HTTP API, and measures the times of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import aiohttp
import msgspec
import numpy as np

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import TransportError

REQUEST_DEADLINE_S = 600.0


class Question(msgspec.Struct, frozen=True):
    """A request template: a prompt of `prompt` letters, which are as many tokens for a byte-level tokenizer without
    merges, and exactly `tokens` tokens of output. fields: further fields of the body."""

    model: str
    prompt: int
    tokens: int
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def body(self, number: int) -> dict[str, Any]:
        """The body of a request, with a different prompt for every number so that no cache can help."""
        random_ = random.Random(number)
        text = "".join(random_.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(max(1, self.prompt)))
        return {
            "model": self.model,
            "prompt": text,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


class TimedAnswer(msgspec.Struct):
    """Times of one answer, in seconds since the first request of the run: when the request was sent, and when each
    piece of text arrived. tokens: as the server counted. error: its error code."""

    sent: float
    came: list[float] = msgspec.field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


class LoadResult(msgspec.Struct, frozen=True):
    """The result of one run: all answers, and the seconds from the first request to the last token."""

    answers: Sequence[TimedAnswer]
    wall_s: float

    def describe(self) -> dict[str, Any]:
        """Tokens per second in total, time to first token and time between pieces of text, as JSON values."""
        good = [answer for answer in self.answers if not answer.error and answer.came]
        ttft = [answer.came[0] - answer.sent for answer in good]
        gaps = np.concatenate([np.diff(answer.came) for answer in good]) if good else np.zeros(0)
        tokens = sum(answer.tokens for answer in good)
        return {
            "requests": len(self.answers),
            "failed": sum(bool(answer.error) for answer in self.answers),
            "errors": sorted({answer.error for answer in self.answers if answer.error}),
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(tokens / self.wall_s, 2) if self.wall_s else 0.0,
            "prompt_tokens_per_s": round(sum(answer.prompt_tokens for answer in good) / self.wall_s, 1),
            "ttft_s": _quantiles(ttft),
            "itl_s": _quantiles(gaps.tolist()),
        }


async def closed_loop(
    urls: Sequence[str], question: Question, streams: int, requests: int, first: int = 0
) -> LoadResult:
    """Runs `streams` clients until `requests` were sent; each client sends its next request as soon as it has an
    answer.

    first: number of the first prompt.
    """
    numbers = iter(range(first, first + requests))
    async with _session(urls) as session:
        start = time.perf_counter()
        answers: list[TimedAnswer] = []

        async def client() -> None:
            for number in numbers:
                answers.append(await _ask(session, urls[number % len(urls)], question.body(number), start))

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
    return _result(answers)


async def open_loop(urls: Sequence[str], question: Question, per_s: float, requests: int, first: int = 0) -> LoadResult:
    """Sends requests at random times (a Poisson process of `per_s` per second), without waiting for earlier answers.

    first: number of the first prompt.
    """
    random_ = random.Random(0)
    async with _session(urls) as session, asyncio.TaskGroup() as group:
        start = time.perf_counter()
        tasks = []
        for number in range(first, first + requests):
            tasks.append(group.create_task(_ask(session, urls[number % len(urls)], question.body(number), start)))
            await asyncio.sleep(random_.expovariate(per_s))
    return _result([task.result() for task in tasks])


async def timed_requests(urls: Sequence[str], question: Question, streams: int, requests: int) -> dict[str, Any]:
    """The means of what each part of a request takes, of `requests` requests, `streams` at once, without streaming.

    Raises TransportError if none of them was timed.
    """
    numbers = iter(range(requests))
    timed: list[dict[str, Any]] = []
    async with _session(urls) as session:

        async def client() -> None:
            for number in numbers:
                body = question.body(number) | {"stream": False, "stream_options": None}
                async with session.post(f"{urls[number % len(urls)]}/bench/completions", json=body) as reply:
                    found = (await reply.json()).get("bench") if reply.status == 200 else None
                    if found:
                        timed.append(found)

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
    if not timed:
        raise TransportError(f"none of {requests} requests to /bench/completions was timed")
    names = ("total_s", "ttft_s", "hop_s", "prefill_tokens_per_s", "decode_tokens_per_s", "prefill_laps", "decode_laps")
    means = {name: round(fmean(one[name] or 0.0 for one in timed), 7) for name in names}
    parts = {name: round(fmean(one["parts"][name] for one in timed), 6) for name in timed[0]["parts"]}
    return {"requests": len(timed), **means, "parts": parts}


def _session(urls: Sequence[str]) -> aiohttp.ClientSession:
    """A session with the API key or local token, which a running mesh may require.

    Each request has a connection of its own: llama.cpp's server closes an idle one without a word.
    """
    headers = ApiClient(urls[0]).credentials()
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], start: float) -> TimedAnswer:
    answer = TimedAnswer(time.perf_counter() - start)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                answer.error = f"HTTP {reply.status}"
                return answer
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), time.perf_counter() - start)
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        answer.error = type(exc).__name__
    return answer


def _take(answer: TimedAnswer, event: dict[str, Any], now: float) -> None:
    if error := event.get("error"):
        answer.error = str(error.get("code") or "error")
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    if any(choice.get("text") for choice in event.get("choices", ())):
        answer.came.append(now)


def _result(answers: list[TimedAnswer]) -> LoadResult:
    ends = [answer.came[-1] for answer in answers if answer.came]
    if not ends:
        errors = ", ".join(sorted({answer.error for answer in answers})) or "no text arrived"
        raise TransportError(f"none of {len(answers)} requests was answered: {errors}")
    return LoadResult(answers, max(ends) - min(answer.sent for answer in answers))


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99))
    return {"p50": round(p50, 5), "p90": round(p90, 5), "p99": round(p99, 5), "max": round(max(seconds), 5)}
