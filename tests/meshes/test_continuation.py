"""Real processes: an entry peer is killed and its client goes on at another; a replica is killed and nobody notices."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from exo_mesh.security.secret import new_secret, write_new
from tests.support.peers import MODEL, PLACE_S, Peer, chat_body, mesh, text_of
from tests.support.processes import COMMAND, clean_environ, eventually, run

COUNT = "Count from 3 to 40."
BODY = chat_body(COUNT, stream=True, max_tokens=150)
SLOW = ["--engine-option", "cost_ms=8"]


@contextmanager
def stream(
    peer: Peer, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> Iterator[HTTPResponse]:
    address = urlsplit(peer.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        yield connection.getresponse()
    finally:
        connection.close()


def deltas(response: HTTPResponse) -> Iterator[tuple[str, str]]:
    """(id of the event or "", text) of each event, as they come."""
    event_id = ""
    for line in response:
        if line.startswith(b"id: "):
            event_id = line[4:].decode().strip()
        elif line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield event_id, choice["delta"].get("content") or ""
            event_id = ""


def read_until_killed(entry: Peer, **headers: str) -> tuple[str, str]:
    """Stream BODY from a peer and kill the peer after 40 characters: (the text that came, id of the last event)."""
    had, last_id = "", ""
    with stream(entry, BODY, **headers) as response:
        try:
            for event_id, text in deltas(response):
                had, last_id = had + text, event_id or last_id
                if len(had) > 40 and entry.child.alive:
                    os.kill(entry.child.pid, signal.SIGKILL)
        except (HTTPException, ConnectionError):
            pass  # the entry peer has gone
    return had, last_id


@pytest.mark.slow
def test_the_answer_of_a_killed_entry_peer_goes_on_at_another(tmp_path: Path) -> None:
    with mesh(tmp_path, [SLOW] * 3, engine="dummy") as peers:
        entry, *others = peers
        others[0].place(min_peers=2, exclude_peers=[entry.id])
        whole = text_of(others[0].chat(COUNT, max_tokens=150))
        assert eventually(lambda: bool(entry.instances()), 10)
        had, last_id = read_until_killed(entry, **{"Idempotency-Key": "0b9f2c"})
        assert last_id and 40 < len(had) < len(whole) and whole.startswith(had)
        with stream(others[1], BODY, **{"Idempotency-Key": "0b9f2c", "Last-Event-ID": last_id}) as response:
            rest = "".join(text for _, text in deltas(response))
        assert had + rest == whole
        with stream(others[0], BODY, **{"Idempotency-Key": "0b9f2c"}) as response:
            assert "".join(text for _, text in deltas(response)) == whole, "all of it again, at a third peer"


@pytest.mark.extended
def test_a_closed_mesh_takes_a_key_at_every_peer_and_goes_on_for_it_only(tmp_path: Path) -> None:
    write_new(tmp_path / "mesh.secret", new_secret())
    closed = [*SLOW, "--secret-file", str(tmp_path / "mesh.secret")]
    with mesh(tmp_path, [closed] * 3, engine="dummy") as peers:
        entry, *others = peers
        others[0].place(min_peers=2, exclude_peers=[entry.id])
        made = [run(["key", "new", "--home", str(tmp_path / f"peer-{index}")], tmp_path) for index in (0, 2)]
        key, stranger = (one.stdout.strip() for one in made)
        assert eventually(lambda: all(accepts(peer, text) for peer in peers for text in (key, stranger)), 2.0)
        whole = text_of(others[0].chat(COUNT, max_tokens=150))

        asked = {"Idempotency-Key": "1", "Authorization": f"Bearer {key}"}
        had, last_id = read_until_killed(entry, **asked)
        assert last_id and 40 < len(had) < len(whole)
        with stream(others[1], BODY, **asked, **{"Last-Event-ID": last_id}) as response:
            assert had + "".join(text for _, text in deltas(response)) == whole
        other = {**BODY, "max_tokens": 5}
        with stream(others[1], other, **{**asked, "Authorization": f"Bearer {stranger}"}) as response:
            assert response.status == 200, "the same idempotency key of another API key is another request"

        key_id = key.split("-")[1]
        assert run(["key", "remove", key_id, "--home", str(tmp_path / "peer-2")], tmp_path).returncode == 0
        assert eventually(lambda: not any(accepts(peer, key) for peer in others), 2.0)
        assert all(accepts(peer, stranger) for peer in others)


def accepts(peer: Peer, key: str) -> bool:
    address = urlsplit(peer.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=10)
    connection.request("GET", "/queue", headers={"Authorization": f"Bearer {key}"})
    status = connection.getresponse().status
    connection.close()
    assert status in (200, 401)
    return status == 200


@pytest.mark.slow
def test_a_killed_replica_costs_no_request(tmp_path: Path) -> None:
    with mesh(tmp_path, [SLOW] * 2, engine="dummy") as peers:
        made = peers[0].api.post("/instance", {"model": MODEL, "replicas": 2}, PLACE_S)["data"]
        assert [len(one["stages"]) for one in made] == [1, 1]
        assert {one["stages"][0]["peer"] for one in made} == {peer.id for peer in peers}
        whole = text_of(peers[0].chat(COUNT, max_tokens=150))
        texts = [""] * 6

        def ask(number: int) -> None:
            with stream(peers[0], BODY) as response:
                for _, text in deltas(response):
                    texts[number] += text

        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(6)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: all(len(text) > 20 for text in texts), 30)
        assert eventually(lambda: all(peer.busy() for peer in peers), 5), "both have some of them"
        os.kill(peers[1].child.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert texts == [whole] * 6
        assert peers[0].api.get("/requests/stats")["errors"] == 0


@pytest.mark.extended
def test_a_question_with_the_local_token_of_a_node_outlives_that_node(tmp_path: Path) -> None:
    write_new(tmp_path / "mesh.secret", new_secret())
    closed = [*SLOW, "--secret-file", str(tmp_path / "mesh.secret")]
    with mesh(tmp_path, [closed] * 3, engine="dummy") as peers:
        entry, *others = peers
        folder = Path("state", "exo-mesh", "nodes")
        for name in ("peer-1", "peer-2"):  # nodes of one user share the folder
            shutil.copytree(tmp_path / name / folder, tmp_path / "peer-0" / folder, dirs_exist_ok=True)
        others[0].place(min_peers=2, exclude_peers=[entry.id])
        whole = text_of(others[0].chat(COUNT, max_tokens=150))
        asked = ["run", MODEL, COUNT, "--temperature", "0", "--max-tokens", "150", "--api-url", entry.url]
        command = subprocess.Popen(
            [*COMMAND, *asked], env=clean_environ(tmp_path / "peer-0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with command:
            assert command.stdout is not None and command.stderr is not None
            had = os.read(command.stdout.fileno(), 40)
            os.kill(entry.child.pid, signal.SIGKILL)
            rest, said = command.communicate(timeout=60)
        assert command.returncode == 0, said.decode()
        assert (had + rest).decode().rstrip("\n") == whole.rstrip("\n")
