"""The sending end of a hop: delivers every frame to the next stage once and in order, across broken connections.

While the ring is idle the hop rests: its connection is closed, because the pings on it wake both machines all the time.

      run              hello answered            may_rest, and every frame acknowledged
    ------>  DIALLING  -------------->  LINKED  --------------------------------------->  RESTING
             |  ^  ^                      |                                                 |
             |  |  +-- break, or moved ---+                                                 |
             |  +--------- a frame to send, `open`, `knock`, or moved ----------------------+
             +---> lost: after LOST_AFTER_S, or if the next stage refuses a frame
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc
from msgspec.structs import replace

from exo_mesh.base.tasks import was_cancelled
from exo_mesh.domain.frame import Frame, MemoryStatus, RingHello
from exo_mesh.errors import StageLostError, TransportError
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.wire.channels import open_channel
from exo_mesh.wire.codec import Acknowledged, decode_ack, encode_frame, encode_hello

FRAMES_METHOD = "/exo_mesh.Ring/Frames"

LOST_AFTER_S = 5.0
"""A hop that cannot be re-established within this time is lost: ten times what a healthy redial needs (DESIGN 4)."""

REDIAL_FIRST_S, REDIAL_MOST_S = 0.02, 0.5

REST_LOOK_S = 0.5
"""Time between two looks whether the hop may rest."""

REST_S = 2.0
"""How long the receiver may take to acknowledge the last frames of a hop that is going to rest. Without that the hop is
dialled again, which shows what has arrived."""

TRY_AFTER_S = 60.0
"""A hop that has rested so long is opened for a moment, so that a loss of TCP alone, which no datagram shows, is found
before a request needs the hop."""

HELLO_DEADLINE_S = 60.0
"""A stage answers a hello between two frames, and one prefill chunk takes seconds on a slow device. A stopped process
is detected earlier, by HTTP/2 pings within three seconds."""

_log = logging.getLogger(__name__)

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
_REFUSED = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT)
_BREAKS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, TransportError, TimeoutError)

# A machine that is off does not answer; on a system without TCP_USER_TIMEOUT, grpc would wait 20 s for it.
_DIAL_OPTIONS = [("grpc.min_reconnect_backoff_ms", 2000)]


class RingLink:
    """The sending end of a hop to the next stage.

    Frames are kept until the receiver has acknowledged them, and are sent again after a redial; the receiver drops
    duplicates by step. The number of kept frames is bounded by the frames that the driver has in flight.
    """

    def __init__(
        self,
        hello: RingHello,
        credentials: CredentialSource | None = None,
        on_hop: Callable[[float], None] = lambda seconds: None,
        may_rest: Callable[[], bool] = lambda: False,
    ) -> None:
        """on_hop: called with the seconds that a frame took to the next stage, for about one frame in 64. may_rest:
        whether the ring is idle, so that the hop may be closed until the next frame; never by default."""
        self._credentials = credentials
        self._on_hop = on_hop
        self._may_rest = may_rest
        self._writing = False
        self._rests = False
        self._wanted = asyncio.Event()
        """Something has to be sent over a hop that rests, or that is going to."""
        self._is_going_to_rest = False
        self._open_until = 0.0
        self._knocks = False
        self._sent_at: deque[tuple[int, float]] = deque()
        """(step, time) of the frames that were sent on this stream and are not acknowledged."""
        self._fastest_s = math.inf
        self._hello = hello
        self._endpoint = ""
        self._moved = asyncio.Event()
        self._broken = asyncio.Event()
        self._up = asyncio.Event()
        self._call: _Call | None = None
        self._unacked: deque[Frame] = deque()
        self._unsent: deque[Frame] = deque()
        self.status = MemoryStatus()
        """The memory status that the receiver reported, if it is a rank of the same tensor group."""
        self.frames_out = 0
        self.bytes_out = 0

    @property
    def linked(self) -> bool:
        """Whether the hop is up and no frame waits to be sent again, or the hop rests."""
        return self._call is not None or self._rests

    @property
    def rests(self) -> bool:
        """Whether the hop is closed because the ring is idle. Nothing then shows that the next stage can be
        reached."""
        return self._rests

    def open(self, seconds: float = 0.0) -> None:
        """Open a hop that rests, and keep the hop open for at least so long."""
        self._open_until = max(self._open_until, time.monotonic() + seconds)
        self._wake()

    def knock(self) -> None:
        """Open a hop that rests with a hello that asks for a lap of the ring. A hop that is open needs none, because
        the driver of a ring that is in use sends frames all the time."""
        if self._rests:
            self._knocks = True
            self._wake()

    def _wake(self) -> None:
        self._rests = False
        self._wanted.set()

    async def settle(self) -> None:
        """Returns when the transport has taken every frame given to `send`, as far as known; if the hop is down, when
        it is up again. Does not return by itself after `run` has ended."""
        await self._up.wait()

    def set_endpoint(self, endpoint: str, *, keep_stream: bool = False) -> None:
        """Set where the next stage listens, "host:port"; a change redials.

        keep_stream: the address leads to the same stage by another path. An existing stream stays and the next dial
        uses the new address; a dial in progress to the old address is aborted.
        """
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            if not (keep_stream and self.linked):
                self._moved.set()

    async def send(self, frame: Frame) -> None:
        """Returns when the transport has taken the frame; immediately if the hop is down, because the frame is kept.

        Only one task may send at a time.
        """
        self._unacked.append(frame)  # before the write, whose acknowledgement may be faster
        call = self._call
        if call is None:
            self._unsent.append(frame)
            self._wake()
            return
        self._writing = True
        try:
            await self._write(call, frame)
            return
        except _BREAKS:
            pass
        except asyncio.CancelledError:
            if was_cancelled():
                raise
        finally:
            self._writing = False
        if call is self._call:  # otherwise already handled
            self._broken.set()
            self._up.clear()

    async def run(self) -> None:
        """Keep the hop up until cancelled. Raises StageLostError after LOST_AFTER_S without it, or at once if the next
        stage cannot read a frame, because sending it again would not help."""
        await self._moved.wait()
        delay, broken_since, reason = REDIAL_FIRST_S, time.monotonic(), ""
        while time.monotonic() - broken_since < LOST_AFTER_S:
            self._moved.clear()
            self._wanted.clear()
            self._is_going_to_rest = False
            reason = "a frame could not be written, or the stage has moved"
            try:
                await self._stream(self._endpoint)
            except _BREAKS as exc:
                reason = _reason(exc)
                if isinstance(exc, grpc.aio.AioRpcError) and exc.code() in _REFUSED:
                    raise StageLostError(
                        f"the next stage at {self._endpoint} refused a frame: {exc.details()}"
                    ) from exc
            except asyncio.CancelledError:
                if was_cancelled():
                    raise
                reason = "the call was cancelled"
            if self._is_going_to_rest:
                await self._rest()
                self._up.clear()
                delay, broken_since = REDIAL_FIRST_S, time.monotonic()
                continue
            self._up.clear()
            if self._call is not None:
                self._call, delay, broken_since = None, REDIAL_FIRST_S, time.monotonic()
                _log.warning("the connection to the next stage at %s broke: %s; redialling", self._endpoint, reason)
            await asyncio.sleep(delay)
            delay = min(delay * 2, REDIAL_MOST_S)
        raise StageLostError(f"the next stage at {self._endpoint} cannot be reached: {reason}")

    async def _stream(self, endpoint: str) -> None:
        """One connection: send the hello, the frames that were not acknowledged, then the frames given to `send`."""
        async with open_channel(endpoint, self._credentials, _DIAL_OPTIONS) as channel:
            call: _Call = channel.stream_stream(FRAMES_METHOD)()
            self._broken.clear()
            await _first_to_end(self._converse(call), self._moved.wait(), self._broken.wait(), self._close(call))

    async def _close(self, call: _Call) -> None:
        """Close the stream once the hop may rest: the receiver acknowledges the frames that it has, and ends the
        stream. Returns early if there is something to send; the frames that are not acknowledged are then sent
        again."""
        await self._up.wait()
        while True:
            if self._call is call and not self._writing and time.monotonic() >= self._open_until and self._may_rest():
                break
            await asyncio.sleep(REST_LOOK_S)
        self._call, self._is_going_to_rest = None, True  # `send` keeps frames from now on
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await call.done_writing()
                await self._wanted.wait()

    async def _rest(self) -> None:
        """Wait until the hop is needed or has to be tried. Returns at once if frames are not acknowledged, or more have
        come."""
        self._rests = not (self._unacked or self._wanted.is_set())
        if not self._rests:
            return
        _log.debug("the hop to %s rests", self._endpoint)
        waits = [asyncio.create_task(event.wait()) for event in (self._wanted, self._moved)]
        try:
            await asyncio.wait(waits, timeout=TRY_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._rests = False
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _converse(self, call: _Call) -> None:
        self._sent_at.clear()
        self._fastest_s = math.inf
        hello, self._knocks = replace(self._hello, wants_lap=self._knocks), False
        await call.write(encode_hello(hello))
        async with asyncio.timeout(HELLO_DEADLINE_S):
            answer = await call.read()
        self._acknowledge(_ack_of(answer))
        self._unsent = deque(self._unacked)
        while self._unsent:
            await self._write(call, self._unsent.popleft())
        self._call = call
        self._up.set()
        while (message := await call.read()) is not grpc.aio.EOF or not self._is_going_to_rest:
            self._acknowledge(_ack_of(message))

    async def _write(self, call: _Call, frame: Frame) -> None:
        self._sent_at.append((frame.step, time.perf_counter()))
        for message in encode_frame(frame):
            await call.write(message)
            self.bytes_out += len(message)
        self.frames_out += 1

    def _acknowledge(self, ack: Acknowledged) -> None:
        self.status = ack.status
        while self._unacked and self._unacked[0].step <= ack.last_step:
            self._unacked.popleft()
        step, sent_at = 0, 0.0
        while self._sent_at and self._sent_at[0][0] <= ack.last_step:
            step, sent_at = self._sent_at.popleft()
        if ack.at_once and step == ack.last_step:
            self._time_hop(time.perf_counter() - sent_at)

    def _time_hop(self, round_trip_s: float) -> None:
        """Estimate the time of a hop. An acknowledgement is tiny, so its way back takes half of the fastest round trip,
        whatever the size of the frame."""
        self._fastest_s = min(self._fastest_s, round_trip_s)
        self._on_hop(round_trip_s - self._fastest_s / 2)


def _ack_of(message: object) -> Acknowledged:
    if not isinstance(message, bytes):
        raise TransportError("the next stage closed the stream")
    return decode_ack(message)


def _reason(exc: BaseException) -> str:
    if isinstance(exc, grpc.aio.AioRpcError):
        return f"{exc.code().name}: {exc.details()}"
    return str(exc) or type(exc).__name__


async def _first_to_end(*parts: Coroutine[Any, Any, object]) -> None:
    """Run coroutines together until one ends or raises; cancel the others and wait for them. A cancellation that comes
    while they end is not lost: the hop would go on for ever, and a change of plan would wait for it."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and not isinstance(task.exception(), _BREAKS):
                task.result()
