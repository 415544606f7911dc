"""Reading a model from a peer: over real sockets, with everything that a peer can do wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.errors import FetchError, UnknownModelError
from exo_mesh.models.fetcher import peer_source
from exo_mesh.models.fetcher.peer_source import open_peer
from exo_mesh.models.fetcher.source import ModelFiles, SourceError
from exo_mesh.models.fetcher.wire import Fetch, Fetched, FetchPace, Share, Source
from exo_mesh.models.file_server.answering import Answerer
from exo_mesh.models.file_server.listing import FileInfo
from exo_mesh.models.file_server.pace import BUSY_PIECE_BYTES, CopyPace
from exo_mesh.models.file_server.requests import FileRequest
from exo_mesh.security.secret import new_secret
from tests.support.fetcher_child import FetcherChild
from tests.support.file_servers import (
    DEADLINE_S,
    DIGEST,
    NAME,
    WEIGHTS,
    Arriving,
    credentials_of,
    serving,
    tls_of,
    wait_until,
)
from tools.bench import copy_child

SECRET = new_secret()
MIB = 2**20


def read(model: ModelFiles, start: int, stop: int) -> bytes:
    found = bytearray()
    model.read(WEIGHTS, start, stop, found.extend)
    return bytes(found)


@pytest.mark.parametrize("is_closed_mesh", [False, True])
def test_a_peer_lists_and_sends_a_model(tmp_path: Path, is_closed_mesh: bool) -> None:
    own = credentials_of(SECRET) if is_closed_mesh else None
    with serving(tmp_path / "m", own, num_bytes=MIB + 7) as served:
        model = open_peer(served.source(), NAME, tls_of(credentials_of(SECRET, "other")) if own else None)
        listing = model.listing()
        assert listing.digest == DIGEST and listing.files[WEIGHTS] == FileInfo(MIB + 7)
        assert read(model, 0, MIB + 7) == served.content
        assert read(model, 300, 301) == served.content[300:301] and read(model, 5, 5) == b""
        assert len(served.server._connections._open) == 1, "one connection was kept for all of it"
        model.close()


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "m", num_bytes=4 * MIB) as served:
        model = open_peer(served.source(), NAME, None)
        found: dict[int, bytes] = {}

        def one(start: int) -> None:
            found[start] = read(model, start, start + MIB)

        threads = [threading.Thread(target=one, args=(number * MIB,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert b"".join(found[start] for start in sorted(found)) == served.content
        model.close()


def test_an_unknown_model_file_or_version_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        with pytest.raises(UnknownModelError, match='has no model "org/other"'):
            open_peer(served.source(), "org/other", None).listing()
        with pytest.raises(FetchError, match=r"does not have nothing\.json"):
            open_peer(served.source(), NAME, None).read("nothing.json", 0, 5, lambda piece: None)
        with pytest.raises(FetchError, match="another version"):
            open_peer(served.source(), NAME, None, digest="other").listing()
        model = open_peer(served.source(), NAME, None)
        model.listing()
        served.dirs[NAME] = (served.model_dir, "e" * 64)
        with pytest.raises(FetchError, match="another version"):
            read(model, 0, 5)


def test_what_a_peer_does_not_have_is_not_waited_for(tmp_path: Path) -> None:
    content = bytes(range(250)) * 40
    Arriving(tmp_path / "m", content).bring((0, 5000))
    with serving(tmp_path / "m") as served:
        model = open_peer(served.source(), NAME, None)
        found = bytearray()
        with pytest.raises(FetchError, match="from byte 5000 on"):
            model.read(WEIGHTS, 4000, 6000, found.extend)
        assert found == content[4000:5000], "what it had was handed over"


def test_what_arrives_at_a_peer_is_read_as_it_comes(tmp_path: Path) -> None:
    content = bytes(range(250)) * 40
    parts = Arriving(tmp_path / "m", content)
    with serving(tmp_path / "m") as served:
        model = open_peer(served.source(is_arriving=True), NAME, None)
        found = bytearray()
        reading = threading.Thread(target=lambda: model.read(WEIGHTS, 0, 10_000, found.extend))
        reading.start()
        for start in range(0, 10_000, 2500):
            parts.bring((start, start + 2500))
            wait_until(lambda start=start: len(found) == start + 2500)  # type: ignore[misc]
        reading.join(DEADLINE_S)
        assert found == content


def test_a_peer_at_which_nothing_more_arrives_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_source, "WAIT_S", 0.05)
    Arriving(tmp_path / "m", bytes(1000)).bring((0, 10))
    with serving(tmp_path / "m") as served:
        model = open_peer(served.source(is_arriving=True), NAME, None, stalled_s=0.1)
        found = bytearray()
        with pytest.raises(SourceError, match="no more bytes arrive there"):
            model.read(WEIGHTS, 0, 1000, found.extend)
        assert found == bytes(10)


def test_the_rest_of_a_read_comes_from_another_peer(tmp_path: Path) -> None:
    size = 32 * MIB  # more than the buffers of a connection hold when its server stops
    with ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path / "a", num_bytes=size))
        second = stack.enter_context(serving(tmp_path / "b", num_bytes=size))
        found = bytearray()

        def sink(piece: memoryview) -> None:
            found.extend(piece)
            if len(found) > MIB:
                first.server.stop()

        with pytest.raises(SourceError, match="peer p1"):
            open_peer(first.source(), NAME, None).read(WEIGHTS, 0, size, sink)
        assert MIB < len(found) < size
        open_peer(second.source(), NAME, None).read(WEIGHTS, len(found), size, found.extend)
        assert found == first.content


@pytest.mark.extended
def test_a_peer_whose_process_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    (tmp_path / copy_child.FILE).write_bytes(bytes(8 * MIB))
    command = [sys.executable, "-m", "tools.bench.copy_child", "serve", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        child.stdin.write("\n")
        child.stdin.flush()
        source = copy_child.source_at(int(child.stdout.readline()))
        found = bytearray()

        def sink(piece: memoryview) -> None:
            found.extend(piece)
            child.kill()

        with pytest.raises(SourceError):
            open_peer(source, copy_child.MODEL, None).read(copy_child.FILE, 0, 8 * MIB, sink)
        assert 0 < len(found) < 8 * MIB


@pytest.mark.parametrize("is_closed_mesh", [False, True])
def test_a_peer_that_says_nothing_is_given_up(is_closed_mesh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_source, "SILENCE_S", 0.05)
    monkeypatch.setattr(peer_source, "HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source("p1", (f"http://127.0.0.1:{silent.getsockname()[1]}",))
        model = open_peer(source, NAME, tls_of(credentials_of(SECRET)) if is_closed_mesh else None)
        with pytest.raises(SourceError, match="timed out"):
            model.listing()


def test_the_first_address_that_answers_is_used_from_then_on(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        nobody = f"http://127.0.0.1:{free_port()}"
        model = open_peer(Source("p1", (nobody, "no url", served.url)), NAME, None)
        assert read(model, 0, 10) == served.content[:10]
        assert model._dialler._urls[0] == served.url  # type: ignore[attr-defined]
        with pytest.raises(SourceError, match=r"peer p2 cannot be reached: .*refused"):
            open_peer(Source("p2", (nobody,)), NAME, None).listing()
        with pytest.raises(SourceError, match="no address is known"):
            open_peer(Source("p3"), NAME, None).listing()


def test_a_peer_of_another_mesh_is_not_believed(tmp_path: Path) -> None:
    with serving(tmp_path / "m", credentials_of(new_secret())) as served:
        model = open_peer(served.source(), NAME, tls_of(credentials_of(SECRET)))
        with pytest.raises(FetchError, match="not a member of this mesh"):
            model.listing()


def test_what_the_sink_raises_is_not_blamed_on_the_peer(tmp_path: Path) -> None:
    def full(piece: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with serving(tmp_path / "m", num_bytes=MIB) as served:
        model = open_peer(served.source(), NAME, None)
        with pytest.raises(OSError, match="No space left") as caught:
            model.read(WEIGHTS, 0, MIB, full)
        assert not isinstance(caught.value, SourceError)
        assert read(model, 0, 10) == served.content[:10], "the next read has a connection of its own"


def test_close_ends_a_read_that_waits(tmp_path: Path) -> None:
    parts = Arriving(tmp_path / "m", bytes(1000))
    parts.bring((0, 10))
    with serving(tmp_path / "m") as served:
        model = open_peer(served.source(is_arriving=True), NAME, None)
        found, ended = bytearray(), []

        def reading() -> None:
            try:
                model.read(WEIGHTS, 0, 1000, found.extend)
            except SourceError as exc:
                ended.append(exc)

        thread = threading.Thread(target=reading)
        thread.start()
        wait_until(lambda: len(found) == 10)
        model.close()
        thread.join(DEADLINE_S)
        assert len(ended) == 1


def answering(answer: bytes) -> tuple[int, Callable[[], None]]:
    """The port of a peer that says this to everybody and hangs up, and what ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(5000)
                sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()

    def end() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)

    return listener.getsockname()[1], end


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 10\r\n\r\n0123456789",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-8/10\r\nContent-Length: 9\r\n\r\n0123",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 1-9/10\r\nContent-Length: 9\r\n\r\n012345678",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n\r\n" + bytes(100),
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-4/10\r\nContent-Length: 10\r\n\r\n0123456789",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_is_no_good_may_be_asked_for_again(answer: bytes) -> None:
    port, end = answering(answer)
    try:
        with pytest.raises(SourceError, match="peer p1"):
            read(open_peer(Source("p1", (f"http://127.0.0.1:{port}",)), NAME, None), 0, 10)
    finally:
        end()


@pytest.mark.parametrize("listing", [b"[]", b"{", b'{"repo": "", "revision": "", "digest": "", "files": {"a": 5}}'])
def test_a_listing_that_is_none_is_refused(listing: bytes) -> None:
    port, end = answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listing), listing))
    try:
        with pytest.raises(SourceError, match="cannot be read"):
            open_peer(Source("p1", (f"http://127.0.0.1:{port}",)), NAME, None).listing()
    finally:
        end()


class Rests(CopyPace):
    """A busy pace that notes its rests instead of resting."""

    def __init__(self) -> None:
        super().__init__(lambda: True)
        self.num_rests = 0

    def rest(self, took_s: float, stopping: threading.Event) -> None:
        assert took_s > 0
        self.num_rests += 1


def test_while_streams_run_a_read_asks_for_small_pieces_and_rests_after_each(tmp_path: Path) -> None:
    pace, sizes = Rests(), []
    with serving(tmp_path / "m", num_bytes=5 * BUSY_PIECE_BYTES) as served:
        model = open_peer(served.source(), NAME, None, pace=pace)
        model.read(WEIGHTS, 0, 5 * BUSY_PIECE_BYTES, lambda piece: sizes.append(len(piece)))
    assert sizes == [BUSY_PIECE_BYTES] * 5 and pace.num_rests == 5


@pytest.mark.extended
def test_a_fetcher_whose_node_is_busy_copies_from_peers_at_that_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    answer_file = Answerer._answer_file

    def noted(self: Answerer, sock: socket.socket, request: FileRequest, *what: Any) -> None:
        asked.append((request.stop or 0) - request.start)
        answer_file(self, sock, request, *what)

    monkeypatch.setattr(Answerer, "_answer_file", noted)
    size = 3 * BUSY_PIECE_BYTES
    with serving(tmp_path / "m", num_bytes=size) as served, FetcherChild(os.environ) as child:
        Arriving(tmp_path / "own", served.content).bring((0, 8))
        child.send(FetchPace(is_busy=True))
        child.send(Fetch(1, str(tmp_path / "own"), (Share({WEIGHTS: ((0, size),)}, (served.source(),)),)))
        answer = child.answer()
    assert isinstance(answer, Fetched) and answer.num_bytes == {"p1": size - 8}
    assert len(asked) == 3 and max(asked) <= BUSY_PIECE_BYTES
    assert (tmp_path / "own" / WEIGHTS).read_bytes() == served.content
