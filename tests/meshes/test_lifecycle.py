"""Instances, requests, runners and nodes come and go, and nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.errors import CancelledRequestError, MeshError
from tests.support.peers import Peer, await_all, chat_body, mesh, text_of
from tests.support.processes import eventually, gone

STOP_S = 5.0
COUNT, COUNTED = "Count from 7 to 12.", "7, 8, 9, 10, 11, 12"
ENDLESS = chat_body(COUNT, stream=True, ignore_eos=True, max_tokens=8000)


@pytest.fixture
def running(pair: list[Peer]) -> Iterator[list[Peer]]:
    """The pair; its instance is placed anew if a test has ended it."""
    if not pair[0].instances():
        pair[0].place()
    yield pair
    await_all(pair, Peer.idle)


class Streaming:
    """A request that streams until somebody ends it, read in a thread."""

    def __init__(self, peer: Peer) -> None:
        self.first: Future[dict[str, Any]] = Future()
        self.end: Future[None] = Future()
        """Its exception is what the stream ended with."""
        self._thread = threading.Thread(target=self._read, args=(peer,), daemon=True)
        self._thread.start()

    def _read(self, peer: Peer) -> None:
        try:
            for event in peer.api.stream("/v1/chat/completions", ENDLESS):
                if not self.first.done():
                    self.first.set_result(event)
        except MeshError as exc:
            if not self.first.done():
                self.first.set_exception(exc)
            self.end.set_exception(exc)
        else:
            self.end.set_result(None)


def processes(peer: Peer) -> list[psutil.Process]:
    """The node and all that it has started."""
    return [psutil.Process(peer.child.pid), *peer.runners()]


def test_an_instance_is_placed_seen_everywhere_and_freed(running: list[Peer]) -> None:
    (instance,) = running[0].instances()
    assert instance["state"] == "ready" and len(instance["stages"]) == 2
    runners = [psutil.Process(stage["pid"]) for stage in instance["stages"]]
    for peer in running:
        assert eventually(lambda peer=peer: peer.instances() == [instance])  # type: ignore[misc]
        assert peer.api.get(f"/instance/{instance['id']}") == instance
        assert [runner.pid for runner in peer.runners()] == [
            stage["pid"] for stage in instance["stages"] if stage["peer"] == peer.id
        ]
    other = running[1]
    assert other.api.delete(f"/instance/{instance['id']}", 15)["deleted"], "through a peer that did not place it"
    assert eventually(lambda: gone(runners), 5)
    for peer in running:
        assert eventually(lambda peer=peer: peer.instances() == [])  # type: ignore[misc]
        assert peer.runners() == []
    await_all(running, lambda peer: all(t["reserved_bytes"] == 0 for t in peer.state()["telemetry"].values()))
    with pytest.raises(MeshError, match="no instance"):
        other.api.delete(f"/instance/{instance['id']}", 15)


@pytest.mark.extended
def test_a_question_places_the_model(pair: list[Peer]) -> None:
    for instance in pair[0].instances():
        pair[0].api.delete(f"/instance/{instance['id']}", 15)
    await_all(pair, lambda peer: not peer.instances())
    assert text_of(pair[1].chat(COUNT)) == COUNTED
    await_all(pair, lambda peer: [one["state"] for one in peer.instances()] == ["ready"])
    assert {stage["peer"] for stage in pair[0].instances()[0]["stages"]} == {peer.id for peer in pair}


@pytest.mark.parametrize(
    "canceller",
    [pytest.param(0, id="at its own peer", marks=pytest.mark.extended), pytest.param(1, id="at the other peer")],
)
def test_cancel_ends_a_stream(running: list[Peer], canceller: int) -> None:
    stream = Streaming(running[0])
    request_id = stream.first.result(30)["id"]
    await_all(running, Peer.busy)
    assert running[canceller].api.post(f"/v1/cancel/{request_id}", {})["cancelled"]
    with pytest.raises(CancelledRequestError):
        stream.end.result(10)
    await_all(running, Peer.idle)
    with pytest.raises(MeshError, match="no request"):
        running[canceller].api.post(f"/v1/cancel/{request_id}", {})


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.extended
@pytest.mark.parametrize(("name", "choices"), [("id of the reply", 2), ("x-request-id", 2), ("x-trace-id", 1)])
def test_every_id_that_a_client_saw_cancels_at_any_peer(running: list[Peer], name: str, choices: int) -> None:
    address = urlsplit(running[0].url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=30)
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**ENDLESS, "n": choices}), headers)
    with contextlib.closing(connection), connection.getresponse() as reply:
        first = json.loads(reply.readline().removeprefix(b"data: "))
        given = first["id"] if name == "id of the reply" else reply.getheader(name)
        await_all(running, Peer.busy)
        assert running[1].api.post(f"/v1/cancel/{given}", {})["cancelled"]
        assert b'"code":"cancelled"' in reply.read()
    await_all(running, Peer.idle)


def test_a_client_that_vanishes_frees_the_ring(running: list[Peer]) -> None:
    """No goodbye: the connection is reset."""
    address = urlsplit(running[1].url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(ENDLESS), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    await_all(running, Peer.busy)
    response.close()
    connection.close()
    await_all(running, Peer.idle)


def test_a_killed_runner_is_replaced_and_the_stream_goes_on(running: list[Peer]) -> None:
    before = running[0].instances()[0]
    stream = Streaming(running[1])
    request_id = stream.first.result(30)["id"]
    os.kill(before["stages"][0]["pid"], signal.SIGKILL)
    assert eventually(
        lambda: any(one["state"] == "ready" and one["ballot"] > before["ballot"] for one in running[1].instances()), 30
    )
    await_all(running, Peer.busy, 30)
    assert not stream.end.done()
    assert running[0].api.post(f"/v1/cancel/{request_id}", {})["cancelled"]
    with pytest.raises(CancelledRequestError):
        stream.end.result(10)
    assert text_of(running[0].chat(COUNT)) == COUNTED


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(0, id="first stage", marks=pytest.mark.slow),
        pytest.param(1, id="last stage", marks=pytest.mark.extended),
    ],
)
def test_a_node_of_a_running_ring_stops_in_time_with_its_children(tmp_path: Path, stopped: int) -> None:
    with mesh(tmp_path, [[], []], engine="dummy") as peers:
        peers[0].place(min_peers=2)
        stream = Streaming(peers[1 - stopped])
        stream.first.result(30)
        family = processes(peers[stopped])
        assert len(family) == 2
        began = time.monotonic()
        os.kill(peers[stopped].child.pid, signal.SIGTERM)
        assert eventually(lambda: not peers[stopped].child.alive and gone(family), 2 * STOP_S)
        assert time.monotonic() - began < STOP_S
        assert peers[stopped].child._process.returncode == exit_codes.OK
        other = peers[1 - stopped]
        assert eventually(lambda: len(other.state()["view"]["peers"]) == 1, 10)
        assert other.chat(COUNT, max_tokens=5)["usage"]["completion_tokens"] == 5, "the rest of the mesh serves on"


@pytest.mark.extended
def test_a_killed_node_leaves_no_runner(tmp_path: Path) -> None:
    with mesh(tmp_path, [[], []], engine="dummy") as peers:
        instance = peers[0].place(min_peers=2)
        stream = Streaming(peers[0])
        stream.first.result(30)
        family = processes(peers[1])
        assert {process.pid for process in family} & {stage["pid"] for stage in instance["stages"]}
        os.kill(peers[1].child.pid, signal.SIGKILL)
        assert eventually(lambda: gone(family), 5)
        assert eventually(lambda: len(peers[0].state()["view"]["peers"]) == 1, 15)
        assert peers[0].chat(COUNT, max_tokens=5)["usage"]["completion_tokens"] == 5
        assert len(peers[0].instances()[0]["stages"]) == 1
