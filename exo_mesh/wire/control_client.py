"""Calls one peer's control endpoint over gRPC. Every call has a deadline; every failure is a MeshError."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import printable
from exo_mesh.base.tasks import was_cancelled
from exo_mesh.errors import (
    DeadlineError,
    MeshError,
    OpenMeshError,
    PeerVersionError,
    StrangerError,
    TransportError,
    error_from_code,
)
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.security.secret import DEFAULT_NAMESPACE
from exo_mesh.wire.call_access import Access, OwnCalls
from exo_mesh.wire.channel_options import QUIET, QUIET_REPORTS
from exo_mesh.wire.channels import method_of, open_channel
from exo_mesh.wire.gate import CODE_KEY, NAMESPACE_KEY
from exo_mesh.wire.incoming import read_message
from exo_mesh.wire.peer_call import AnyRow, PeerCall, PeerStream, Q, R
from exo_mesh.wire.probes.asking import DatagramProbes
from exo_mesh.wire.probes.port import ProbePort

IDLE_MS = 3000
"""A connection without calls is closed after this time, because its keepalive timer at either end wakes each thread of
gRPC's pool some twenty times, every second. The next call opens it again. Longer than a period of calls to the next
peer, which are the probes where datagrams do not arrive."""

RENEW_S = 2.5
"""gRPC 1.85 closes an idle connection once for each channel: opened again, it stays open. So a call after a pause of
this length uses a new channel. Less than IDLE_MS, because the old one must not have been opened again meanwhile."""

# The membership closes a channel when a peer has died. That cancels the calls on it, and grpc raises CancelledError in
# their callers as if their tasks had been cancelled; a call on a closed channel is a UsageError.
_FAILURES = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)

_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

# Redial at once: the membership decides whether a peer is alive, not grpc's back-off of up to 120 s. The "minimum" is
# also the timeout of one attempt, and a TLS handshake with a slow board takes long.
_DIAL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.client_idle_timeout_ms", IDLE_MS),
]


class _Methods:
    """The calls over one channel, as gRPC makes them from rows."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._known: dict[AnyRow, Any] = {}

    def of(self, row: AnyRow) -> Any:
        method = self._known.get(row)
        if method is None:
            method = self._known[row] = method_of(self._channel, row, _reader(row))
        return method


def _reader(row: AnyRow) -> Callable[[bytes], Message | TransportError]:
    """A function that reads replies with limits. It returns an error instead of raising it: gRPC would log the error
    and return None."""

    def read(data: bytes) -> Message | TransportError:
        try:
            message: Message = read_message(row.reply, data, row.reply_bytes)
        except TransportError as exc:
            return exc
        return message

    return read


class ControlClient:
    """Calls the peer at "host:port". Raises TransportError if it cannot be reached, DeadlineError if it does not
    answer, and the peer's own MeshError if it refuses. probe_port: for probes by datagram; without one, all are
    calls. own_calls: makes the proofs that an open mesh needs for some calls."""

    def __init__(
        self,
        address: str,
        credentials: CredentialSource | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        probe_port: ProbePort | None = None,
        own_calls: OwnCalls | None = None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._namespace = namespace
        self._metadata = ((NAMESPACE_KEY, namespace),)
        self._own_calls = None if credentials is not None else own_calls
        self._open()
        self._old_channels: list[grpc.aio.Channel] = []
        self._quiet_channels: set[grpc.aio.Channel] = set()
        self._streams: set[Any] = set()
        self._is_closed = False
        self._has_answered = False
        self._loud_calls = 0
        self._last_call_at = math.inf
        """When the last call on `_channel` ended."""
        self.datagrams = None if probe_port is None else DatagramProbes(address, probe_port)
        self._calls = 0
        self._reports = 0
        self._no_report = asyncio.Event()
        self._no_report.set()

    def at(self, address: str) -> ControlClient:
        """A new client with the same credentials and another address."""
        port = None if self.datagrams is None else self.datagrams.port
        return ControlClient(address, self._credentials, self._namespace, port, self._own_calls)

    async def close(self) -> None:
        self._is_closed = True
        for call in list(self._streams):
            call.cancel()  # channels of grpcio 1.82 and older leave running streams alone when they close
        await self._channel.close()
        await self._close_old()
        for channel in list(self._quiet_channels):
            await channel.close()

    async def connects(self, timeout_s: float) -> bool:
        """Whether a process of this mesh accepts connections at the address. Makes no call."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def is_refused(self, timeout_s: float) -> bool:
        """Whether the machine refuses connections at the address. False without an answer."""
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    @property
    def is_idle(self) -> bool:
        """Whether no call and no stream is running."""
        return self._calls == 0

    async def close_when_idle(self) -> None:
        """Close once no stage reports are followed through this client: a verdict of the membership must not end a ring
        with healthy streams. Unanswered pings end the stream of a peer that is really gone."""
        await self._no_report.wait()
        await self.close()

    async def call(self, row: PeerCall[Q, R], request: Q, timeout_s: float | None = None) -> R:
        """Make a call. timeout_s: the deadline of the row, if None."""
        method = self._methods_now.of(row)
        self._began()
        try:
            await self._close_old()
            deadline_s = row.deadline_s if timeout_s is None else timeout_s
            reply: R = _unless_error(await method(request, timeout=deadline_s, metadata=self._metadata_of(row)))
            self._has_answered = True
            return reply
        except _FAILURES as exc:
            if isinstance(exc, asyncio.CancelledError) and was_cancelled():
                raise  # not from itself: that cycle would keep the call, and so its connection, until a collection
            raise self._translated(exc) from exc
        finally:
            self._ended()

    async def stream(self, row: PeerStream[Q, R], request: Q, *, quiet: bool = False) -> AsyncGenerator[R, None]:
        """The messages of a stream. quiet: over a connection with so few pings that half a minute may pass before its
        loss is noticed."""
        self._reports += row.outlives_verdict
        if row.outlives_verdict:
            self._no_report.clear()
        try:
            async with (
                self._quiet_methods() if quiet else nullcontext(self._methods_now) as methods,
                aclosing(self._read(methods, row, request, quiet=quiet)) as items,
            ):
                async for item in items:
                    yield item
        finally:
            self._reports -= row.outlives_verdict
            if not self._reports:
                self._no_report.set()

    async def _read(
        self, methods: _Methods, row: PeerStream[Q, R], request: Q, *, quiet: bool
    ) -> AsyncGenerator[R, None]:
        call = None
        self._began(quiet=quiet)
        try:
            await self._close_old()
            call = methods.of(row)(request, timeout=row.deadline_s, metadata=self._metadata_of(row))
            self._streams.add(call)
            # not `async for`, whose iterator would keep the call, and so its connection, until a collection
            while (item := await call.read()) is not grpc.aio.EOF:
                yield _unless_error(item)
        except _FAILURES as exc:
            if isinstance(exc, asyncio.CancelledError) and was_cancelled():
                raise  # not from itself: that cycle would keep the call, and so its connection, until a collection
            raise self._translated(exc) from exc
        finally:
            self._ended(quiet=quiet)
            if call is not None:
                self._streams.discard(call)
                call.cancel()

    def _metadata_of(self, row: AnyRow) -> tuple[tuple[str, str], ...]:
        """The metadata of one call, with a proof if it needs one."""
        if self._own_calls is None or row.access.access is not Access.PEER:
            return self._metadata
        return (*self._metadata, self._own_calls.metadata())

    @asynccontextmanager
    async def _quiet_methods(self) -> AsyncIterator[_Methods]:
        """The calls over a channel of their own, with few pings. It is closed at the end, for the reason of RENEW_S."""
        if self._is_closed:
            raise TransportError(f"the connection to {self.address} is closed")
        channel = open_channel(self.address, self._credentials, [*QUIET, *_DIAL_OPTIONS, *QUIET_REPORTS])
        self._quiet_channels.add(channel)
        try:
            yield _Methods(channel)
        finally:
            self._quiet_channels.discard(channel)
            await channel.close()

    @property
    def _methods_now(self) -> _Methods:
        self._renew()
        return self._methods

    def _open(self) -> None:
        self._channel = open_channel(self.address, self._credentials, [*QUIET, *_DIAL_OPTIONS])
        self._methods = _Methods(self._channel)

    def _renew(self) -> None:
        """Use another channel after a pause; see RENEW_S. `_close_old` closes the old channel."""
        if not self._is_closed and not self._loud_calls and monotonic() - self._last_call_at >= RENEW_S:
            self._old_channels.append(self._channel)
            self._open()
            self._last_call_at = math.inf

    async def _close_old(self) -> None:
        while self._old_channels:
            await self._old_channels.pop().close()

    def _began(self, *, quiet: bool = False) -> None:
        self._calls += 1
        self._loud_calls += not quiet

    def _ended(self, *, quiet: bool = False) -> None:
        self._calls -= 1
        self._loud_calls -= not quiet
        if not quiet:
            self._last_call_at = monotonic()

    def _translated(self, exc: BaseException) -> MeshError:
        """The MeshError for a failed call."""
        if not isinstance(exc, grpc.aio.AioRpcError):
            return TransportError(f"the connection to {self.address} was closed")
        if self.datagrams is not None and exc.code() in _UNREACHED:
            self.datagrams.call_failed()
        details = printable(exc.details() or "")
        # through a list: in grpcio 1.76 the metadata has keys(), but they are the pairs
        code = dict([*(exc.trailing_metadata() or ())]).get(CODE_KEY)
        if exc.code() == grpc.StatusCode.PERMISSION_DENIED and code != OpenMeshError.code:
            return StrangerError(details)
        if code is not None:
            return error_from_code(printable(str(code), 64), details)
        if exc.code() == grpc.StatusCode.UNIMPLEMENTED:
            return PeerVersionError(f"the peer at {self.address} runs another version of exo-mesh: {details}")
        if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"the peer at {self.address} did not answer in time")
        if self._credentials is None and not self._has_answered and "Socket closed" in details:
            return StrangerError(  # how a TLS server answers plain HTTP/2
                f"the node at {self.address} closed the connection: its mesh has a secret, but this node has none"
            )
        if self._credentials is not None and "handshake failed" in details.lower():
            return StrangerError(f"the node at {self.address} has another secret than this one, or none")
        return TransportError(f"the peer at {self.address} cannot be reached: {details}")


def _unless_error(reply: Any) -> Any:
    if isinstance(reply, TransportError):
        raise reply
    return reply
