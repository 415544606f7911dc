"""Keys over the HTTP API: made, listed and revoked; the text is shown once."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.local_token import PREFIX
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
TOKEN = PREFIX + "A" * 43


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedMesh:
    return ScriptedMesh(write_text_model(tmp_path_factory.mktemp("text-model")))


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / FILE_NAME)


@pytest.fixture
async def api(scripted: ScriptedMesh, file: KeyFile) -> AsyncIterator[Served]:
    async with served(scripted, ApiOptions(access=AccessPolicy(file, True, TOKEN))) as server:
        yield server


async def ask(api: Served, method: str, path: str, key: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with api.http.request(method, path, headers={"Authorization": f"Bearer {key}"}, json=body) as reply:
        if "key" in (found := await reply.json()):
            assert reply.headers["Cache-Control"] == "no-store"
        return reply.status, found


async def test_a_key_is_made_used_listed_and_revoked(api: Served, file: KeyFile) -> None:
    status, made = await ask(api, "POST", "/v1/keys", TOKEN, {"role": "admin", "name": "laptop"})
    assert (status, made["role"], made["name"]) == (201, "admin", "laptop")
    status, used = await ask(api, "POST", "/v1/keys", made["key"])
    assert (status, used["role"]) == (201, "use"), "the least by default"
    status, listed = await ask(api, "GET", "/v1/keys", made["key"])
    assert {one["id"]: one["is_yours"] for one in listed["data"]} == {made["id"]: True, used["id"]: False}
    assert {one["name"] for one in listed["data"]} == {"laptop", ""}
    assert listed["scope"] == "mesh"
    for secret in (made["key"][12:], used["key"][12:]):
        assert secret not in str(listed) and secret not in file.path.read_text()
    assert (await ask(api, "GET", "/state", used["key"]))[0] == 200
    assert (await ask(api, "DELETE", f"/v1/keys/{used['id']}", made["key"]))[0] == 200
    assert (await ask(api, "GET", "/state", used["key"]))[0] == 401
    assert (await ask(api, "DELETE", f"/v1/keys/{used['id']}", made["key"]))[0] == 404
    assert [key.revoked != "" for key in file.read_all()] == [False, True], "so that no peer brings it back"


@pytest.mark.parametrize("body", [{"role": "owner"}, {"rule": "use"}, {"name": "a\n"}, {"name": 5}, [], "use"])
async def test_a_body_that_makes_no_sense_makes_no_key(api: Served, file: KeyFile, body: Any) -> None:
    status, answer = await ask(api, "POST", "/v1/keys", TOKEN, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert file.read() == []


async def test_nobody_closes_an_open_mesh_from_afar(scripted: ScriptedMesh, file: KeyFile) -> None:
    async with served(scripted, ApiOptions(access=AccessPolicy(file, False, TOKEN, True))) as api:
        for method, path in (("POST", "/v1/keys"), ("DELETE", "/v1/keys/00000000")):
            status, answer = await ask(api, method, path, "")
            assert status == 403 and "--open-admin does not allow changes to keys" in answer["error"]["message"]
        assert not file.configured
        assert (await ask(api, "POST", "/v1/keys", TOKEN))[0] == 201
        assert (await ask(api, "GET", "/v1/keys", ""))[0] == 401, "the first key closes the API"


async def test_a_full_table_is_said(api: Served, file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.security.api_keys.MAX_KEYS", 1)
    file.add(Role.USE, NOW)
    status, answer = await ask(api, "POST", "/v1/keys", TOKEN)
    assert status == 400 and "there are already 1 keys" in answer["error"]["message"]
