"""Real processes: stored responses and threads go on at other peers than their own, and streams outlive their peer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from exo_mesh.errors import MeshError
from tests.api.responses.test_replies import rebuilt
from tests.meshes.test_continuation import COUNT, SLOW, stream
from tests.support.peers import ANSWER_S, MODEL, Peer, mesh
from tests.support.processes import eventually

pytestmark = pytest.mark.extended

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "max_output_tokens": 150, "temperature": 0, "stream": True, "input": COUNT}

Numbered = tuple[str, dict[str, Any]]


def respond(peer: Peer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, **fields}
    reply: dict[str, Any] = peer.api.post(PATH, body, ANSWER_S)
    return reply


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def numbered(response: HTTPResponse) -> Iterator[Numbered]:
    """(id or "", data) of each event, as they come."""
    fields: dict[str, str] = {}
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", ""), json.loads(fields["data"])
            fields = {}


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


def what_is_said(events: list[Numbered]) -> dict[str, Any]:
    """The response that the events describe, without the time of its peer."""
    return {**rebuilt([event for _, event in events]), "created_at": 0}


def test_the_response_of_a_killed_entry_peer_is_whole_at_another_and_stored_there(tmp_path: Path) -> None:
    with mesh(tmp_path, [SLOW] * 3, engine="dummy") as peers:
        entry, *others = peers
        others[0].place(min_peers=2, exclude_peers=[entry.id])
        assert eventually(lambda: bool(entry.instances()), 10)
        had = read_until_killed(entry, "0b9f2c")
        assert had[-1][1]["type"] == "response.output_text.delta"
        headers = {"Idempotency-Key": "0b9f2c"}
        with stream(others[1], BODY, PATH, **headers, **{"Last-Event-ID": had[-1][0]}) as response:
            joined = what_is_said([*had, *numbered(response)])
        stored = others[0].api.get(f"{PATH}/{joined['id']}")
        with stream(others[0], BODY, PATH, **headers) as response:
            again = what_is_said(list(numbered(response)))
        assert joined == again == {**stored, "created_at": 0}
        assert joined["status"] == "incomplete" and joined["usage"]["output_tokens"] == 150


def read_again(peer: Peer, response_id: str, after: int) -> list[dict[str, Any]]:
    """The events of a response after one of them, as a client without a key reads them."""
    url = f"{peer.url}{PATH}/{response_id}?stream=true&starting_after={after}"
    with urlopen(url, timeout=60) as reply:
        return [data for _, data in numbered(reply)]


def test_a_response_is_read_at_another_peer_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    with mesh(tmp_path, [SLOW] * 2, engine="dummy") as (owner, other):
        owner.place()
        with stream(owner, BODY, PATH) as response:
            events = numbered(response)
            had = [next(events)[1] for _ in range(10)]
            response_id = had[0]["response"]["id"]
            assert other.api.get(f"{PATH}/{response_id}")["status"] == "in_progress"
            meanwhile = read_again(other, response_id, 5)
            had += [data for _, data in events]
        assert rebuilt(had)["status"] == "incomplete"
        assert meanwhile == read_again(other, response_id, 5) == had[6:]


def test_a_conversation_goes_on_at_any_peer_until_its_owner_is_gone(tmp_path: Path) -> None:
    with mesh(tmp_path, [[]] * 2) as (owner, other):
        first = respond(owner, input="Count from 7 to 12.")
        assert text_of(first) == "7, 8, 9, 10, 11, 12"
        assert first["id"].startswith(f"resp_{owner.id[:8]}_")
        assert other.api.get(f"{PATH}/{first['id']}") == first
        whole = [
            {"role": "user", "content": "Count from 7 to 12."},
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "Count from 3 to 5."},
        ]
        counted = other.api.post(f"{PATH}/input_tokens", {"model": MODEL, "input": whole}, ANSWER_S)
        second = respond(other, input="Count from 3 to 5.", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] == counted["input_tokens"]
        assert second["id"].startswith(f"resp_{other.id[:8]}_")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert respond(other, input=[whole[0], reference, whole[2]])["usage"]["input_tokens"] == counted["input_tokens"]
        third = respond(owner, input="Count from 1 to 2.", previous_response_id=second["id"])
        os.kill(owner.child.pid, signal.SIGKILL)
        assert eventually(lambda: other.knows({other.id}, MODEL), 15)
        for lost in (first, third):
            with pytest.raises(MeshError, match=r"is not in the mesh"):
                respond(other, input="And now?", previous_response_id=lost["id"])
        with pytest.raises(MeshError, match=r"which .* continues, is not in the mesh"):
            respond(other, input="And now?", previous_response_id=second["id"])


def test_a_thread_of_messages_goes_on_at_any_peer_until_its_owner_is_gone(tmp_path: Path) -> None:
    def message(peer: Peer, text: str, thread: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
        asked = [*fields.pop("before", ()), {"role": "user", "content": text}]
        body = {"model": MODEL, "temperature": 0, "max_tokens": 60, "messages": asked, "thread": thread, **fields}
        reply: dict[str, Any] = peer.api.post("/v1/messages", body, ANSWER_S)
        return reply

    def after(reply: dict[str, Any]) -> dict[str, Any]:
        return {"type": "continue", "previous_message_id": reply["id"]}

    with mesh(tmp_path, [[]] * 2) as (owner, other):
        first = message(owner, "Count from 7 to 12.", {"type": "create"}, system="Be brief.")
        assert first["content"][0]["text"] == "7, 8, 9, 10, 11, 12"
        assert first["id"].startswith(f"msg_{owner.id[:8]}_")
        second = message(other, "Count from 3 to 5.", after(first))
        before = [
            {"role": "user", "content": "Count from 7 to 12."},
            {"role": "assistant", "content": first["content"]},
        ]
        whole = message(other, "Count from 3 to 5.", None, before=before, system="Be brief.")
        assert second["content"] == whole["content"]
        counts = [
            reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] for reply in (second, whole)
        ]
        assert counts[0] == counts[1]
        third = message(owner, "Count from 1 to 2.", after(second))
        os.kill(owner.child.pid, signal.SIGKILL)
        assert eventually(lambda: other.knows({other.id}, MODEL), 15)
        for lost in (first, second, third):
            with pytest.raises(MeshError, match=r"is not in the mesh"):
                message(other, "And now?", after(lost))
