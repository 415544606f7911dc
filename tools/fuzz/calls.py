"""Concurrent gRPC calls with raw bytes, and their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import grpc
import grpc.aio

AT_ONCE = 32
DEADLINE_S = 10.0


async def stream_once(
    channel: grpc.aio.Channel,
    method: str,
    messages: list[bytes],
    deadline_s: float,
    metadata: tuple[tuple[str, str], ...] = (),
) -> str:
    """Sends messages on one stream and reads the replies; returns the status. A stream that stays open is ended as
    "cut"."""
    call = channel.stream_stream(method)(iter(messages), timeout=deadline_s, metadata=metadata)
    try:
        for _ in range(8):
            if await call.read() is grpc.aio.EOF:
                break
        else:
            call.cancel()
            return "cut"
        code = await call.code()
    except grpc.aio.AioRpcError as exc:
        if exc.details() == "Internal error from Core":
            return "broken off"  # the server ended the stream while this side was writing
        code = exc.code()
    except asyncio.CancelledError:
        return "CANCELLED"
    return str(code.name)


async def many(count: int, one: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """Runs `one` for each number, AT_ONCE at a time; returns the outcomes."""
    outcomes: Counter[str] = Counter()
    numbers: Iterator[int] = iter(range(count))

    async def work() -> None:
        for number in numbers:
            outcomes[await one(number)] += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes
