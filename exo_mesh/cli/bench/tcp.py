"""The baseline of `bench ring`: blocking TCP in Python between two processes, TCP_NODELAY, lengths known to both."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

SOCKET_DEADLINE_S = 30.0


@contextlib.contextmanager
def echo_peer(cpus: tuple[int, int] | None) -> Iterator[socket.socket]:
    """Starts a child process that runs `serve`, and connects to it. cpus: pins this process and the child to one
    each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SOCKET_DEADLINE_S)
        command = [sys.executable, "-m", "exo_mesh.cli.bench.tcp", str(server.getsockname()[1])]
        child = subprocess.Popen(command)
        before = os.sched_getaffinity(0) if cpus else set()
        try:
            connection, _ = server.accept()
            if cpus:
                os.sched_setaffinity(0, {cpus[0]})
                os.sched_setaffinity(child.pid, {cpus[1]})
            _prepare(connection)
            with connection:
                yield connection
        finally:
            if cpus:
                os.sched_setaffinity(0, before)
            child.kill()
            child.wait()


def ping_pong(connection: socket.socket, payload_bytes: int, laps: int) -> tuple[float, float]:
    """Measures (p50, p99) seconds per hop: half of a round trip with `payload_bytes` each way."""
    payload, buffer = bytes(payload_bytes), memoryview(bytearray(payload_bytes))
    _command(connection, "echo", payload_bytes, laps)
    times = []
    for _ in range(laps):
        start = time.perf_counter()
        connection.sendall(payload)
        _fill(connection, buffer)
        times.append((time.perf_counter() - start) / 2)
    quantiles = statistics.quantiles(times, n=100)
    return statistics.median(times), quantiles[98]


def bulk(connection: socket.socket, payload_bytes: int, count: int) -> float:
    """Measures bytes per second one way: sends `count` payloads, and the other side confirms each."""
    payload, confirmation = bytes(payload_bytes), memoryview(bytearray(1))
    _command(connection, "sink", payload_bytes, count)
    start = time.perf_counter()
    for _ in range(count):
        connection.sendall(payload)
        _fill(connection, confirmation)
    return payload_bytes * count / (time.perf_counter() - start)


def serve(port: int) -> None:
    """Runs the child: executes each 32-byte command until the other side closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOCKET_DEADLINE_S) as connection:
        _prepare(connection)
        command = memoryview(bytearray(32))
        with contextlib.suppress(ConnectionError):
            while True:
                _fill(connection, command)
                kind, size, count = bytes(command).decode().split()
                buffer = memoryview(bytearray(int(size)))
                for _ in range(int(count)):
                    _fill(connection, buffer)
                    connection.sendall(buffer if kind == "echo" else b"\x01")


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SOCKET_DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _command(connection: socket.socket, kind: str, size: int, count: int) -> None:
    connection.sendall(f"{kind} {size} {count}".ljust(32).encode())


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        received = connection.recv_into(buffer[filled:])
        if not received:
            raise ConnectionError("the other side closed")
        filled += received


if __name__ == "__main__":
    serve(int(sys.argv[1]))
