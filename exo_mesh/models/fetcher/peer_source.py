"""Reads the files of a model from the file server of a peer (exo_mesh/models/file_server)."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import quoted
from exo_mesh.errors import FetchError, UnknownModelError
from exo_mesh.models.fetcher.source import ModelFiles, Sink, SourceError
from exo_mesh.models.fetcher.wire import Source, Tls
from exo_mesh.models.file_server.listing import Listing
from exo_mesh.models.file_server.messages import (
    MAX_LISTING_BYTES,
    MAX_WAIT_S,
    PRESENT_HEADER,
    WAIT_HEADER,
    path_of,
)
from exo_mesh.models.file_server.pace import CopyPace
from exo_mesh.models.file_server.tls import client_context
from exo_mesh.security.credentials import MESH_DNS_NAME, Credentials

CONNECT_S = 3.0
"""Time limit of connecting to one address."""

HANDSHAKE_S = 10.0
"""Time limit of the handshake. A peer that serves many others handles it only after one of their ranges."""

SILENCE_S = 30.0

WAIT_S = min(MAX_WAIT_S, SILENCE_S) * 2 / 3
"""How long the peer holds one request for bytes that are still arriving there."""

STALLED_S = 60.0
"""A peer at which no bytes of the model arrive for this long is dropped as a source of arriving bytes."""

REQUEST_BYTES = 32 * 2**20
"""Most bytes per request, so that a peer that serves many can alternate between them."""

_BUFFER_BYTES = 2**20
_MAX_REFUSAL_BYTES = 64 * 2**10
_MAX_IDLE = 8
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/[0-9]{1,18}")


def open_peer(
    source: Source,
    name: str,
    tls: Tls | None,
    *,
    digest: str = "",
    pace: CopyPace | None = None,
    stalled_s: float = STALLED_S,
) -> ModelFiles:
    """Opens the model `name` at a peer; it connects at the first read.

    tls: None on an open mesh. digest: of the card that the model must have; "": the version of the first answer. pace:
    shared by all sources of a process; while it is busy, reads use at most a quarter of the time. stalled_s: shorter in
    tests. Raises ValueError if the credentials cannot be used.
    """
    context = None if tls is None else client_context(_credentials(tls))
    return PeerFiles(source, name, context, digest, pace or CopyPace(), stalled_s)


class PeerFiles:
    """One model at one peer, over one connection per thread that reads."""

    def __init__(
        self, source: Source, name: str, context: ssl.SSLContext | None, digest: str, pace: CopyPace, stalled_s: float
    ) -> None:
        self.peer = source.peer
        self._is_arriving = source.is_arriving
        self._name = name
        self._digest = digest
        self._pace = pace
        self._stalled_s = stalled_s
        self._dialler = _Dialler(source, context)

    def listing(self) -> Listing:
        with self._asked(path_of(self._name), {}) as response:
            if response.status == HTTPStatus.NOT_FOUND:
                raise UnknownModelError(f"peer {self.peer} has no model {quoted(self._name)}", param="model")
            self._require(response, HTTPStatus.OK, "the listing")
            with self._translated():
                body = response.read(MAX_LISTING_BYTES)
        try:
            return msgspec.json.decode(body, type=Listing)
        except msgspec.DecodeError as exc:
            raise SourceError(f"peer {self.peer} sent a listing that cannot be read: {exc}") from exc

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(1, stop - start))))
        patience = _Patience(self._stalled_s)
        with self._pace.copying():
            while start < stop:
                most = self._pace.piece_bytes(REQUEST_BYTES)
                start = self._read_range(file, start, min(stop, start + most), buffer, sink, patience)

    def close(self) -> None:
        self._dialler.close()

    def _read_range(self, file: str, start: int, stop: int, buffer: memoryview, sink: Sink, patience: _Patience) -> int:
        """Reads some bytes from `start` on, and returns where they end."""
        began = monotonic()
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if self._is_arriving:
            headers[WAIT_HEADER] = f"{WAIT_S:g}"
        with self._asked(path_of(self._name, file), headers) as response:
            if response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._is_arriving:
                if patience.is_over(response.headers.get(PRESENT_HEADER, "")):
                    raise SourceError(f"peer {self.peer} has no byte {start} of {file}, and no more bytes arrive there")
                return start
            self._require(response, HTTPStatus.PARTIAL_CONTENT, f"{file} from byte {start} on")
            there = self._checked_range(response, start, stop)
            while start < there:
                with self._translated():
                    num_read = response.readinto(buffer[: there - start])
                if not num_read:
                    raise SourceError(f"peer {self.peer} closed the connection at byte {start} of {file}")
                took_s = monotonic() - began
                sink(buffer[:num_read])  # the sink may pause too, by its processor time
                start += num_read
                self._pace.rest(took_s, self._dialler.is_closed)
                began = monotonic()
        patience.renew()
        return there

    def _checked_range(self, response: http.client.HTTPResponse, start: int, stop: int) -> int:
        """Checks the range of an answer and returns where it ends."""
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        there = int(found[2]) + 1 if found else 0
        if not found or int(found[1]) != start or not start < there <= stop or response.length != there - start:
            raise SourceError(f"peer {self.peer} sent other bytes than requested")
        return there

    @contextlib.contextmanager
    def _asked(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and yields its answer. The connection is kept if the answer was read to its end."""
        if self._digest:
            headers = {**headers, "If-Match": f'"{self._digest}"'}
        with self._translated():
            connection, response = self._dialler.ask(path, headers)
        is_read = False
        try:
            if not self._digest and response.status < HTTPStatus.BAD_REQUEST:
                self._digest = response.headers.get("ETag", "").strip('"')
            yield response
            if response.status >= HTTPStatus.BAD_REQUEST:
                with self._translated():
                    response.read(_MAX_REFUSAL_BYTES)
            is_read = response.isclosed()
        finally:
            self._dialler.put_back(connection, keep=is_read)
            response.close()

    def _require(self, response: http.client.HTTPResponse, status: HTTPStatus, what: str) -> None:
        if response.status == status:
            return
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise SourceError(f"peer {self.peer} did not send {what}: HTTP {response.status}")
        if response.status == HTTPStatus.PRECONDITION_FAILED:
            raise FetchError(f"peer {self.peer} has another version of {self._name}", is_final=True)
        raise FetchError(f"peer {self.peer} does not have {what} of {self._name}")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translates errors of sockets into SourceError, or FetchError if the other end is not of this mesh."""
        try:
            yield
        except SourceError:
            raise
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as exc:
            raise SourceError(f"peer {self.peer} closed the connection") from exc
        except ssl.SSLError as exc:
            raise FetchError(f"peer {self.peer} is not a member of this mesh: {exc.reason}", is_final=True) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise SourceError(f"peer {self.peer} did not answer: {exc or type(exc).__name__}") from exc


class _Patience:
    """Decides how long to wait for bytes that are still arriving at a peer: as long as any byte arrives there."""

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._present = ""
        self.renew()

    def renew(self) -> None:
        self._end = monotonic() + self._stalled_s

    def is_over(self, present: str) -> bool:
        """Whether the wait is over. present: how many bytes the peer reports to have."""
        if present != self._present:
            self._present = present
            self.renew()
        return monotonic() > self._end


class _Dialler:
    """Keeps connections to a peer, at the first of its addresses that answers, and reuses them for later requests."""

    def __init__(self, source: Source, context: ssl.SSLContext | None) -> None:
        self._peer = source.peer
        self._urls = list(source.urls)
        self._context = context
        self._lock = threading.Lock()
        self._idle: list[_PeerConnection] = []
        self._in_use: set[_PeerConnection] = set()
        self.is_closed = threading.Event()

    def ask(self, path: str, headers: Mapping[str, str]) -> tuple[_PeerConnection, http.client.HTTPResponse]:
        """Sends a request. If a kept connection was closed by the peer, it sends the request again on a new one.

        Raises OSError and HTTPException.
        """
        kept = self._take()
        if kept:
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return kept, self._ask_on(kept, path, headers)  # RemoteDisconnected is a ConnectionError
        connection = self._dialled()
        return connection, self._ask_on(connection, path, headers)

    def put_back(self, connection: _PeerConnection, *, keep: bool) -> None:
        with self._lock:
            self._in_use.discard(connection)
            if keep and connection.sock and not self.is_closed.is_set() and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self.is_closed.set()
            for connection in self._in_use:
                connection.cut()
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> _PeerConnection | None:
        with self._lock:
            if not self._idle:
                return None
            connection = self._idle.pop()
            self._in_use.add(connection)
            return connection

    def _ask_on(self, connection: _PeerConnection, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse()
        except BaseException:
            self._forget(connection)
            raise

    def _dialled(self) -> _PeerConnection:
        """Connects to the first address that answers. Raises SourceError, and SSLError if only other meshes answer."""
        failures: list[OSError] = []
        for url in self._urls:
            if self.is_closed.is_set():
                break
            try:
                connection = _PeerConnection(url, self._context)
            except ValueError:
                continue  # not a URL of a file server
            with self._lock:
                self._in_use.add(connection)
            try:
                connection.connect()
            except OSError as exc:
                self._forget(connection)
                failures.append(exc)
                continue
            self._urls = sorted(self._urls, key=lambda other: other != url)
            return connection
        if failures and all(isinstance(exc, ssl.SSLError) for exc in failures):
            raise failures[-1]
        why = "; ".join(str(exc) or type(exc).__name__ for exc in failures) or "no address is known"
        raise SourceError(f"peer {self._peer} cannot be reached: {why}")

    def _forget(self, connection: _PeerConnection) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.close()


class _PeerConnection(http.client.HTTPConnection):
    """A connection to one address, with mutual TLS on a closed mesh."""

    def __init__(self, url: str, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if not parts.hostname or not parts.port:
            raise ValueError(f"{quoted(url)} has no host and port")
        super().__init__(parts.hostname, parts.port, timeout=CONNECT_S)
        self._context = context

    def connect(self) -> None:
        super().connect()
        if self._context is not None:
            self.sock.settimeout(HANDSHAKE_S)
            self.sock = self._context.wrap_socket(
                self.sock, server_hostname=MESH_DNS_NAME, do_handshake_on_connect=False
            )
            self.sock.do_handshake()
        self.sock.settimeout(SILENCE_S)

    def cut(self) -> None:
        """Ends a call on the socket that another thread makes."""
        if sock := self.sock:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _credentials(tls: Tls) -> Credentials:
    return Credentials(tls.authority.encode(), tls.certificate.encode(), tls.private_key.encode())
