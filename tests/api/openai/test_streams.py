"""Running answers: listed, read from another connection, and stopped, by their owners only."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import SECRET_HEADER, ApiOptions
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.scripted_mesh import ScriptedMesh, Served, served

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
TEXT = "Hello, world! Grüße."


class Gate:
    """A script that writes an answer up to where it is let."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self._mesh = mesh
        self._allowed = 0
        self._moved = asyncio.Event()
        mesh.script = self.write

    async def write(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        yield Progress("prefill", 40, 100)
        for index, event in enumerate(self._mesh.events(self._mesh.text.encode_text(TEXT), request)):
            while index >= self._allowed:
                self._moved.clear()
                await self._moved.wait()
            yield event

    def let(self, count: int) -> None:
        self._allowed += count
        self._moved.set()


@pytest.fixture
async def open_api(mesh: ScriptedMesh) -> AsyncIterator[Served]:
    """Nobody has the rights of an admin."""
    async with served(mesh, ApiOptions(keep_alive_s=0.02, access=AccessPolicy())) as api:
        yield api


@asynccontextmanager
async def asked(api: Served, headers: dict[str, str] | None = None, **fields: Any) -> AsyncIterator[Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    async with api.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        yield reply


async def frames_of(reply: aiohttp.ClientResponse) -> list[tuple[int | None, Any]]:
    """(id, data) of each event."""
    found: list[tuple[int | None, Any]] = []
    for block in (await reply.text()).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if "data" in fields:
            data = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
            found.append((int(fields["id"]) if "id" in fields else None, data))
    return found


def without_ids(frames: list[tuple[int | None, Any]]) -> list[Any]:
    return [data for _, data in frames]


def only_id(mesh: ScriptedMesh) -> str:
    return mesh.request.request_id


async def test_a_reader_during_prefill_gets_what_the_client_gets(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    async with asked(open_api, stream_options={"include_usage": True}) as own:
        own_secret = {SECRET_HEADER: own.headers[SECRET_HEADER]}
        async with open_api.http.get(f"/v1/streams/{only_id(mesh)}", headers=own_secret) as other:
            assert other.status == 200 and (await other.content.readline()).startswith(b": prefill 40 %")
            gate.let(100)
            mine, theirs = await frames_of(own), await frames_of(other)
    assert without_ids(theirs) == without_ids(mine)
    ids = [number for number, _ in theirs if number is not None]
    assert theirs[-1][1] == "[DONE]" and len(ids) > 5 and ids == sorted(set(ids))


async def test_a_late_reader_gets_all_of_it_or_only_what_is_missing(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    gate.let(3)
    async with asked(open_api) as own:
        own_secret = own.headers[SECRET_HEADER]
        path = f"/v1/streams/{only_id(mesh)}?secret={own_secret}"
        async with open_api.http.get(path) as whole, open_api.http.get(path, headers={"Last-Event-ID": "2"}) as rest:
            gate.let(100)
            mine, all_of_it, missing = await frames_of(own), await frames_of(whole), await frames_of(rest)
    assert without_ids(all_of_it) == without_ids(mine)
    assert missing == [one for one in all_of_it if (one[0] is None and one[1] == "[DONE]") or (one[0] or 0) > 2]


async def test_only_the_owner_sees_an_answer(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    async with asked(open_api) as own:
        path, own_secret = f"/v1/streams/{only_id(mesh)}", {SECRET_HEADER: own.headers[SECRET_HEADER]}
        for headers in ({}, {SECRET_HEADER: "guess"}):
            for method in ("GET", "DELETE"):
                async with open_api.http.request(method, path, headers=headers) as refused:
                    assert refused.status == 404
            async with open_api.http.get("/v1/streams", headers=headers) as listed:
                assert (await listed.json())["data"] == []
        async with open_api.http.get("/v1/streams", headers=own_secret) as listed:
            (row,) = (await listed.json())["data"]
        assert (row["id"], row["state"], row["choices"]) == (only_id(mesh), "waiting", 1)
        async with open_api.http.delete(path, headers=own_secret) as stopped:
            assert stopped.status == 200
        gate.let(1)
        assert (await frames_of(own))[-1][1]["error"]["code"] == "cancelled"


async def test_answers_belong_to_the_key_that_asked(mesh: ScriptedMesh, tmp_path: Path) -> None:
    keys, gate = KeyFile(tmp_path / FILE_NAME), Gate(mesh)
    made = [new_key(role, NOW) for role in (Role.USE, Role.USE, Role.ADMIN)]
    keys.write([key for _, key in made])
    owner, other, admin = ({"Authorization": f"Bearer {text}"} for text, _ in made)
    options = ApiOptions(keep_alive_s=0.02, access=AccessPolicy(keys))
    async with served(mesh, options) as api, asked(api, owner) as reply:
        assert SECRET_HEADER not in reply.headers
        seen = {}
        for name, headers in (("owner", owner), ("other", other), ("admin", admin)):
            async with api.http.get("/v1/streams", headers=headers) as listed:
                seen[name] = len((await listed.json())["data"])
        assert seen == {"owner": 1, "other": 0, "admin": 1}
        async with api.http.get(f"/v1/streams/{only_id(mesh)}", headers=other) as refused:
            assert refused.status == 404
        gate.let(100)
        await reply.text()


async def test_a_reader_that_leaves_or_never_reads_changes_nothing(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    async with asked(open_api) as own:
        path = f"/v1/streams/{only_id(mesh)}?secret={own.headers[SECRET_HEADER]}"
        async with open_api.http.get(path):
            pass
        async with open_api.http.get(path) as still:
            gate.let(100)
            assert (await frames_of(own))[-1][1] == "[DONE]"
            assert (await frames_of(still))[-1][1] == "[DONE]"


async def test_words_that_no_answer_has_are_not_found(open_api: Served) -> None:
    url = URL(f"{open_api.url}/v1/streams/%C3%A4?secret=%FF%ED%A0%80", encoded=True)
    async with open_api.http.get(url, headers={SECRET_HEADER: "ÿ"}) as reply:
        assert reply.status == 404
    async with open_api.http.get(URL(f"{open_api.url}/v1/streams?secret=%ED%A0%80", encoded=True)) as listed:
        assert (await listed.json())["data"] == []


async def test_there_is_a_most_of_readers(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    async with asked(open_api) as own:
        path = f"/v1/streams/{only_id(mesh)}?secret={own.headers[SECRET_HEADER]}"
        replies = [await open_api.http.get(path) for _ in range(9)]
        assert [reply.status for reply in replies] == [200] * 8 + [429]
        gate.let(100)
        for reply in replies:
            reply.close()
        await own.text()


async def test_choices_and_tool_calls_are_read_as_they_were_asked_for(open_api: Served, mesh: ScriptedMesh) -> None:
    gate = Gate(mesh)
    async with asked(open_api, n=3) as own:
        path = f"/v1/streams/{mesh.requests[0].request_id}?secret={own.headers[SECRET_HEADER]}"
        async with open_api.http.get(path, headers={"Last-Event-ID": "2"}) as refused:
            assert refused.status == 400
        async with open_api.http.get(path) as other:
            gate.let(100)
            mine, theirs = without_ids(await frames_of(own)), without_ids(await frames_of(other))
    for index in range(3):
        assert [one for one in mine[:-1] if one["choices"][0]["index"] == index] == [
            one for one in theirs[:-1] if one["choices"][0]["index"] == index
        ]
