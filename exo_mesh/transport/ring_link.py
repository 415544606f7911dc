"""The sending end of a hop: every frame reaches the next stage once and in order, over breaks of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc

from exo_mesh.domain.frame import Frame
from exo_mesh.errors import TransportError
from exo_mesh.proto import ring_pb2 as pb
from exo_mesh.transport.channel_options import CLIENT_OPTIONS
from exo_mesh.transport.codec import decode_ack, encode_frame, encode_hello

FRAMES_METHOD = "/exo_mesh.Ring/Frames"

LOST_AFTER_S = 5.0
"""A hop that cannot be re-established for this long is lost: ten times what a healthy redial needs (DESIGN 4)."""

REDIAL_FIRST_S, REDIAL_MOST_S = 0.02, 0.5

HELLO_DEADLINE_S = 3.0

_log = logging.getLogger(__name__)

_Outgoing = tuple[int, list[bytes]]
_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class RingLink:
    """A hop to the next stage. `send` may be called from any thread; all else belongs to the event loop.

    Frames are kept until the receiver has acknowledged them, and sent again after a redial; the receiver drops
    repeats by step. What is kept is bounded by the frames that the driver has in flight.
    """

    def __init__(self, hello: pb.RingHello, on_lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = encode_hello(hello)
        self._on_lost = on_lost
        self._endpoint = ""
        self._moved = asyncio.Event()
        self._wake = asyncio.Event()
        self._pending: deque[_Outgoing] = deque()
        self._unacked: deque[_Outgoing] = deque()
        self.linked = False
        self.frames_out = 0
        self.bytes_out = 0

    def set_endpoint(self, endpoint: str) -> None:
        """Where the next stage listens, "host:port"; a change redials."""
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._moved.set()

    def send(self, frame: Frame) -> None:
        """Encode in the calling thread and hand over to the loop; never waits."""
        messages = encode_frame(frame)
        self._loop.call_soon_threadsafe(self._enqueue, frame.step, messages)

    def _enqueue(self, step: int, messages: list[bytes]) -> None:
        self._pending.append((step, messages))
        self._wake.set()

    async def run(self) -> None:
        """Keep the hop up until cancelled; after LOST_AFTER_S without it, report once and end."""
        await self._moved.wait()
        delay, broken_since, reason = REDIAL_FIRST_S, time.monotonic(), "not reached yet"
        while time.monotonic() - broken_since < LOST_AFTER_S:
            self._moved.clear()
            try:
                await self._stream(self._endpoint)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TransportError, TimeoutError) as exc:
                reason = _reason(exc)
            if self.linked:
                self.linked, delay, broken_since = False, REDIAL_FIRST_S, time.monotonic()
                _log.warning("the hop to %s broke: %s; dialling again", self._endpoint, reason)
            await asyncio.sleep(delay)
            delay = min(delay * 2, REDIAL_MOST_S)
        self._on_lost(f"the next stage at {self._endpoint} cannot be reached: {reason}")

    async def _stream(self, endpoint: str) -> None:
        """One connection's life: hello, what was not acknowledged, then frames as they come."""
        async with grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS) as channel:
            call: _Call = channel.stream_stream(FRAMES_METHOD)()
            await call.write(self._hello)
            first = await asyncio.wait_for(call.read(), HELLO_DEADLINE_S)
            self._acknowledge(_ack_of(first))
            self._pending.extendleft(reversed(self._unacked))
            self._unacked.clear()
            self.linked = True
            await _first_to_end(self._write_frames(call), self._read_acks(call), self._moved.wait())

    async def _write_frames(self, call: _Call) -> None:
        while True:
            while self._pending:
                _step, messages = self._pending[0]
                for message in messages:
                    await call.write(message)
                    self.bytes_out += len(message)
                self._unacked.append(self._pending.popleft())
                self.frames_out += 1
            self._wake.clear()
            await self._wake.wait()

    async def _read_acks(self, call: _Call) -> None:
        while True:
            self._acknowledge(_ack_of(await call.read()))

    def _acknowledge(self, last_step: int) -> None:
        for queue in (self._unacked, self._pending):
            while queue and queue[0][0] <= last_step:
                queue.popleft()


def _ack_of(message: object) -> int:
    if not isinstance(message, bytes):
        raise TransportError("the next stage closed the stream")
    return decode_ack(message)


def _reason(exc: BaseException) -> str:
    if isinstance(exc, grpc.aio.AioRpcError):
        return f"{exc.code().name}: {exc.details()}"
    return str(exc) or type(exc).__name__


async def _first_to_end(*parts: Coroutine[Any, Any, object]) -> None:
    """Run coroutines together until one ends or raises; cancel the others and wait for them."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, TransportError):
                await task
