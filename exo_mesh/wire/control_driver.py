"""Calls the driver of a ring on behalf of the entry peer: token ids in, token ids out (driver.proto)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio
import msgspec
from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import printable
from exo_mesh.base.tasks import Turns, was_cancelled
from exo_mesh.domain.plan import Ballot, Plan
from exo_mesh.domain.request import DriverEvent, FrameTrace, GenerateRequest, Prefilled, PrefixReport, Queued, Tokens
from exo_mesh.errors import (
    CancelledRequestError,
    DeadlineError,
    MeshError,
    OverloadError,
    StageLostError,
    error_from_code,
)
from exo_mesh.security.credentials import Credentials, CredentialSource
from exo_mesh.wire.calls import GENERATE, RECALL
from exo_mesh.wire.channel_options import TOKENS
from exo_mesh.wire.channels import method_of, open_channel
from exo_mesh.wire.driver_codec import (
    event_from_proto,
    prefix_from_proto,
    prompt_from_proto,
    request_to_proto,
    trace_from_proto,
)
from exo_mesh.wire.image_upload import UploadedCall
from exo_mesh.wire.plan_codec import ballot_from_proto
from exo_mesh.wire.proto import driver_pb2 as pb

# Redial at once after a break: the caller decides how often and how long, not grpc's back-off of up to 120 s. The
# "minimum" is also the timeout of one attempt.
_DIAL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


MAX_RETRY_AFTER_S = 30.0

MOST_READ_A_ROUND = 16
"""Messages of drivers that are processed in one round of the event loop: with a thousand streams, their tokens arrive
together, and take 65 us each."""

_Key = tuple[str, Credentials | None]


class DriverStreamError(StageLostError):
    """The stream from the driver broke or could not be opened. The ring itself may be healthy."""


class Silences(msgspec.Struct, frozen=True):
    """Timeouts for a silent driver, in seconds. first_s: before the first token event; queue positions and prefill
    progress reset it. next_s: after the first token event. queue_s: how long the request may wait in the queue."""

    first_s: float
    next_s: float
    queue_s: float


class DriverCall:
    """One request on the stream from a driver: call `read` until an event has `finish`, then `aclose`.

    It has no timers: the owner of the call checks `overdue` from time to time, and ends a silent call by `interrupt`.
    """

    def __init__(
        self,
        call: Any,
        plan: Plan,
        silences: Silences,
        give_back: Callable[[], Awaitable[None]],
        *,
        on_trace: Callable[[list[FrameTrace]], None],
        on_ballot: Callable[[Ballot], None],
        clock: Clock,
        turns: Turns,
    ) -> None:
        self._call = call
        self._turns = turns
        self._plan = plan
        self._ballot = plan.ballot
        self._silences = silences
        self._give_back = give_back
        self._on_trace = on_trace
        self._on_ballot = on_ballot
        self._clock = clock
        self._reading_since: float | None = None
        self._started = False
        self._turn_by = math.inf
        self._next: Tokens | None = None
        """Tokens that arrived in one message with the prompt's log-probabilities."""
        self._error: BaseException | None = None
        self.prefix: PrefixReport | None = None
        """Where the prompt parts from what the driver's ring keeps, once the driver has said so."""

    async def read(self) -> DriverEvent:
        """The next event. Raises the driver's own error, DriverStreamError if the stream breaks, StageLostError if the
        driver works under a lower ballot, and the error given to `interrupt`."""
        if self._next is not None:
            held_back, self._next = self._next, None
            return held_back
        if self._error is not None:
            raise self._error
        message = await self._message()
        if (message.ballot.counter, message.ballot.proposer) != (self._ballot.counter, self._ballot.proposer):
            self._take_ballot(ballot_from_proto(message.ballot))
        self._note_turn(message)
        if message.trace:
            self._on_trace([trace_from_proto(frame) for frame in message.trace])
        if message.HasField("prefix"):
            self.prefix = prefix_from_proto(message.prefix)
        if message.error_code:
            error = error_from_code(printable(message.error_code, 64), printable(message.error_message))
            if isinstance(error, OverloadError) and message.wait_s > 0:
                error.retry_after_s = min(message.wait_s, MAX_RETRY_AFTER_S)
            if not message.events and not message.prompt:
                raise error
            self._error = error  # raised after the tokens of the same message
        tokens = Tokens(tuple(event_from_proto(event) for event in message.events)) if message.events else None
        self._started = self._started or tokens is not None
        if message.prompt:
            self._next = tokens
            return prompt_from_proto(message.prompt)
        if tokens is not None:
            return tokens
        if message.queued:
            wait_s = message.wait_s if math.isfinite(message.wait_s) else 0.0
            return Queued(message.queued, message.queue_length, wait_s)
        return Prefilled(message.prefilled)

    @property
    def deadline(self) -> float:
        """When the driver's silence becomes an error, on the clock of the call; math.inf while no `read` is waiting."""
        return math.inf if self._reading_since is None else min(self._turn_by, self._reading_since + self._limit_s)

    @property
    def _limit_s(self) -> float:
        return self._silences.next_s if self._started else self._silences.first_s

    def overdue(self, now: float) -> MeshError | None:
        """The error for a deadline that has passed; None before that.

        OverloadError if the queue wait was too long, DeadlineError before the first token, StageLostError after it.
        """
        if now < self.deadline:
            return None
        if now >= self._turn_by:
            queue_s = self._silences.queue_s
            retry_after_s = min(MAX_RETRY_AFTER_S, queue_s)
            return OverloadError(f"waited {queue_s:g} s in the queue of the ring", retry_after_s=retry_after_s)
        text = f"the ring has been silent for {self._limit_s:.0f} s"
        return StageLostError(text) if self._started else DeadlineError(text)

    def interrupt(self, error: BaseException) -> None:
        """End the call: `read` raises the error, immediately if it is waiting. Only the first error counts."""
        if self._error is None:
            self._error = error
            self._call.cancel()

    async def aclose(self) -> None:
        """End the call; the driver frees the request within one lap."""
        self._call.cancel()
        await self._give_back()

    async def _message(self) -> pb.GenerateEvents:
        self._reading_since = self._clock()
        try:
            message = await self._call.read()
            await self._turns.take()
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise self._error or CancelledRequestError("the call to the driver was closed") from None
        except grpc.aio.AioRpcError as exc:
            raise self._error or DriverStreamError(
                f"the stream from the driver broke: {printable(exc.details() or '')}"
            ) from exc
        finally:
            self._reading_since = None
        if not isinstance(message, pb.GenerateEvents):
            instance_id = self._plan.instance_id
            raise self._error or DriverStreamError(f"the driver of {instance_id} ended the stream too early")
        return message

    def _take_ballot(self, ballot: Ballot) -> None:
        if ballot < self._ballot:
            raise StageLostError(f"the driver of {self._plan.instance_id} has been replaced by a newer plan")
        self._ballot = ballot
        self._on_ballot(ballot)

    def _note_turn(self, message: pb.GenerateEvents) -> None:
        """Track the queue deadline. A request may wait queue_s from its first queue position. Once it has left the
        queue it is accepted, and is not refused later."""
        if not message.queued:
            self._turn_by = math.inf
            self._silences = replace(self._silences, queue_s=math.inf)
        elif self._turn_by == math.inf:
            self._turn_by = self._clock() + self._silences.queue_s


class DriverChannels:
    """Keeps one channel per driver endpoint while it is in use; opens a new one after this node's credentials were
    renewed."""

    def __init__(self, credentials: CredentialSource | None = None) -> None:
        self._credentials = credentials
        self._channels: dict[_Key, tuple[grpc.aio.Channel, int]] = {}
        self._turns = Turns(MOST_READ_A_ROUND)

    def open(
        self,
        endpoint: str,
        plan: Plan,
        request: GenerateRequest,
        silences: Silences,
        *,
        on_trace: Callable[[list[FrameTrace]], None] = lambda frames: None,
        on_ballot: Callable[[Ballot], None] = lambda ballot: None,
        clock: Clock = monotonic,
    ) -> DriverCall:
        """Send a request to the driver at `endpoint`, "host:port". The caller closes the call.

        on_trace: called with further laps of a traced request. on_ballot: called when the ring continues under a higher
        ballot, in the same stream; `DriverCall.read` raises what it raises.
        """
        key = (endpoint, self._credentials.current if self._credentials else None)
        channel = self._take(key)
        if request.resumed:
            silences = replace(silences, queue_s=math.inf)
        message = request_to_proto(plan, request)
        if request.pictures:
            stream: Any = UploadedCall(channel, message, request.pictures)
        else:
            stream = method_of(channel, GENERATE)(message)
        give_back = partial(self._give_back, key)
        return DriverCall(
            stream, plan, silences, give_back, on_trace=on_trace, on_ballot=on_ballot, clock=clock, turns=self._turns
        )

    async def recall(self, endpoint: str, key_hash: bytes) -> int | None:
        """The number of tokens that the driver there keeps of an answer, by its key; None if it has none or does not
        answer."""
        key = (endpoint, self._credentials.current if self._credentials else None)
        recall = method_of(self._take(key), RECALL)
        try:
            reply = await recall(pb.RecallRequest(key_hash=key_hash), timeout=RECALL.deadline_s)
            return int(reply.num_tokens) if reply.found else None
        except grpc.aio.AioRpcError:
            return None
        finally:
            await self._give_back(key)

    async def close(self) -> None:
        """Close all channels; running calls end."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

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


async def complete(call: DriverCall, silence_s: float) -> list[int]:
    """The token ids of a whole answer, for callers that do not stream; closes the call. Raises what `read` raises, and
    TimeoutError after silence_s without an event."""
    token_ids: list[int] = []
    async with aclosing(call):
        while True:
            async with asyncio.timeout(silence_s):
                event = await call.read()
            if isinstance(event, Tokens):
                token_ids += [token.token_id for token in event.events if token.token_id is not None]
                if event.events[-1].finish is not None:
                    return token_ids
