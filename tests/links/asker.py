"""Streams on one node while a long prompt enters, asked from the namespace of that node: run as a child process.

Reads one JSON line from standard input, and writes one: what each stream and the long prompt felt like.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DEADLINE_S = 240.0


@dataclass
class Asked:
    """One request. Times are seconds since the start of this process's work."""

    sent: float = 0.0
    came: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""


class Asker:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    async def ask(self, asked: Asked, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """Follow the stream to its end."""
        asked.sent = self.now()
        async with self._http.post(f"{self._url}/v1/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                asked.error = f"HTTP {reply.status}: {await reply.text()}"
                return
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    self._take(asked, json.loads(line[6:]))

    def _take(self, asked: Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.error = str(event["error"])
        text = "".join(choice.get("text", "") for choice in event.get("choices", ()))
        if text:
            asked.came.append(self.now())
            asked.text += text


def settled(streams: list[Asked], tokens: int) -> bool:
    return all(len(asked.came) >= tokens for asked in streams)


async def run(wish: dict[str, Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        asker = Asker(wish["url"], http)
        streams, long = [Asked() for _ in wish["streams"]], Asked()
        pairs = zip(streams, wish["streams"], strict=True)
        tasks = [asyncio.ensure_future(asker.ask(asked, body)) for asked, body in pairs]
        async with asyncio.timeout(DEADLINE_S):
            while not settled(streams, wish["settled"]) and not any(task.done() for task in tasks):
                await asyncio.sleep(0.01)
        await asker.ask(long, wish["long"], {"traceparent": f"00-{wish['trace_id']}-{'1' * 16}-01"})
        for task in tasks:
            task.cancel()
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        async with http.get(f"{wish['url']}/v1/traces/{wish['trace_id']}") as reply:
            trace = await reply.json()
    for asked, outcome in zip(streams, failed, strict=True):
        if isinstance(outcome, Exception):
            asked.error = repr(outcome)
    return {"streams": [vars(asked) for asked in streams], "long": vars(long), "trace": trace}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))))
