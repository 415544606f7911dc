"""The receiving end of a hop: checks the sender, drops duplicates, refuses gaps, and acknowledges frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from exo_mesh.base.versions import ProtocolRange
from exo_mesh.domain.frame import Frame, MemoryStatus, RingHello
from exo_mesh.domain.plan import Ballot
from exo_mesh.errors import TransportError
from exo_mesh.wire.codec import FrameAssembler, decode_hello, encode_ack
from exo_mesh.wire.incoming import MalformedError

ACK_EVERY_FRAMES = 64
ACK_EVERY_BYTES = 4 * 1024 * 1024
"""An acknowledgement lets the sender drop the frames that it keeps for a redial; one per small frame would double the
number of messages."""

LAST_ACK_S = 2.0
"""Deadline for the acknowledgement with which a stream ends whose sender is going to rest."""

_BREAKS = (grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading and writing raise after the connection has broken."""

_log = logging.getLogger(__name__)


class RingReceiver:
    """Serves /exo_mesh.Ring/Frames for one stage. `deliver` is awaited with each new frame, in step order; it must not
    wait for a later frame. After a redial it may be called with the next frame before the previous call has returned.

    Only the previous stage, with this instance and ballot, is admitted; its second stream replaces the first.
    """

    def __init__(
        self,
        spoken: ProtocolRange,
        instance_id: str,
        ballot: Ballot,
        from_stage: int,
        deliver: Callable[[Frame], Awaitable[None]],
        status: Callable[[], MemoryStatus] | None = None,
        on_hello: Callable[[RingHello], None] = lambda hello: None,
    ) -> None:
        """status: returns the memory status of this rank, if the sender leads the same tensor group. It is sent with
        the acknowledgements, and at once after a change. on_hello: called with each hello that is accepted."""
        self._on_hello = on_hello
        self._spoken = spoken
        self._expected = (instance_id, from_stage)
        self._ballot = ballot
        self._deliver = deliver
        self._status = status
        self._reported: MemoryStatus | None = None
        self._in_order = asyncio.Lock()
        self._last_step = 0
        self._stream = 0
        self.frames_in = 0
        self.num_streams = 0
        self.alone_since = time.monotonic()
        """When the last stream ended; valid while there is no stream."""

    @property
    def was_called(self) -> bool:
        """Whether the previous stage has ever connected."""
        return self._stream > 0

    def change(self, ballot: Ballot, from_stage: int) -> None:
        """From now on admit only that stage with that ballot; steps restart at 1."""
        self._expected = (self._expected[0], from_stage)
        self._ballot = ballot
        self._last_step = 0
        self._stream += 1

    def handler(self) -> grpc.GenericRpcHandler:
        """The generic handler to add to a grpc.aio server; messages are raw bytes in both directions."""
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._frames)
        return grpc.method_handlers_generic_handler("exo_mesh.Ring", {"Frames": method})

    async def _frames(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            hello = decode_hello(_bytes(await context.read()))
        except TransportError as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        if refusal := self._refusal(hello):
            _log.warning("refused a ring stream: %s", refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        self._stream += 1
        self.num_streams += 1
        self._on_hello(hello)
        try:
            await self._serve(context)
        finally:
            self.num_streams -= 1
            self.alone_since = time.monotonic()

    async def _serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(self._ack())
        # grpc cancels this task when the connection breaks; a frame that counts as arrived must still be delivered.
        reading = asyncio.create_task(self._read(self._stream, context), name="ring reader")
        try:
            await _to_its_end(reading)
        except TransportError as exc:
            _log.warning("closed a ring stream that violated the protocol: %s", exc)
            is_malformed = isinstance(exc, MalformedError)
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT if is_malformed else grpc.StatusCode.DATA_LOSS, str(exc)
            )

    def _refusal(self, hello: RingHello) -> str:
        said = ProtocolRange.said(hello.protocol, hello.newest_protocol)
        if self._spoken.agreed(said) is None:
            return f"stage {hello.from_stage} uses protocol {said}, but this stage uses {self._spoken}"
        if (hello.instance_id, hello.from_stage) != self._expected:
            return f'stage {hello.from_stage} of "{hello.instance_id}" is not the stage before this one'
        if hello.ballot != self._ballot:
            return f"ballot {hello.ballot} is not in force here; the ballot in force is {self._ballot}"
        return ""

    async def _read(self, stream: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        assembler = FrameAssembler()
        unacked_frames = unacked_bytes = 0
        while stream == self._stream:
            message = await context.read()
            if stream != self._stream:
                return
            if not isinstance(message, bytes):
                await self._acknowledge_all(context)
                return
            unacked_bytes += len(message)
            frame = assembler.feed(message)
            if frame is None:
                continue
            unacked_frames += 1
            if unacked_frames >= ACK_EVERY_FRAMES or unacked_bytes >= ACK_EVERY_BYTES:
                unacked_frames = unacked_bytes = 0
                await self._accept(frame, context)
            else:
                await self._accept(frame)
            if self._status is not None and self._status() != self._reported:
                unacked_frames = unacked_bytes = 0
                await context.write(self._ack())

    async def _acknowledge_all(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Acknowledge every frame at the end of a stream: its sender keeps the others for the next one."""
        with contextlib.suppress(*_BREAKS, TimeoutError):
            async with asyncio.timeout(LAST_ACK_S):
                await context.write(self._ack())

    def _ack(self, *, at_once: bool = False) -> bytes:
        self._reported = None if self._status is None else self._status()
        return encode_ack(self._last_step, self._reported, at_once=at_once)

    async def _accept(self, frame: Frame, context: grpc.aio.ServicerContext[Any, Any] | None = None) -> None:
        """Deliver a frame unless it is a duplicate. context: acknowledge the frame there before it is computed, so that
        its sender can time the hop."""
        broken: BaseException | None = None
        if context is None and not self._in_order.locked():  # nothing waits here, so no other frame can come between
            is_new = self._take(frame)
        else:
            async with self._in_order:  # keeps a replacing stream from delivering a later frame
                is_new = self._take(frame)
                if context is not None:
                    try:
                        await context.write(self._ack(at_once=is_new))
                    except BaseException as exc:  # noqa: BLE001 - raised below, after delivery
                        broken = exc
        if is_new:
            await self._deliver(frame)
        if broken is not None:
            raise broken

    def _take(self, frame: Frame) -> bool:
        """Count a frame as arrived. False for a duplicate after a redial. Raises TransportError if it is of another
        ballot, or if one before it is missing."""
        if frame.ballot != self._ballot:
            raise TransportError(f"got a frame of ballot {frame.ballot}, but {self._ballot} is in force")
        step = frame.step
        if step <= self._last_step:
            return False
        if step != self._last_step + 1:
            raise TransportError(f"frame {step} follows frame {self._last_step}")
        self._last_step = step
        self.frames_in += 1
        return True


async def _to_its_end(reading: asyncio.Task[None]) -> None:
    """Wait for the reader, which ends by itself on a broken connection. Raises the reader's error; if this is
    cancelled, because the connection has broken, logs an error that the break does not explain."""
    try:
        await asyncio.shield(reading)
    except asyncio.CancelledError:
        await asyncio.wait({reading})
        error = None if reading.cancelled() else reading.exception()
        if error is not None and not isinstance(error, (*_BREAKS, TransportError)):
            _log.error("reading a ring stream failed: %s", error, exc_info=error)
        raise


def _bytes(message: object) -> bytes:
    if not isinstance(message, bytes):
        raise TransportError("the stream ended before a hello")
    return message
