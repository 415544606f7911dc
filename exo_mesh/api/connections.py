"""Serves the HTTP API on a socket, and bounds the connections that have not sent a whole request.

aiohttp has no deadline for the head of a request and no bound on connections, so 1,100 sockets with half a head each
took every file that a process may open. Each connection passes through an ApiConnection, which knows whether the peer
has sent a whole request. Only connections that have not are counted and closed, never streams and running requests.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from socket import socket
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.api.body import take_expectations
from exo_mesh.clock import Clock, monotonic
from exo_mesh.security.api_tls import ApiTls
from exo_mesh.tasks import TaskOwner

HEAD_S = 15.0
"""nginx gives a head 60 s and Apache 20 s; a head is a few kilobytes."""

MAX_PER_ADDRESS = 64
MAX_WAITING, MAX_WAITING_TLS = 1024, 128
"""A connection with half a head takes about 15 kB, a TLS connection 60 kB; more would be felt in the node's memory
(measured by tests/security/test_half_open.py: a flood may take half as much again as an idle node has)."""

BURST_S = 1.0
"""The bound per address leaves younger connections alone: a load test opens hundreds at once, then sends on each."""

SWEEP_EVERY_S = 1.0
SHUTDOWN_S = 1.0
"""How long a peer may take to agree to the end of TLS; asyncio would hold the connection for 30 s."""

ACCEPT_AGAIN_S = 1.0
"""The pause after the system refused to open a file; asyncio has the same."""

STOP_S = 0.4
"""How long a request may go on once the server stops, and how long its handler may take to see that it was cancelled.
The node has ended all requests by then; this is for their last bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """head_s: seconds for the TLS handshake, and for the head of a request. per_address: connections without a whole
    head that one address may have for more than BURST_S. total: connections without a whole request in all, idle ones
    between two requests included."""

    head_s: float = HEAD_S
    per_address: int = MAX_PER_ADDRESS
    total: int = MAX_WAITING

    @classmethod
    def within(cls, max_open_files: int, *, tls: bool = False) -> ConnectionBounds:
        """Bounds for a process that may open so many files: half of them at most."""
        return cls(total=max(1, min(MAX_WAITING_TLS if tls else MAX_WAITING, max_open_files // 2)))


class ConnectionPhase(Enum):
    """What a connection is doing, as far as its bounds go."""

    HEAD = "its peer has connected, and has sent no whole head"
    BODY = "a head has come, and a part of the body has not"
    RUNNING = "a whole request is being answered"
    IDLE = "the last request was answered, and nothing has come since"


class ApiConnection(asyncio.Protocol):
    """One connection: passes everything to aiohttp's handler, and follows the phase. The handler is made with the first
    bytes, since a connection that never sends any needs none."""

    __slots__ = ("_early", "_handler", "_handshake", "_request", "_server", "_transport", "address", "phase", "since")

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._handler: web.RequestHandler | None = None
        self._transport: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None
        self._early = False
        self._handshake: asyncio.Task[None] | None = None
        self.phase = ConnectionPhase.HEAD
        self.since = 0.0
        self.address = ""

    def shake_hands(self, accepted: socket, context: ssl.SSLContext) -> None:
        """Begin TLS on a connection that was accepted; its protocol hears of it at the end of the handshake."""
        self._handshake = self._server.tasks.start(self._shake_hands(accepted, context), "TLS handshake")

    async def _shake_hands(self, accepted: socket, context: ssl.SSLContext) -> None:
        loop, head_s = asyncio.get_running_loop(), self._server.bounds.head_s
        try:
            await loop.connect_accepted_socket(
                lambda: self, accepted, ssl=context, ssl_handshake_timeout=head_s, ssl_shutdown_timeout=SHUTDOWN_S
            )
        except OSError as exc:  # a peer that speaks no TLS, does not trust the certificate, or is too slow
            _log.debug("no TLS with %s: %s", self.address, exc)
        finally:
            self._handshake = None
            if self._transport is None:
                accepted.close()
                self._server.left(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._server.tls is None:
            self._server.joined(self, transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        if self.phase is ConnectionPhase.IDLE:
            self._server.moved(self, ConnectionPhase.HEAD)
        elif self.phase is ConnectionPhase.RUNNING:
            self._early = True
        if self._handler is None:
            self._handler = self._server.new_handler()
            self._handler.connection_made(cast(asyncio.Transport, self._transport))
        self._handler.data_received(data)
        if self.phase is ConnectionPhase.BODY:
            self._server.moved(self, ConnectionPhase.RUNNING if self.has_whole_request else ConnectionPhase.BODY)

    @property
    def has_whole_request(self) -> bool:
        return self._request is not None and self._request.content.is_eof()

    def began(self, request: web.BaseRequest) -> None:
        """A head is complete, and the handler of its route begins."""
        self._request = request
        self._early = False
        self._server.moved(self, ConnectionPhase.RUNNING if self.has_whole_request else ConnectionPhase.BODY)

    def ended(self) -> None:
        """The route has answered. What came meanwhile is the beginning of the next request."""
        self._request = None
        self._server.moved(self, ConnectionPhase.HEAD if self._early else ConnectionPhase.IDLE)

    def abort(self) -> None:
        """Close it at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    # passed on to aiohttp

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.left(self)
        if self._handler is not None:
            self._handler.connection_lost(exc)

    def eof_received(self) -> None:
        if self._handler is not None:
            self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()


class ApiServer:
    """Runs an application on a listening socket: start, stop_listening, stop. tls: serve HTTPS."""

    def __init__(
        self,
        runner: web.AppRunner,
        bounds: ConnectionBounds | None = None,
        tls: ApiTls | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._runner = runner
        self.bounds = bounds or ConnectionBounds()
        self.tls = tls
        self._clock = clock
        self.tasks = TaskOwner()
        self._server: asyncio.Server | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[ApiConnection] = set()
        self._waiting: dict[ApiConnection, None] = {}  # without a whole request, the one that waits longest first
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, listening: socket) -> None:
        """Serve on a socket that listens."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "the runner is set up"
        server.request_handler = take_expectations(server.request_handler)
        if self.tls is not None:
            self.tasks.keep(self.tls.keep, "TLS certificate")
        listening.setblocking(False)
        if self.tls is not None:
            self._accepting = self.tasks.start(self._accept(listening, self.tls), "accept")
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ApiConnection(self), sock=listening, backlog=1024)

    async def _accept(self, listening: socket, tls: ApiTls) -> None:
        """As asyncio's own server, which does not tell of connections before the end of their handshake."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peername = await loop.sock_accept(listening)
            except ConnectionError:  # the peer has gone already
                continue
            except OSError as exc:
                _log.warning("cannot accept connections: %s", exc)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection = ApiConnection(self)
            self.joined(connection, peername)
            connection.shake_hands(accepted, tls.context)

    def stop_listening(self) -> None:
        """Take no new connections, and close those that have no whole request."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        for connection in list(self._waiting):
            connection.abort()

    async def stop(self) -> None:
        """End what is left within about 2 * STOP_S."""
        self.stop_listening()
        try:
            async with asyncio.timeout(4 * STOP_S):
                await self._runner.cleanup()
        except TimeoutError:
            _log.warning("%d connections of the API did not end in time", len(self._connections))
        for connection in list(self._connections):
            connection.abort()
        await self.tasks.close()
        if self._timer is not None:
            self._timer.cancel()

    # what connections call

    def new_handler(self) -> web.RequestHandler:
        """aiohttp's protocol for one connection."""
        server: Callable[[], web.RequestHandler] | None = self._runner.server
        assert server is not None, "the runner is set up"
        return server()

    def joined(self, connection: ApiConnection, peername: object) -> None:
        """A peer has connected. If too many wait, the one that waits longest is closed."""
        connection.address = str(peername[0]) if isinstance(peername, tuple) else ""
        self._connections.add(connection)
        self.moved(connection, ConnectionPhase.HEAD)
        if len(self._waiting) > self.bounds.total:
            self._close_oldest()

    def moved(self, connection: ApiConnection, phase: ConnectionPhase) -> None:
        """The phase of a connection has changed, or more of its body has come."""
        if connection not in self._connections:
            return
        connection.phase = phase
        self._waiting.pop(connection, None)
        if phase is ConnectionPhase.RUNNING:
            return
        connection.since = self._clock()
        self._waiting[connection] = None
        if phase is ConnectionPhase.HEAD and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep)

    def left(self, connection: ApiConnection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    # the inside

    def _close_oldest(self) -> None:
        for connection in list(self._waiting):
            if connection.has_whole_request:  # its rest came while aiohttp held the reading
                self.moved(connection, ConnectionPhase.RUNNING)
                continue
            self._close(connection)
            break
        _log.warning("more than %d connections of the API wait for a request: closing the oldest", self.bounds.total)

    def _sweep(self) -> None:
        """Close the connections whose head takes too long, and those that one address has too many of."""
        now = self._clock()
        of_address: dict[str, list[ApiConnection]] = defaultdict(list)
        headless = [connection for connection in self._waiting if connection.phase is ConnectionPhase.HEAD]
        for connection in headless:
            if now - connection.since >= self.bounds.head_s:
                self._close(connection)
            elif now - connection.since >= BURST_S:
                of_address[connection.address].append(connection)
        for address, held in of_address.items():
            too_many = held[: max(0, len(held) - self.bounds.per_address)]
            for connection in too_many:
                self._close(connection)
            if too_many:
                _log.warning("%s has too many connections without a request: closing the oldest", address)
        again = any(connection.phase is ConnectionPhase.HEAD for connection in self._waiting)
        self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep) if again else None

    def _close(self, connection: ApiConnection) -> None:
        self._waiting.pop(connection, None)
        connection.abort()


@web.middleware
async def follow_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection of a request when its handler begins and ends; the outermost middleware."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, ApiConnection):
        return await handler(request)
    connection.began(request)
    try:
        return await handler(request)
    finally:
        connection.ended()
