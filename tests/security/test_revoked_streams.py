"""A revoked key or session ends the calls that run with it, of every kind, and no other call."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from exo_mesh.api import running_calls
from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, revoke
from exo_mesh.security.keys import session_key
from exo_mesh.security.local_token import PREFIX
from exo_mesh.security.secret import new_secret
from exo_mesh.security.sessions import PageSessions, number_of
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
TOKEN = PREFIX + "A" * 43
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 100_000}
LIVE = "/metrics/stream"


async def endless(request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
    """An answer that ends only if it is cancelled."""
    for index in range(100_000):
        yield TokenEvent(index, 5)
        await asyncio.sleep(0.005)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(running_calls, "LOOK_EVERY_S", 0.05)
    mesh = ScriptedMesh(write_text_model(tmp_path / "model"))
    mesh.script = endless
    file = KeyFile(tmp_path / FILE_NAME)
    policy = AccessPolicy(file, True, TOKEN, sessions=PageSessions(session_key(new_secret()), file))
    async with served(mesh, ApiOptions(access=policy)) as server:
        yield server


def opened(api: Served, key: str, path: str = "/v1/chat/completions") -> aiohttp.client._RequestContextManager:
    headers = {"Authorization": f"Bearer {key}"}
    return api.http.get(path, headers=headers) if path == LIVE else api.http.post(path, headers=headers, json=CHAT)


async def rest_of(reply: aiohttp.ClientResponse) -> bytes:
    """What still comes. A connection that is closed in mid-answer counts as its end."""
    got = b""
    try:
        async with asyncio.timeout(10):
            async for chunk in reply.content.iter_any():
                got += chunk
    except aiohttp.ClientPayloadError:
        pass
    return got


async def is_running(reply: aiohttp.ClientResponse) -> bool:
    assert reply.status == 200
    async with asyncio.timeout(5):
        return bool(await reply.content.readany())


async def test_a_revoked_key_ends_its_streams_and_no_others(api: Served, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / FILE_NAME)
    (text, key), (other_text, _) = file.add(Role.ADMIN, NOW), file.add(Role.USE, NOW)
    async with opened(api, text) as chat, opened(api, text, LIVE) as live, opened(api, other_text) as other:
        assert await is_running(chat) and await is_running(live) and await is_running(other)
        file.remove(key.id, NOW)
        said = await rest_of(chat)
        assert b'"code":"cancelled"' in said, "an event says why"
        await rest_of(live)
        assert await is_running(other) and len(api.mesh.running) == 1
        async with opened(api, text) as refused:
            assert refused.status == 401
    await api.mesh.ended.wait()


async def test_a_key_that_peers_revoked_or_that_left_the_file_ends_its_streams_too(api: Served, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / FILE_NAME)
    (text, key), (gone_text, gone) = file.add(Role.USE, NOW), file.add(Role.USE, NOW)
    async with opened(api, text) as one, opened(api, gone_text) as another:
        assert await is_running(one) and await is_running(another)
        file.path.write_text("not [ TOML")
        await asyncio.sleep(0)
        assert await is_running(one), "an unreadable file ends nothing that runs"
        file.path.write_text("")
        file.save([revoke(key.id, NOW)])
        await asyncio.gather(rest_of(one), rest_of(another))
    assert gone.id not in file.path.read_text()


async def test_a_revoked_session_ends_its_streams(api: Served, tmp_path: Path) -> None:
    async with api.http.post("/v1/session", headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
        made = await reply.json()
    async with opened(api, made["key"], LIVE) as page, opened(api, TOKEN, LIVE) as owner:
        assert await is_running(page) and await is_running(owner)
        KeyFile(tmp_path / FILE_NAME).refuse(number_of(made["id"]), NOW)
        await rest_of(page)
        assert await is_running(owner)
