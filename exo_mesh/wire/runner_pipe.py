"""The pipe between a node and its runner child: u32 little-endian length, then one protobuf message (runner.proto).

The node uses asyncio streams over one half of a socket pair, the runner the other half in a thread. End of file means
that the other side has ended; that is a result, not an error, so the functions that read return None for it. They skip
messages of a kind that only a newer version knows, and raise TransportError on a length above MAX_MESSAGE_BYTES, or if
the bytes are not a message of their type.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import (
    EnginePrepared,
    FromRunner,
    HopBroke,
    PlanChanged,
    RunnerFailed,
    RunnerListening,
    RunnerReady,
)
from exo_mesh.domain.stage import StageLoading
from exo_mesh.errors import TransportError
from exo_mesh.security.credentials import Credentials
from exo_mesh.wire.message_codec import UnionCodec
from exo_mesh.wire.proto import runner_pb2 as pb
from exo_mesh.wire.runner_commands import (
    ChangePlan,
    LinkNext,
    LinkRanks,
    OpenHop,
    Prepare,
    Pressure,
    StartStage,
    StopStage,
    ToRunner,
)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message. A StartStage carries a plan of a few KB; a length near this limit means garbage on the pipe."""

TO_RUNNER: UnionCodec[ToRunner, pb.ToRunner] = UnionCodec(
    pb.ToRunner,
    prepare=Prepare,
    start=StartStage,
    link=LinkNext,
    ranks=LinkRanks,
    open_hop=OpenHop,
    change=ChangePlan,
    tls=Credentials,
    pressure=Pressure,
    stop=StopStage,
)
FROM_RUNNER: UnionCodec[FromRunner, pb.FromRunner] = UnionCodec(
    pb.FromRunner,
    prepared=EnginePrepared,
    loading=StageLoading,
    listening=RunnerListening,
    ready=RunnerReady,
    heartbeat=Heartbeat,
    changed=PlanChanged,
    hop_lost=HopBroke,
    failed=RunnerFailed,
)

_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(node's end, runner's end). The runner's end is inheritable only through `pass_fds`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


async def open_pipe(end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Wrap one end of the pair in asyncio streams; the writer then owns the socket."""
    end.setblocking(False)
    return await asyncio.open_unix_connection(sock=end)


async def read_report(reader: asyncio.StreamReader) -> FromRunner | None:
    """The next report, or None if the runner is gone, even in the middle of a message."""
    while True:
        try:
            length = _length(await reader.readexactly(_LENGTH.size))
            payload = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if (report := _value(payload, FROM_RUNNER)) is not None:
            return report


async def write_command(writer: asyncio.StreamWriter, command: ToRunner) -> None:
    """Write one command and wait until the buffer has drained. Raises TransportError if the runner is gone."""
    # One write call, so that parts of messages of two writing tasks cannot interleave.
    writer.write(_framed(TO_RUNNER.write(command)))
    try:
        await writer.drain()
    except ConnectionError as exc:
        raise TransportError("the other end of the runner pipe is gone") from exc


def receive_command(pipe: socket.socket) -> ToRunner | None:
    """The next command, or None if the node is gone. Blocks for at most the socket's timeout."""
    while (header := _receive_exactly(pipe, _LENGTH.size)) is not None:
        payload = _receive_exactly(pipe, _length(header))
        if payload is None:
            return None
        if (command := _value(payload, TO_RUNNER)) is not None:
            return command
    return None


def send_report(pipe: socket.socket, report: FromRunner) -> None:
    """Send one report. Raises TransportError if the node is gone."""
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


def _length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise TransportError(f"the runner pipe announces a message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
    return int(length)


def _value(payload: bytes, codec: UnionCodec[_T, _M]) -> _T | None:
    message = codec.message()
    try:
        message.ParseFromString(payload)
    except DecodeError as exc:
        name = type(message).__name__
        raise TransportError(f"{len(payload)} bytes on the runner pipe are not a {name}") from exc
    return codec.read(message)
