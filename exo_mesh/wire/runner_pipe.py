"""The pipe between a node and its runner child: u32 little-endian length, then one protobuf message (runner.proto).

Both ends use asyncio streams over one half of a socket pair. End of file means that the other side has ended; that is a
result, not an error, so the functions that read return None for it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from exo_mesh.domain.runner.reports import FromRunner
from exo_mesh.errors import TransportError
from exo_mesh.wire.proto import runner_pb2 as pb
from exo_mesh.wire.runner_codec import FROM_RUNNER

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message. A StartStage carries a plan of a few KB; a length near this limit means garbage on the pipe."""

_LENGTH = struct.Struct("<I")
_M = TypeVar("_M", bound=Message)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(node's end, runner's end). The runner's end is inheritable only through `pass_fds`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


async def open_pipe(end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Wrap one end of the pair in asyncio streams; the writer then owns the socket."""
    end.setblocking(False)
    return await asyncio.open_unix_connection(sock=end)


async def read_report(reader: asyncio.StreamReader) -> FromRunner | None:
    """The next report, or None if the runner is gone, even in the middle of a message. Reports of a kind that only a
    newer version knows are skipped.

    Raises TransportError on a length above MAX_MESSAGE_BYTES, or if the bytes are no report.
    """
    while (payload := await _read(reader)) is not None:
        if (report := FROM_RUNNER.read(_parsed(payload, pb.FromRunner))) is not None:
            return report
    return None


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise TransportError(
                f"the runner pipe announces a message of {length} bytes, more than {MAX_MESSAGE_BYTES}"
            )
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write one message and wait until the buffer has drained. Raises TransportError if the other side is gone."""
    # One write call, so that parts of messages of two writing tasks cannot interleave.
    writer.write(_framed(message))
    try:
        await writer.drain()
    except ConnectionError as exc:
        raise TransportError("the other end of the runner pipe is gone") from exc


def receive_message(pipe: socket.socket, cls: type[_M]) -> _M | None:
    """The next message, for a thread: blocks for at most the socket's timeout. None if the other side is gone."""
    header = _receive_exactly(pipe, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise TransportError(f"the runner pipe announces a message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
    payload = _receive_exactly(pipe, length)
    return None if payload is None else _parsed(payload, cls)


def send_report(pipe: socket.socket, report: FromRunner) -> None:
    """Send the node a report, from a thread. Raises TransportError if the node is gone."""
    try:
        pipe.sendall(_framed(FROM_RUNNER.write(report)))
    except OSError as exc:
        raise TransportError("the other end of the runner pipe is gone") from exc


def _receive_exactly(pipe: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        try:
            piece = pipe.recv(size - len(received))
        except (ConnectionError, TimeoutError):
            return None
        if not piece:
            return None
        received += piece
    return bytes(received)


def _framed(message: Message) -> bytes:
    payload = message.SerializeToString()
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TransportError(f"a {type(message).__name__} of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def _parsed(payload: bytes, cls: type[_M]) -> _M:
    message = cls()
    try:
        message.ParseFromString(payload)
    except DecodeError as exc:
        raise TransportError(f"{len(payload)} bytes on the runner pipe are not a {cls.__name__}") from exc
    return message
