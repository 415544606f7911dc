"""Reads the requests of one connection of the file server and answers them, one after the other."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from http import HTTPStatus

import msgspec

from exo_mesh.base.clock import monotonic
from exo_mesh.errors import ModelError
from exo_mesh.models.file_server.connections import HEAD_S, IDLE_S, FileConnection, FileConnections
from exo_mesh.models.file_server.messages import PRESENT_HEADER
from exo_mesh.models.file_server.offered import OfferedFile, OfferedModel, OfferedModels
from exo_mesh.models.file_server.pace import CopyPace
from exo_mesh.models.file_server.requests import (
    END_OF_HEAD,
    MAX_HEAD_BYTES,
    FileRequest,
    RefusedRequestError,
    parse_head,
)
from exo_mesh.models.file_server.sending import PIECE_S, send_span

LOOK_EVERY_S = 0.1
"""How often a waiting request checks whether its bytes have arrived."""

_log = logging.getLogger(__name__)


class Answerer:
    """Answers the requests of all connections, until `stopping` is set. head_s, idle_s: time limits, shorter in
    tests."""

    def __init__(
        self,
        offered: OfferedModels,
        connections: FileConnections,
        pace: CopyPace,
        stopping: threading.Event,
        *,
        head_s: float = HEAD_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._offered = offered
        self._connections = connections
        self._pace = pace
        self._head_s = head_s
        self._idle_s = idle_s
        self._stopping = stopping

    def serve(self, connection: FileConnection) -> None:
        """Serves a connection until it ends, in a thread of its own."""
        try:
            connection.sock.settimeout(self._head_s)
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            self._answer_all(connection)
        except (OSError, EOFError) as exc:
            _log.debug("a connection of a peer ended: %s", exc)
        finally:
            self._connections.leave(connection)
            connection.sock.close()

    def _answer_all(self, connection: FileConnection) -> None:
        rest = b""
        is_open = True
        while is_open:
            head, rest = self._read_head(connection, rest)
            if not self._connections.begin(connection):
                return
            try:
                request = parse_head(head)
                self._answer(connection.sock, request)
                is_open = request.keeps
            except RefusedRequestError as refusal:
                _say(connection.sock, refusal.status, str(refusal))
                is_open = False  # the rest might be the body of a request that this server does not support
            is_open = self._connections.rest(connection) and is_open

    def _read_head(self, connection: FileConnection, rest: bytes) -> tuple[bytes, bytes]:
        """Returns (head, bytes after it). Raises OSError, and EOFError at the regular end of a connection."""
        end = monotonic() + (self._idle_s if connection.is_proven else self._head_s)
        has_begun = bool(rest)
        while END_OF_HEAD not in rest:
            if len(rest) > MAX_HEAD_BYTES:
                raise OSError(f"the head of a request is larger than {MAX_HEAD_BYTES} bytes")
            connection.sock.settimeout(max(0.001, end - monotonic()))
            piece = connection.sock.recv(MAX_HEAD_BYTES)
            if not piece:
                raise EOFError("the peer closed the connection")
            if not has_begun:
                has_begun, end = True, monotonic() + self._head_s
            rest += piece
        head, _, rest = rest.partition(END_OF_HEAD)
        return head, rest

    def _answer(self, sock: socket.socket, request: FileRequest) -> None:
        model = self._offered.find(request.model)
        if model is None:
            _say(sock, HTTPStatus.NOT_FOUND, "this peer has no such model")
        elif request.if_match not in ("", model.digest):
            _say(sock, HTTPStatus.PRECONDITION_FAILED, "this peer has another version of the model", _etag(model))
        elif not request.file:
            listing = msgspec.json.encode(model.listing())
            _send(sock, HTTPStatus.OK, listing, "application/json", _etag(model))
        elif file := model.file(request.file):
            self._answer_file(sock, request, model, file)
        else:
            _say(sock, HTTPStatus.NOT_FOUND, "the model has no such file", _etag(model))

    def _answer_file(self, sock: socket.socket, request: FileRequest, model: OfferedModel, file: OfferedFile) -> None:
        whole = (0, file.size)
        wanted = (request.start, min(file.size, file.size if request.stop is None else request.stop))
        span = whole if wanted == whole == (0, 0) else file.available(*wanted)
        if span is None and request.start < file.size and request.wait_s:
            model, file, span = self._wait(sock, request, model, file)
        if span is None or (not request.has_range and span != whole):
            there = {"Content-Range": f"bytes */{file.size}", PRESENT_HEADER: str(model.present_bytes)}
            _say(sock, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "these bytes are missing here", _etag(model) | there)
            return
        try:
            stream = file.open()
        except (ModelError, OSError):
            _say(sock, HTTPStatus.NOT_FOUND, "the model has no such file", _etag(model))
            return
        start, stop = span
        status, headers = HTTPStatus.OK, _etag(model)
        if request.has_range:
            status, headers = HTTPStatus.PARTIAL_CONTENT, headers | {"Content-Range": _shown(start, stop, file.size)}
        with stream:
            _send_head(sock, status, stop - start, "application/octet-stream", headers)
            send_span(sock, stream, start, stop, self._pace, self._stopping)

    def _wait(
        self, sock: socket.socket, request: FileRequest, model: OfferedModel, file: OfferedFile
    ) -> tuple[OfferedModel, OfferedFile, tuple[int, int] | None]:
        """Waits until the first requested byte has arrived, the time is over, or new connections need the place."""
        end = monotonic() + request.wait_s
        span = None
        while span is None and monotonic() < end and not self._connections.is_crowded and not _says_more(sock):
            found = self._offered.find(request.model)
            now = found.file(request.file) if found and found.digest == model.digest else None
            if not found or not now:
                break
            model, file = found, now
            span = file.available(request.start, min(file.size, file.size if request.stop is None else request.stop))
        return model, file, span


def _says_more(sock: socket.socket) -> bool:
    """Waits LOOK_EVERY_S. Returns whether the peer closed the connection meanwhile, or sent unexpected bytes."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(LOOK_EVERY_S * 1e3))


def _shown(start: int, stop: int, size: int) -> str:
    return f"bytes {start}-{stop - 1}/{size}"


def _etag(model: OfferedModel) -> dict[str, str]:
    return {"ETag": f'"{model.digest}"'}


def _say(sock: socket.socket, status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> None:
    _send(sock, status, message.encode(), "text/plain", headers or {})


def _send(sock: socket.socket, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str]) -> None:
    _send_head(sock, status, len(body), kind, headers)
    sock.settimeout(PIECE_S)
    sock.sendall(body)


def _send_head(sock: socket.socket, status: HTTPStatus, length: int, kind: str, headers: dict[str, str]) -> None:
    fields = {"Content-Type": kind, "Content-Length": str(length), **headers}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    sock.settimeout(PIECE_S)
    sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
