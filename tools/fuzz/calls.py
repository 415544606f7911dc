"""Concurrent gRPC calls with raw bytes, and their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import grpc
import grpc.aio

from tools.fuzz.rig import Rig

AT_ONCE = 32
NOT_FINITE = "not finite"
"""The error of a model whose weights make NaN of everything: neither the client nor the node can help it."""

SOFT = ("503", NOT_FINITE, "closed", "ConnectionResetError", "BrokenPipeError")
"""Right answers besides 2xx and 4xx. The last three: the node refuses a body before it has read all of it."""
DEADLINE_S = 10.0
_CUTS = (b'"internal_error"', b'"engine_error"', b'"api_error"', b'{"error":"internal error')


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


async def post(port: int, path: str, data: bytes) -> str:
    """Sends a body; returns the status after the whole answer, "cut" for a stream that ends with our error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Content-Length: {len(data)}",
            "Connection: close",
            "",
            "",
        )
        writer.write("\r\n".join(lines).encode() + data)
        answer = b""
        while chunk := await reader.read(1 << 16):
            answer += chunk
    finally:
        writer.close()
    words = answer.split(None, 2)
    status = words[1].decode("ascii", "replace") if len(words) > 1 else "closed"
    if b"logits hold" in answer:
        return NOT_FINITE
    return "cut" if any(word in answer for word in _CUTS) else status


async def judged_post(rig: Rig, path: str, data: bytes, deadline_s: float, what: str, port: int = 0) -> str:
    """Sends a body to a node, by default the first, and notes harm: no answer in time, an answer of 5xx besides 503, or
    a stream that ends with our error. what: names the case in the report."""
    return judged(rig, await status_of(port or rig.api_port, path, data, deadline_s), what)


async def status_of(port: int, path: str, data: bytes, deadline_s: float) -> str:
    """Sends a body and returns the status of the answer, or what happened instead."""
    try:
        async with asyncio.timeout(deadline_s):
            return await post(port, path, data)
    except TimeoutError:
        return "NO ANSWER"
    except OSError as exc:
        return type(exc).__name__


def judged(rig: Rig, status: str, what: str) -> str:
    """Notes the harm that a status shows; returns the status."""
    if not status.startswith(("2", "4")) and status not in SOFT:
        rig.harm.append(f"{status} to {what}")
    return status
