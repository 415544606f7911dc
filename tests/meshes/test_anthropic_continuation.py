"""Real processes: the entry peer of a message of Anthropic's dialect is killed, and its stream goes on at another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.api.anthropic.test_messages import replayed
from tests.meshes.test_continuation import COUNT, SLOW, stream
from tests.support.peers import MODEL, Peer, mesh
from tests.support.processes import eventually

PATH = "/v1/messages"
BODY = {
    "model": MODEL,
    "max_tokens": 150,
    "temperature": 0,
    "stream": True,
    "messages": [{"role": "user", "content": COUNT}],
}

Numbered = tuple[str, str, dict[str, Any]]


def numbered(response: HTTPResponse) -> Iterator[Numbered]:
    """(id or "", name, data) of each event but pings, as they come."""
    fields: dict[str, str] = {}
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif fields:
            if fields["event"] != "ping":
                yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}


def message_of(events: list[Numbered]) -> dict[str, Any]:
    return replayed([(name, data) for _, name, data in events])


def read_until_killed(entry: Peer, key: str) -> list[Numbered]:
    """Stream BODY from a peer and kill the peer in the middle of the text: the events that came, up to the last one
    with an id, because a client has received all earlier ones with it."""
    had: list[Numbered] = []
    with stream(entry, BODY, PATH, **{"Idempotency-Key": key}) as response:
        try:
            for event in numbered(response):
                had.append(event)
                if len(had) > 15 and entry.child.alive:
                    os.kill(entry.child.pid, signal.SIGKILL)
        except (HTTPException, ConnectionError):
            pass  # the entry peer has gone
    last = max(place for place, event in enumerate(had) if event[0])
    return had[: last + 1]


@pytest.mark.extended
def test_the_message_of_a_killed_entry_peer_is_whole_at_another(tmp_path: Path) -> None:
    with mesh(tmp_path, [SLOW] * 3, engine="dummy") as peers:
        entry, *others = peers
        others[0].place(min_peers=2, exclude_peers=[entry.id])
        with stream(others[0], BODY, PATH) as response:
            list(numbered(response))  # from now on the prompt is known, as it is to those who ask again
        with stream(others[0], BODY, PATH) as response:
            whole = message_of(list(numbered(response)))
        assert eventually(lambda: bool(entry.instances()), 10)
        had = read_until_killed(entry, "0b9f2c")
        assert had[0][1] == "message_start" and had[-1][1] == "content_block_delta"
        message_id = had[0][2]["message"]["id"]
        with stream(others[1], BODY, PATH, **{"Idempotency-Key": "0b9f2c", "Last-Event-ID": had[-1][0]}) as response:
            joined = message_of([*had, *numbered(response)])
        with stream(others[0], BODY, PATH, **{"Idempotency-Key": "0b9f2c"}) as response:
            again = message_of(list(numbered(response)))
        assert joined == again == {**whole, "id": message_id}
