"""The proxy does to bytes what it says, to those that it says, and to no others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tools.faults.proxy import FaultProxy

ADDRESSES = ("127.77.0.2", "127.77.0.3")
PATIENCE_S = 10.0


class Echo:
    """Node 1: answers what it hears."""

    def __init__(self) -> None:
        self._server = socket.create_server((ADDRESSES[1], 0))
        self.address = "{}:{}".format(*self._server.getsockname())
        self.heard = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                while piece := connection.recv(65536):
                    self.heard += piece
                    connection.sendall(piece)
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    numbers = {address: number for number, address in enumerate(ADDRESSES)}
    made = FaultProxy(numbers.get, lambda number: ADDRESSES[number], lambda target: target != echo.address)
    yield made
    made.close()


def ask(proxy: FaultProxy, target: str, *, wait: bool = True) -> socket.socket:
    """A connection of node 0 to a target; wait: until the proxy says that it is there."""
    host, port = proxy.listen_for(0).removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_S)
    connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    if wait:
        assert connection.recv(100) == b"HTTP/1.1 200 OK\r\n\r\n"
    return connection


def said(connection: socket.socket, words: bytes) -> bytes:
    connection.sendall(words)
    return heard(connection, len(words))


def heard(connection: socket.socket, length: int) -> bytes:
    came = b""
    while len(came) < length and (piece := connection.recv(65536)):
        came += piece
    return came


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)
    return False


def test_it_passes_on_and_counts_what_runners_say(proxy: FaultProxy, echo: Echo) -> None:
    passed, more = proxy.when_passed((0, 1), 5), proxy.when_passed((0, 1), 10**6)
    with closing(ask(proxy, echo.address)) as connection:
        assert proxy.connections() == [(0, 1)]
        assert said(connection, b"hello") == b"hello"
        assert passed.wait(PATIENCE_S) and not more.is_set()
        assert said(connection, bytes(10**6)) == bytes(10**6) and more.wait(PATIENCE_S)


def test_what_nobody_listens_to_is_refused(proxy: FaultProxy) -> None:
    with closing(ask(proxy, "127.9.9.9:1", wait=False)) as connection:
        assert heard(connection, 100).startswith(b"HTTP/1.1 502")


def test_a_held_way_loses_nothing_and_the_other_way_goes_on(proxy: FaultProxy, echo: Echo) -> None:
    with closing(ask(proxy, echo.address)) as connection:
        proxy.hold((1, 0))
        connection.sendall(b"one")
        assert is_silent(connection) and bytes(echo.heard) == b"one"
        proxy.release((1, 0))
        assert heard(connection, 3) == b"one" and said(connection, b"two") == b"two"


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_whoever_dials_over_a_held_way_waits(proxy: FaultProxy, echo: Echo, way: tuple[int, int]) -> None:
    proxy.hold(way)
    with closing(ask(proxy, echo.address, wait=False)) as connection:
        assert is_silent(connection)
        proxy.release()
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_reset_reaches_both_ends(proxy: FaultProxy, echo: Echo) -> None:
    with closing(ask(proxy, echo.address)) as connection:
        assert said(connection, b"hello") == b"hello"
        assert proxy.reset(1, 0) == 1
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert proxy.reset(0, 1) == 0


def test_of_a_half_open_connection_the_caller_is_never_told(proxy: FaultProxy, echo: Echo) -> None:
    with closing(ask(proxy, echo.address)) as connection:
        assert said(connection, b"hello") == b"hello"
        assert proxy.half_open(1, 0) == 0 and proxy.half_open(0, 1) == 1
        connection.sendall(b"is anybody there?")
        assert is_silent(connection) and bytes(echo.heard) == b"hello"


def test_a_wire_is_as_slow_as_it_was_made(proxy: FaultProxy, echo: Echo) -> None:
    with closing(ask(proxy, echo.address)) as connection:
        proxy.shape((0, 1), delay_s=0.2)
        begin = time.monotonic()
        assert said(connection, b"x") == b"x"
        assert time.monotonic() - begin >= 0.2
        proxy.shape((0, 1), bytes_per_s=1e6)
        begin = time.monotonic()
        assert said(connection, bytes(300_000)) == bytes(300_000)
        assert time.monotonic() - begin >= 0.2, "0.3 s, less what one piece takes"
