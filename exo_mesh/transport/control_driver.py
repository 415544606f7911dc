"""The entry peer's call to the driver of a ring: token ids in, token ids out (driver.proto)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from exo_mesh.clock import monotonic
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.request import FrameTrace, GenerateRequest, Place, TokenEvent
from exo_mesh.errors import DeadlineError, OverloadError, StageLostError, error_from_code
from exo_mesh.proto import driver_pb2 as pb
from exo_mesh.proto import driver_pb2_grpc as rpc
from exo_mesh.security.credentials import Credentials, CredentialSource
from exo_mesh.transport.channel_options import TOKENS
from exo_mesh.transport.channels import open_channel
from exo_mesh.transport.driver_codec import event_from_proto, request_to_proto, trace_from_proto
from exo_mesh.transport.plan_codec import ballot_from_proto

# Dial again at once after a break: how often and how long is decided by the caller, not by grpc's back-off of up to
# 120 s. The "minimum" is also how long one attempt may take.
_DIAL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


MAX_RETRY_AFTER_S = 30.0
RECALL_S = 1.0
"""For an answer from memory; the client waits, and without it the answer is only computed anew."""

_Key = tuple[str, Credentials | None]


class DriverStreamError(StageLostError):
    """The stream from the driver broke, or could not be opened. The ring itself may be well."""


class _Turn:
    """How long a request may still wait for its turn: without limit before it is told to wait, and once it has had it.
    Whoever is interrupted after that was accepted, and is not refused any more."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = math.inf

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - monotonic())

    def heard(self, message: pb.GenerateEvents) -> None:
        if not message.queued:
            self._limit_s = self._deadline = math.inf
        elif self._deadline == math.inf:
            self._deadline = monotonic() + self._limit_s

    def check(self) -> None:
        """Raises OverloadError if it is over."""
        if not self.left_s:
            retry_after_s = min(MAX_RETRY_AFTER_S, self._limit_s)
            raise OverloadError(f"waited {self._limit_s:g} s for a turn on the ring", retry_after_s=retry_after_s)


class DriverChannels:
    """One channel per driver endpoint, kept while it is in use; a new one after our credentials were renewed."""

    def __init__(self, credentials: CredentialSource | None = None) -> None:
        self._credentials = credentials
        self._channels: dict[_Key, tuple[grpc.aio.Channel, int]] = {}

    async def generate(
        self,
        endpoint: str,
        plan: Plan,
        request: GenerateRequest,
        *,
        first_s: float,
        next_s: float,
        queue_s: float,
        on_trace: Callable[[list[FrameTrace]], None] = lambda frames: None,
        on_ballot: Callable[[Ballot], None] = lambda ballot: None,
    ) -> AsyncGenerator[TokenEvent | Place | int, None]:
        """Token events; before the first one, places in the queue and counts of prompt tokens computed. Closing it
        cancels the request.

        first_s: longest silence before the first token event; next_s: afterwards. queue_s: longest that it may wait for
        its turn. on_trace: called with the laps of a traced request before its end. on_ballot: called when the ring
        goes on by a higher ballot, in the same stream. Raises the driver's own error, DriverStreamError if the stream
        breaks, StageLostError if it is of a lower ballot or falls silent after the first token, OverloadError if its
        turn does not come, and DeadlineError if the first token does not.
        """
        key = (endpoint, self._credentials.current if self._credentials else None)
        stub = rpc.DriverStub(self._take(key))  # type: ignore[no-untyped-call]
        call = stub.Generate(request_to_proto(plan, request))
        started, ballot, turn = False, plan.ballot, _Turn(math.inf if request.resumed else queue_s)
        try:
            while True:
                message = await self._next(call, next_s if started else first_s, started, turn)
                if message is None:
                    raise DriverStreamError(f"the driver of {plan.instance_id} ended the stream before the request")
                if (message.ballot.counter, message.ballot.proposer) != (ballot.counter, ballot.proposer):
                    before, ballot = ballot, ballot_from_proto(message.ballot)
                    if ballot < before:
                        raise StageLostError(f"the driver of {plan.instance_id} works for another plan by now")
                    on_ballot(ballot)
                turn.heard(message)
                if message.trace:
                    on_trace([trace_from_proto(frame) for frame in message.trace])
                for event in message.events:
                    started = True
                    yield event_from_proto(event)
                    if event.finish:
                        return
                if message.error_code:  # after the tokens that came with it
                    raise error_from_code(message.error_code, message.error_message)
                if not message.events:
                    yield Place(message.queued) if message.queued else message.prefilled
        finally:
            call.cancel()
            await self._give_back(key)

    async def recall(self, endpoint: str, key_hash: bytes) -> int | None:
        """How many tokens of an answer the driver there keeps under a key; None if none, or if it does not say."""
        key = (endpoint, self._credentials.current if self._credentials else None)
        stub = rpc.DriverStub(self._take(key))  # type: ignore[no-untyped-call]
        try:
            reply = await stub.Recall(pb.RecallRequest(key_hash=key_hash), timeout=RECALL_S)
            return int(reply.num_tokens) if reply.found else None
        except grpc.aio.AioRpcError:
            return None
        finally:
            await self._give_back(key)

    async def close(self) -> None:
        """Close all channels; calls under way end."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _next(self, call: Any, patience_s: float, started: bool, turn: _Turn) -> pb.GenerateEvents | None:
        try:
            async with asyncio.timeout(min(patience_s, turn.left_s)):
                message = await call.read()
        except TimeoutError as exc:
            turn.check()
            text = f"the ring has been silent for {patience_s:.0f} s"
            raise (StageLostError(text) if started else DeadlineError(text)) from exc
        except grpc.aio.AioRpcError as exc:
            raise DriverStreamError(f"the stream from the driver broke: {exc.details()}") from exc
        return message if isinstance(message, pb.GenerateEvents) else None

    def _take(self, key: _Key) -> grpc.aio.Channel:
        channel, users = self._channels.get(key, (None, 0))
        if channel is None:
            channel = open_channel(*key, [*TOKENS, *_DIAL_OPTIONS])
        self._channels[key] = (channel, users + 1)
        return channel

    async def _give_back(self, key: _Key) -> None:
        if key not in self._channels:
            return
        channel, users = self._channels[key]
        if users > 1:
            self._channels[key] = (channel, users - 1)
        else:
            del self._channels[key]
            await channel.close()
