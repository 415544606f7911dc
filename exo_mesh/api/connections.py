"""Serves the HTTP API on a socket, and limits the connections that have not sent a whole request.

aiohttp has no deadline for the head of a request and no limit on connections, so 1,100 sockets with half a head each
used up all files that a process may open. Each connection passes through an ApiConnection, which knows whether the
client has sent a whole request. Only connections without a whole request are counted and closed, never streams and
running requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from exo_mesh.api.body import take_expectations
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import TaskOwner, Turns
from exo_mesh.security.api_tls import ApiTls

HEAD_S = 15.0
"""Time limit for the head of a request, which is a few kilobytes; nginx allows 60 s and Apache 20 s."""

MAX_PER_ADDRESS = 64
MAX_WAITING, MAX_WAITING_TLS = 1024, 128
"""Most connections without a whole request. One with half a head takes about 15 kB, one with TLS 60 kB, so at this
limit a flood adds at most 50 % to the memory of an idle node (measured by tests/security/test_half_open.py)."""

MOST_BEGUN_A_ROUND = 2
"""Requests with a body that begin in one round of the event loop; each takes about half a millisecond until it first
waits. So a thousand that come together leave time for others, such as /healthz, in between."""

_WITH_BODY = b"POST "

SEND_BUFFER_BYTES = 256 * 1024
"""Most bytes of an answer that the kernel buffers while its client does not read; the default would be 4 MiB."""

READ_BYTES = 1 << 16
"""Most bytes that are read from a connection at a time; asyncio would read four times as many. So little of a body is
in memory while it waits for its turn."""

BURST_S = 1.0
"""The limit per address ignores connections younger than this, because a load test opens hundreds before it sends."""

SWEEP_EVERY_S = 1.0
SHUTDOWN_S = 1.0
"""Time limit for the TLS shutdown; asyncio would hold the connection for 30 s."""

ACCEPT_AGAIN_S = 1.0
"""Pause after the system refused to open a file; the same as asyncio's."""

STOP_S = 0.4
"""How long a request may continue after the server stops, and how long its handler may take to react to cancellation.
The node has already ended all requests by then, so only their last bytes remain to be sent."""

_log = logging.getLogger(__name__)


class ConnectionBounds(msgspec.Struct, frozen=True):
    """Limits for connections without a whole request. head_s: seconds for the TLS handshake, and for the head of a
    request. per_address: connections of one address that are older than BURST_S and have no whole head. total: all
    connections without a whole request, including idle ones between two requests."""

    head_s: float = HEAD_S
    per_address: int = MAX_PER_ADDRESS
    total: int = MAX_WAITING

    @classmethod
    def within(cls, max_open_files: int, *, tls: bool = False) -> ConnectionBounds:
        """Limits for a process that may open max_open_files files: connections may use at most half of them."""
        return cls(total=max(1, min(MAX_WAITING_TLS if tls else MAX_WAITING, max_open_files // 2)))


class ConnectionPhase(Enum):
    """The phase of a connection, which decides the limits that apply to it."""

    HEAD = "the client has connected, but has not sent a whole head"
    HELD = "the first bytes of a request have arrived, and wait for their turn"
    BODY = "the head has arrived, but not the whole body"
    RUNNING = "a whole request is being answered"
    IDLE = "the last request was answered, and nothing has arrived since"


class ApiConnection(asyncio.BufferedProtocol):
    """One connection: passes everything to aiohttp's handler and tracks the phase. The handler is made when the first
    bytes arrive, so a connection that never sends anything costs none."""

    # fmt: off
    __slots__ = (
        "_early", "_handler", "_handshake", "_held", "_request", "_server", "_transport", "address", "phase", "since",
    )
    # fmt: on

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._handler: web.RequestHandler | None = None
        self._transport: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None
        self._early = False
        self._held = b""
        self._handshake: asyncio.Task[None] | None = None
        self.phase = ConnectionPhase.HEAD
        self.since = 0.0
        self.address = ""

    def shake_hands(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """Start TLS on an accepted connection; `connection_made` is called at the end of the handshake."""
        self._handshake = self._server.tasks.start(self._shake_hands(accepted, context), "TLS handshake")

    async def _shake_hands(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        loop, head_s = asyncio.get_running_loop(), self._server.bounds.head_s
        try:
            await loop.connect_accepted_socket(
                lambda: self, accepted, ssl=context, ssl_handshake_timeout=head_s, ssl_shutdown_timeout=SHUTDOWN_S
            )
        except OSError as exc:  # the client speaks no TLS, does not trust the certificate, or is too slow
            _log.debug("TLS handshake with %s failed: %s", self.address, exc)
        finally:
            self._handshake = None
            if self._transport is None:
                accepted.close()
                self._server.left(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._server.tls is None:
            self._server.joined(self, transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go. All connections share it, because the loop fills it and calls `buffer_updated` at
        once."""
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._server.buffer[:nbytes])
        if self.phase is ConnectionPhase.IDLE:
            self._server.moved(self, ConnectionPhase.HEAD)
        elif self.phase is ConnectionPhase.RUNNING:
            self._early = True  # the next request begins before the answer has ended
        if self.phase is ConnectionPhase.HEAD and data.startswith(_WITH_BODY):
            self._held = data
            self._server.moved(self, ConnectionPhase.HELD)
            cast(asyncio.Transport, self._transport).pause_reading()
            self._server.turns.call(self._begin)
        else:
            self._pass_on(data)

    def _begin(self) -> bool:
        """Pass on the bytes that were held until the turn of this connection; False if it is closed."""
        data, self._held = self._held, b""
        transport = cast(asyncio.Transport, self._transport)
        if transport.is_closing():
            return False
        self._server.moved(self, ConnectionPhase.HEAD)
        transport.resume_reading()
        self._pass_on(data)
        return True

    def _pass_on(self, data: bytes) -> None:
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
        """Note that a head is complete and the handler of its route begins."""
        self._request = request
        self._early = False
        self._server.moved(self, ConnectionPhase.RUNNING if self.has_whole_request else ConnectionPhase.BODY)

    def ended(self) -> None:
        """Note that the route has answered. Data that arrived during the answer begins the next request."""
        self._request = None
        self._server.moved(self, ConnectionPhase.HEAD if self._early else ConnectionPhase.IDLE)

    def abort(self) -> None:
        """Close the connection at once; unsent data is lost."""
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    # events of the transport, passed on to aiohttp

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
    """Runs an application on listening sockets: start, stop_listening, stop. tls: serve HTTPS."""

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
        self.turns = Turns(MOST_BEGUN_A_ROUND)
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._servers: list[asyncio.Server] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[ApiConnection] = set()
        self._waiting: dict[ApiConnection, None] = {}  # connections without a whole request, longest waiting first
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, *listening: socket.socket) -> None:
        """Serve on listening sockets."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "the runner is set up"
        server.request_handler = take_expectations(server.request_handler)
        if self.tls is not None:
            self.tasks.keep(self.tls.keep, "TLS certificate")
        for one in listening:
            await self._listen(one)

    async def _listen(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        if self.tls is not None:
            self._accepting.append(self.tasks.start(self._accept(listening, self.tls), "accept"))
            return
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(lambda: ApiConnection(self), sock=listening, backlog=1024))

    async def _accept(self, listening: socket.socket, tls: ApiTls) -> None:
        """Accept connections. asyncio's own server would report a connection only after its TLS handshake."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peername = await loop.sock_accept(listening)
            except ConnectionError:  # the client has already gone
                continue
            except OSError as exc:
                _log.warning("the API cannot accept connections: %s", exc)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection = ApiConnection(self)
            self.joined(connection, peername)
            connection.shake_hands(accepted, tls.context)

    def stop_listening(self) -> None:
        """Accept no new connections, and close those without a whole request."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for accepting in self._accepting:
            accepting.cancel()
        self._accepting.clear()
        for connection in list(self._waiting):
            connection.abort()

    async def stop(self) -> None:
        """End all connections, within about 2 * STOP_S."""
        self.stop_listening()
        try:
            async with asyncio.timeout(4 * STOP_S):
                await self._runner.cleanup()
        except TimeoutError:
            _log.warning("closing %d API connections that did not end in time", len(self._connections))
        for connection in list(self._connections):
            connection.abort()
        await self.tasks.close()
        if self._timer is not None:
            self._timer.cancel()

    # called by connections

    def new_handler(self) -> web.RequestHandler:
        """aiohttp's protocol for one connection."""
        server: Callable[[], web.RequestHandler] | None = self._runner.server
        assert server is not None, "the runner is set up"
        return server()

    def joined(self, connection: ApiConnection, peername: object) -> None:
        """Count a new connection. If too many connections wait, the longest waiting connection is closed."""
        connection.address = str(peername[0]) if isinstance(peername, tuple) else ""
        self._connections.add(connection)
        self.moved(connection, ConnectionPhase.HEAD)
        if len(self._waiting) > self.bounds.total:
            self._close_oldest()

    def moved(self, connection: ApiConnection, phase: ConnectionPhase) -> None:
        """Note that the phase of a connection has changed, or that more of its body has arrived."""
        if connection not in self._connections:  # it was closed in the meantime
            return
        connection.phase = phase
        self._waiting.pop(connection, None)
        if phase in (ConnectionPhase.RUNNING, ConnectionPhase.HELD):
            return
        connection.since = self._clock()
        self._waiting[connection] = None
        if phase is ConnectionPhase.HEAD and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep)

    def left(self, connection: ApiConnection) -> None:
        """Forget a closed connection."""
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    # private methods

    def _close_oldest(self) -> None:
        for connection in list(self._waiting):
            if connection.has_whole_request:  # the rest arrived while aiohttp had paused reading
                self.moved(connection, ConnectionPhase.RUNNING)
                continue
            self._close(connection)
            break
        _log.warning("more than %d API connections have sent no whole request: closed the oldest", self.bounds.total)

    def _sweep(self) -> None:
        """Close the connections whose head takes too long, and the oldest ones of an address that has too many."""
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
                _log.warning(
                    "%s has too many connections without a request: closed the %d oldest", address, len(too_many)
                )
        again = any(connection.phase is ConnectionPhase.HEAD for connection in self._waiting)
        self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep) if again else None

    def _close(self, connection: ApiConnection) -> None:
        self._waiting.pop(connection, None)
        connection.abort()


@web.middleware
async def follow_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: notifies the connection of a request when the handler begins and ends."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, ApiConnection):
        return await handler(request)
    connection.began(request)
    try:
        return await handler(request)
    finally:
        connection.ended()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; port 0 means any free port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        bound.bind(address)
        bound.listen(1024)  # with SO_REUSEADDR this call can fail, too, if another process listens here
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
