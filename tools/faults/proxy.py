"""A TCP proxy between the nodes of a mesh on one machine, without root: it delays, throttles, holds and cuts
connections.

Every node connects to its peers through its own port, which gRPC reads from the variable `grpc_proxy` (HTTP CONNECT);
its runners do too. So the proxy knows the caller of each connection. The address identifies the callee, because every
node has its own loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Way = tuple[int, int]
"""(from node, to node): the bytes that the first sends to the second, whichever of them connected."""

PIECE = 65536
MAX_PIECES = 64
"""Most pieces that one direction of a connection holds back; then its sender waits, as on a full link."""


@dataclass(slots=True)
class Wire:
    """The state of one direction between two nodes. `open` clear: bytes are held until it is set again, like packets
    that are retransmitted; new connections wait meanwhile."""

    open: asyncio.Event
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    moved: int = 0
    ring_bytes: int = 0
    """Of these, the bytes to and from runners."""
    awaited: list[tuple[int, threading.Event]] = field(default_factory=list)
    """(ring_bytes, the event to set when they are reached)."""

    def count(self, num_bytes: int, data: bool) -> None:
        self.moved += num_bytes
        self.ring_bytes += num_bytes * data
        for wanted, event in self.awaited:
            if self.ring_bytes >= wanted:
                event.set()
        self.awaited = [one for one in self.awaited if not one[1].is_set()]


@dataclass(eq=False, slots=True)
class Connection:
    """One connection. caller, callee: numbers of nodes. data: to a runner instead of a node."""

    caller: int
    callee: int
    data: bool
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    deaf: bool = False
    """The callee is gone, and the caller was not notified."""


@dataclass(slots=True)
class Sockets:
    """The open sockets of the proxy, to be closed at its end."""

    servers: list[asyncio.Server] = field(default_factory=list)
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class FaultProxy:
    """The proxy, in a thread of its own. Methods may be called from any other thread, and return when they have taken
    effect.

    number_of: the node with an address, None if no node has it; address_of: the reverse. is_node: whether "host:port"
    is a node's control endpoint rather than a runner's.
    """

    def __init__(
        self,
        number_of: Callable[[str], int | None],
        address_of: Callable[[int], str],
        is_node: Callable[[str], bool],
    ) -> None:
        self._number_of = number_of
        self._address_of = address_of
        self._is_node = is_node
        self._loop = asyncio.new_event_loop()
        self._wires: dict[Way, Wire] = defaultdict(_open_wire)
        self._sockets = Sockets()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._thread.start()

    def listen_for(self, caller: int) -> str:
        """Returns the address through which one node must reach all others, for its `grpc_proxy`."""

        async def listen() -> str:
            server = await asyncio.start_server(lambda r, w: self._serve(caller, r, w), "127.0.0.1", 0)
            self._sockets.servers.append(server)
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)

    def shape(self, *ways: Way, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Sets the delay of each message on these links, and the bytes per second (0: unlimited)."""

        def shape() -> None:
            for way in ways:
                self._wires[way].delay_s, self._wires[way].bytes_per_s = delay_s, bytes_per_s

        self._do(shape)

    def hold(self, *ways: Way) -> None:
        """Holds all bytes on these links without notice, as if packets were lost. Both links of a pair make a black
        hole."""

        def hold() -> None:
            for way in ways:
                self._wires[way].open.clear()

        self._do(hold)

    def release(self, *ways: Way) -> None:
        """Releases held bytes; without an argument on all links."""

        def release() -> None:
            for way, wire in self._wires.items():
                if not ways or way in ways:
                    wire.open.set()

        self._do(release)

    def reset(self, one: int, other: int) -> int:
        """Resets every connection between two nodes at both ends; returns their number."""

        def reset() -> int:
            found = [each for each in self._sockets.connections if {each.caller, each.callee} == {one, other}]
            for each in found:
                _reset(each.near)
                _reset(each.far)
            self._sockets.connections.difference_update(found)
            return len(found)

        return self._do(reset)

    def half_open(self, caller: int, callee: int) -> int:
        """Resets the callee's ends of a caller's connections; the caller is not notified."""

        def forget() -> int:
            found = [one for one in self._sockets.connections if (one.caller, one.callee) == (caller, callee)]
            for one in found:
                one.deaf = True
                _reset(one.far)
            return len(found)

        return self._do(forget)

    def when_passed(self, way: Way, num_bytes: int) -> threading.Event:
        """Returns an event that is set once this many further bytes have passed on this link to or from runners."""
        event = threading.Event()

        def expect() -> None:
            wire = self._wires[way]
            wire.awaited.append((wire.ring_bytes + num_bytes, event))

        self._do(expect)
        return event

    def connections(self) -> list[Way]:
        """Returns (caller, callee) of every open connection."""
        return self._do(lambda: [(one.caller, one.callee) for one in self._sockets.connections])

    def close(self) -> None:
        async def close() -> None:
            for server in self._sockets.servers:
                server.close()
            tasks = list(self._sockets.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # internals, in the thread of the loop

    def _do(self, action: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except Exception as exc:  # noqa: BLE001 - the caller gets it
                done.set_exception(exc)

        self._loop.call_soon_threadsafe(run)
        return done.result(10)

    async def _serve(self, caller: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sockets.tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._connect(caller, reader, writer)
        finally:
            self._sockets.tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, caller: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        target = head.split()[1].decode()
        host, _, port = target.rpartition(":")
        callee = self._number_of(host)
        if callee is None:
            writer.write(b"HTTP/1.1 502 nobody is there\r\n\r\n")
            await writer.drain()
            return
        there, back = self._wires[(caller, callee)], self._wires[(callee, caller)]
        while not (there.open.is_set() and back.open.is_set()):  # a SYN is retransmitted until both links are open
            if not await _open_before_the_caller_hangs_up(reader, there, back):
                return
        try:
            own = (self._address_of(caller), 0)  # so that the callee sees the caller
            up_reader, up_writer = await asyncio.open_connection(host, int(port), local_addr=own)
        except OSError:
            _reset(writer)
            return
        connection = Connection(caller, callee, not self._is_node(target), writer, up_writer)
        self._sockets.connections.add(connection)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            to_the_callee = asyncio.create_task(self._pass_on(connection, reader, up_writer, there))
            to_the_caller = asyncio.create_task(self._pass_on(connection, up_reader, writer, back))
            await _both(to_the_callee, to_the_caller)
        finally:
            self._sockets.connections.discard(connection)
            up_writer.transport.abort()

    async def _pass_on(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire
    ) -> None:
        """Forwards the bytes of one direction, each at its time, until their sender ends."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_PIECES)
        sending = asyncio.create_task(_send(pieces, writer, wire, connection))
        free_at, end = 0.0, _close
        try:
            while piece := await reader.read(PIECE):
                now = self._loop.time()
                wire.count(len(piece), connection.data)
                free_at = max(now, free_at) + (len(piece) / wire.bytes_per_s if wire.bytes_per_s else 0.0)
                await pieces.put((free_at + wire.delay_s, piece))
            await pieces.put((self._loop.time() + wire.delay_s, b""))
            await sending
        except ConnectionError:
            end = _reset
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if connection.deaf and writer is connection.near:
            await asyncio.Event().wait()  # until the proxy ends, because the caller must not be notified
        end(writer)


def _open_wire() -> Wire:
    event = asyncio.Event()
    event.set()
    return Wire(event)


async def _send(
    pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, wire: Wire, connection: Connection
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, piece = await pieces.get()
        if (early_s := due - loop.time()) > 0:
            await asyncio.sleep(early_s)
        await wire.open.wait()
        if not piece:
            return
        if connection.deaf or writer.is_closing():
            continue
        with contextlib.suppress(ConnectionError):
            writer.write(piece)
            await writer.drain()


async def _open_before_the_caller_hangs_up(reader: asyncio.StreamReader, *wires: Wire) -> bool:
    """Waits until all links are open; False if the caller disconnects first. It sends nothing before it is
    connected."""
    hung_up = asyncio.ensure_future(reader.read(1))
    opened = asyncio.gather(*(wire.open.wait() for wire in wires))
    parts: list[asyncio.Future[Any]] = [hung_up, opened]
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        return not hung_up.done()
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def _both(to_the_callee: asyncio.Task[None], to_the_caller: asyncio.Task[None]) -> None:
    """Waits until both directions have ended. If the caller disconnects, the other direction ends too."""
    try:
        await to_the_callee
        await asyncio.wait({to_the_caller}, timeout=1.0)
    finally:
        for task in (to_the_callee, to_the_caller):
            task.cancel()
        await asyncio.gather(to_the_callee, to_the_caller, return_exceptions=True)


def _close(writer: asyncio.StreamWriter) -> None:
    """Ends a connection after bytes in transit have arrived."""
    writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection by RST; bytes in transit are lost."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def pairs(nodes: list[int]) -> Iterator[Way]:
    """Lists every link between different nodes."""
    return ((one, other) for one in nodes for other in nodes if one != other)
