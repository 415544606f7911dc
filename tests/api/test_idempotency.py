"""The Idempotency-Key header over HTTP: what may be in it, and what a stream says so that it can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from tests.api.scripted_mesh import ScriptedMesh, Served, served

HI = {"messages": [{"role": "user", "content": "Hi"}]}


async def post(api: Served, headers: dict[str, str], **fields: Any) -> tuple[int, str]:
    async with api.http.post("/v1/chat/completions", json={**HI, **fields}, headers=headers) as reply:
        return reply.status, await reply.text()


def frames(text: str) -> list[tuple[int | None, dict[str, Any]]]:
    """(id, payload) of each event but [DONE]."""
    found = []
    for frame in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if ": " in line and not line.startswith(":"))
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((int(lines["id"]) if "id" in lines else None, json.loads(lines["data"])))
    return found


def text_in(events: list[tuple[int | None, dict[str, Any]]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for _, event in events)


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"Idempotency-Key": "two words"}, {}, "Idempotency-Key"),
        ({"Idempotency-Key": "x" * 256}, {}, "Idempotency-Key"),
        ({"Last-Event-ID": "3"}, {"stream": True}, "Last-Event-ID"),
        ({"Idempotency-Key": "k", "Last-Event-ID": "3"}, {}, "Last-Event-ID"),
        ({"Idempotency-Key": "k", "Last-Event-ID": "-3"}, {"stream": True}, "Last-Event-ID"),
    ],
)
async def test_headers_that_make_no_sense_are_refused(
    api: Served, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    status, body = await post(api, headers, **fields)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)
    assert not api.mesh.requests


async def test_a_key_gives_the_same_id_seed_and_fingerprint_wherever_it_comes_in(api: Served) -> None:
    for fields in ({}, {"stream": True}, {"user": "someone"}, {"temperature": 0.5}):
        assert (await post(api, {"Idempotency-Key": "one"}, **fields))[0] == 200
    assert (await post(api, {"Idempotency-Key": "two"}))[0] == 200
    assert (await post(api, {}))[0] == 200
    first, streamed, labelled, warmer, other, without = api.mesh.requests
    for same in (streamed, labelled):
        assert (same.request_id, same.sampling.seed, same.key_hash, same.fingerprint) == (
            first.request_id, first.sampling.seed, first.key_hash, first.fingerprint,
        )  # fmt: skip
    assert warmer.key_hash == first.key_hash and warmer.fingerprint != first.fingerprint
    assert other.key_hash != first.key_hash and other.sampling.seed != first.sampling.seed
    assert without.key_hash == b"" and len(first.key_hash) == len(first.fingerprint) == 32
    assert b"one" not in first.key_hash


@pytest.mark.parametrize("mesh_is_open", [True, False])
async def test_the_local_token_counts_as_no_key_on_an_open_mesh_only(model_dir: Path, mesh_is_open: bool) -> None:
    mesh = ScriptedMesh(model_dir)
    access = AccessPolicy(local_token="local", needs_key=not mesh_is_open)
    async with served(mesh, ApiOptions(access=access)) as api:
        for headers in ({"Authorization": "Bearer local"}, {}):
            await post(api, {"Idempotency-Key": "one", **headers})
    hashes = [request.key_hash for request in mesh.requests]
    assert len(hashes) == (2 if mesh_is_open else 1), "a closed mesh refuses the caller without a key"
    if mesh_is_open:
        assert hashes[0] == hashes[1], "another peer, which does not know the token, finds the answer"


async def test_a_stream_goes_on_after_each_of_its_events(api: Served) -> None:
    status, whole = await post(api, {"Idempotency-Key": "k"}, stream=True)
    events = frames(whole)
    assert status == 200 and text_in(events) == api.mesh.answer
    ids = [event_id for event_id, _ in events if event_id is not None]
    assert ids == sorted(set(ids)) and events[-1][0] == ids[-1]
    for index, (event_id, _) in enumerate(events):
        if event_id is None:
            continue
        headers = {"Idempotency-Key": "k", "Last-Event-ID": str(event_id)}
        rest = frames((await post(api, headers, stream=True))[1])
        assert [event for _, event in rest] == [
            {**event, "created": rest[0][1]["created"]} for _, event in events[index + 1 :]
        ]
    assert (await post(api, {"Idempotency-Key": "k", "Last-Event-ID": str(ids[-1])}, stream=True))[
        1
    ] == "data: [DONE]\n\n"


async def test_a_stream_without_a_key_has_no_ids(api: Served) -> None:
    assert all(event_id is None for event_id, _ in frames((await post(api, {}, stream=True))[1]))
