"""Sends bytes of a file over a socket: by sendfile on a plain connection, else read and encrypted here."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import ssl
import threading
from typing import BinaryIO

from exo_mesh.base.clock import monotonic
from exo_mesh.models.file_server.pace import CopyPace

PIECE_BYTES = 4 * 2**20
"""Bytes per sendfile call; the pace is applied between two pieces."""

TLS_PIECE_BYTES = 256 * 1024
"""Bytes per piece in memory, for each connection that sends."""

LEAST_BYTES = 256 * 1024
PIECE_S = 30.0
"""A peer that does not accept LEAST_BYTES within this time is dropped."""

NOT_SENT_BYTES = 128 * 1024
"""Bytes that the system may buffer unsent while streams run. With more, the time for a piece would not show the speed
of the network, and the network would go on sending during a pause. While no streams run there is no limit, because a
copy would take twice as long with it."""

_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 0x201 if os.uname().sysname == "Darwin" else 25)


def send_span(
    sock: socket.socket, file: BinaryIO, start: int, stop: int, pace: CopyPace, stopping: threading.Event
) -> None:
    """Sends the bytes `[start, stop)`. Raises OSError: of the socket, or if the file is shorter."""
    is_encrypted = isinstance(sock, ssl.SSLSocket)
    send, most = (_send_encrypted, TLS_PIECE_BYTES) if is_encrypted else (_send_file, PIECE_BYTES)
    buffer = memoryview(bytearray(TLS_PIECE_BYTES if is_encrypted else 0))
    was_busy = False
    with pace.copying():
        while start < stop:
            began, is_busy = monotonic(), pace.is_busy
            if is_busy != was_busy:
                _limit_unsent(sock, NOT_SENT_BYTES if is_busy else 0)
                was_busy = is_busy
            piece_stop = min(stop, start + pace.piece_bytes(most))
            send(sock, file, start, piece_stop, buffer)
            start = piece_stop
            pace.rest(monotonic() - began, stopping)
    if was_busy:
        _limit_unsent(sock, 0)


def _limit_unsent(sock: socket.socket, num_bytes: int) -> None:
    """Sets the limit; 0 restores the system's own."""
    with contextlib.suppress(OSError):  # systems without the option only keep the pace less exactly
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, num_bytes)


def _send_encrypted(sock: socket.socket, file: BinaryIO, start: int, stop: int, buffer: memoryview) -> None:
    sock.settimeout(PIECE_S)
    raw = io.FileIO(file.fileno(), closefd=False)
    raw.seek(start)
    while start < stop:
        num_read = raw.readinto(buffer[: stop - start])
        _require(num_read)
        sock.sendall(buffer[:num_read])
        start += num_read


def _send_file(sock: socket.socket, file: BinaryIO, start: int, stop: int, _: memoryview) -> None:
    end, next_mark = monotonic() + PIECE_S, start + LEAST_BYTES
    sock.settimeout(0)
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while start < stop:
        try:
            num_sent = os.sendfile(sock.fileno(), file.fileno(), start, stop - start)
        except BlockingIOError:
            if not poller.poll(max(0.0, end - monotonic()) * 1e3):
                raise TimeoutError("the peer accepts no more bytes") from None
            continue
        _require(num_sent)
        start += num_sent
        if start >= next_mark:
            end, next_mark = monotonic() + PIECE_S, start + LEAST_BYTES


def _require(num_bytes: int) -> None:
    if not num_bytes:
        raise OSError("the file is shorter than its manifest says")
