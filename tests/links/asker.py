"""Streams on one node while another request enters, asked from the namespace of that node: run as a child process.

Reads one JSON line from standard input, and writes one: what each of them felt like.
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

    async def get(self, path: str) -> Any:
        async with self._http.get(f"{self._url}{path}") as reply:
            return await reply.json()

    async def held(self) -> int:
        """Sequences that the stages of this node hold."""
        stages = (await self.get("/state"))["stages_here"]
        return sum(stage["sequences"] for stage in stages.values())

    def _take(self, asked: Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.error = str(event["error"])
        text = "".join(choice.get("text", "") for choice in event.get("choices", ()))
        if text:
            asked.came.append(self.now())
            asked.text += text


async def settle(asker: Asker, streams: list[Asked], tasks: list[asyncio.Future[None]], tokens: int) -> None:
    """Until each stream has so many tokens, and the stage here holds them all."""
    async with asyncio.timeout(DEADLINE_S):
        while min(len(asked.came) for asked in streams) < tokens or await asker.held() < len(streams):
            for task in tasks:
                if task.done():
                    task.result()
                    return
            await asyncio.sleep(0.01)


async def run(wish: dict[str, Any]) -> dict[str, Any]:
    """The streams; once they have settled, the late one to its end; then the streams are left, or followed as well."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        asker = Asker(wish["url"], http)
        streams, late = [Asked() for _ in wish["streams"]], Asked()
        pairs = zip(streams, wish["streams"], strict=True)
        tasks = [asyncio.ensure_future(asker.ask(asked, body)) for asked, body in pairs]
        await settle(asker, streams, tasks, wish["settled"])
        await asker.ask(late, wish["late"], {"traceparent": f"00-{wish['trace_id']}-{'1' * 16}-01"})
        for task in tasks:
            if not wish["to_the_end"]:
                task.cancel()
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        trace = await asker.get(f"/v1/traces/{wish['trace_id']}")
    for asked, outcome in zip(streams, failed, strict=True):
        if isinstance(outcome, Exception):
            asked.error = repr(outcome)
    return {"streams": [vars(asked) for asked in streams], "late": vars(late), "trace": trace}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))))
