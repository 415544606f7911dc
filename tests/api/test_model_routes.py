"""Search, cards, deleting and downloads over HTTP."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from msgspec.structs import replace

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.errors import error_response
from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, entry_of
from exo_mesh.errors import FetchError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.api.scripted_mesh import ScriptedMesh, Served, served

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
ONGOING = entry_of("peer1", "alpha", DownloadInfo("org/at-hub", DownloadState.ONGOING, 50, 100, 25.0, 2.0, (0, 4)))
HI = [{"role": "user", "content": "Hi"}]


async def call(api: Served, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with api.http.request(method, path, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def test_the_hub_is_searched(api: Served) -> None:
    status, found = await call(api, "GET", "/models/search?query=hub&limit=5")
    assert status == 200
    assert found["data"] == [
        {"id": "org/at-hub", "downloads": 0, "likes": 0, "num_bytes": 10**9, "is_gated": False, "tags": []}
    ]
    api.mesh.offline = True
    status, refused = await call(api, "GET", "/models/search?query=hub")
    assert (status, refused["error"]["code"]) == (503, "fetch_failed")
    assert refused["error"]["message"].endswith("asked; start it without --offline")
    assert refused["error"]["details"] == {"remedy": "start it without --offline", "is_final": False}


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("GET", "/models/search", None, "query"),
        ("GET", "/models/search?query=%20", None, "query"),
        ("GET", "/models/search?query=a%0ab", None, "query"),
        ("GET", f"/models/search?query={'a' * 201}", None, "query"),
        ("GET", "/models/search?query=a&limit=0", None, "limit"),
        ("GET", "/models/search?query=a&limit=101", None, "limit"),
        ("POST", "/models/add", {}, "repo"),
        ("POST", "/models/add", {"repo": "a b"}, "repo"),
        ("POST", "/models/add", {"repo": "../../etc"}, "repo"),
        ("POST", "/models/add", {"repo": "a/b", "colour": "red"}, "colour"),
        ("POST", "/download/start", {}, "model"),
        ("POST", "/download/start", {"model": ""}, "model"),
        ("POST", "/download/start", {"model": "m\n"}, "model"),
        ("POST", "/download/start", {"model": "m", "peers": [""]}, "peers"),
        ("POST", "/download/start", {"model": "m", "peers": ["p"] * 65}, "peers"),
        ("POST", "/download/start", {"model": "m", "whole": "yes"}, "whole"),
        ("GET", "/v1/download/progress?stream=maybe", None, "stream"),
        ("DELETE", "/models/m?peers=a,,b", None, "peers"),
    ],
)
async def test_odd_input_is_refused_by_name(api: Served, method: str, path: str, body: Any, param: str) -> None:
    status, answer = await call(api, method, path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_cards_are_added_and_deleted(api: Served) -> None:
    status, made = await call(api, "POST", "/models/add", {"repo": "org/name@v1.0"})
    assert (status, made["id"], made["object"]) == (201, "org/name@v1.0", "model")
    assert (await call(api, "DELETE", "/models/custom/org/name@v1.0"))[1]["deleted"] is True
    assert (await call(api, "DELETE", "/models/custom/org/name@v1.0"))[0] == 404
    assert not api.mesh.deleted, "a card is no file"


@pytest.mark.parametrize("root", ["/models", "/v1/models"])
async def test_models_are_deleted(api: Served, root: str) -> None:
    api.mesh.names = ("org/name",)
    status, answer = await call(api, "DELETE", f"{root}/org/name?peers=alpha,beta")
    assert (status, answer["deleted"], answer["peers"]) == (200, True, ["peer1"])
    assert answer["freed_bytes"] == 1_500_000
    assert api.mesh.deleted == [("org/name", ("alpha", "beta"))]
    status, answer = await call(api, "DELETE", f"{root}/org/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_storage_is_shown_and_a_store_that_is_not_there_is_named(api: Served) -> None:
    storage = (await call(api, "GET", "/store/storage"))[1]
    assert storage["models"] and storage["path"] == "/models"
    for method, path in (
        ("GET", "/store/health"),
        ("POST", "/store/models/org/name/download"),
        ("DELETE", "/store/models/org/name"),
        ("POST", "/store/purge-staging"),
        ("GET", "/store/models/org/name/download/status"),
    ):
        status, answer = await call(api, method, path)
        assert (status, answer["error"]["code"]) == (503, "no_store")
        assert "no model store is configured" in answer["error"]["message"]


class ScriptedStore:
    """A store with the models `names`, which fetches whatever it is asked for, and never comes to an end."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.fetching: list[str] = []
        self.purged: list[tuple[str, ...]] = []

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "host": {"id": "peer1", "name": "alpha"}}

    def registry(self) -> list[dict[str, Any]]:
        return [{"id": name, "whole": True} for name in self.names]

    def downloads(self, model: str = "") -> list[DownloadEntry]:
        entries = [entry_of("peer1", "alpha", DownloadInfo(name, DownloadState.PENDING)) for name in self.fetching]
        return [one for one in entries if model in ("", one.model)]

    async def start(self, model: str) -> list[DownloadEntry]:
        self.fetching.append(model)
        return self.downloads(model)

    async def delete(self, model: str) -> bool:
        return model in self.names

    async def purge(self, peers: Sequence[str]) -> list[str]:
        self.purged.append(tuple(peers))
        return list(peers)


async def test_the_model_store_is_shown_filled_and_emptied(api: Served) -> None:
    api.mesh.services.store.store = store = ScriptedStore("org/here")
    assert (await call(api, "GET", "/store/health"))[1]["host"]["name"] == "alpha"
    assert [one["id"] for one in (await call(api, "GET", "/store/registry"))[1]["data"]] == ["org/here"]
    status, answer = await call(api, "POST", "/store/models/org/new/download")
    assert (status, answer["data"][0]["model"]) == (202, "org/new")
    assert (await call(api, "GET", "/store/downloads"))[1] == answer
    for name, state in (("org/new", "pending"), ("org/here", "completed")):
        assert (await call(api, "GET", f"/store/models/{name}/download/status"))[1]["state"] == state
    assert (await call(api, "GET", "/store/models/org/other/download/status"))[0] == 404
    assert (await call(api, "DELETE", "/store/models/org/here"))[1]["deleted"] is True
    assert (await call(api, "DELETE", "/store/models/org/other"))[0] == 404
    assert (await call(api, "POST", "/store/purge-staging?peers=beta"))[1]["peers"] == ["beta"]
    assert (await call(api, "POST", "/store/purge-staging?peers=,"))[0] == 400
    assert store.purged == [("beta",)]


async def test_a_download_is_started_shown_and_cancelled(api: Served) -> None:
    status, answer = await call(
        api, "POST", "/download/start", {"model": "org/at-hub", "peers": ["peer1"], "whole": True}
    )
    assert status == 202
    [entry] = answer["data"]
    assert (entry["peer_id"], entry["model"], entry["state"], entry["is_whole"]) == (
        "peer1",
        "org/at-hub",
        "pending",
        True,
    )
    assert (await call(api, "GET", "/v1/download/progress"))[1] == answer
    assert (await call(api, "DELETE", "/download/beta/org/at-hub"))[0] == 404
    assert (await call(api, "DELETE", "/download/alpha/org/at-hub"))[1]["cancelled"] is True
    assert (await call(api, "DELETE", "/download/peer1/org/at-hub"))[0] == 404
    assert (await call(api, "GET", "/v1/download/progress"))[1]["data"] == []


@pytest.fixture
async def quick(mesh: ScriptedMesh) -> AsyncIterator[Served]:
    """A server whose progress streams look often, and comment soon."""
    options = ApiOptions(access=AccessPolicy(open_admin=True), progress_s=0.01, progress_comment_s=0.05)
    async with served(mesh, options) as server:
        yield server


async def next_event(reply: ClientResponse) -> dict[str, Any] | None:
    """The data of the next event; None for a comment."""
    line = (await reply.content.readuntil(b"\n\n")).decode().strip()
    return None if line.startswith(":") else json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    ("path", "headers"), [("?stream=1", {}), ("", {"Accept": "text/event-stream"})], ids=["query", "header"]
)
async def test_progress_comes_as_events_when_it_changes(quick: Served, path: str, headers: dict[str, str]) -> None:
    quick.mesh.progress = [ONGOING]
    async with asyncio.timeout(5), quick.http.get(f"/v1/download/progress{path}", headers=headers) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        first = await next_event(reply)
        assert first is not None
        assert first["data"][0]["done_bytes"] == 50 and first["data"][0]["layers"] == [0, 4]
        assert await next_event(reply) is None, "nothing has changed"
        quick.mesh.progress = [replace(ONGOING, state=DownloadState.COMPLETED, done_bytes=100)]
        while (event := await next_event(reply)) is None:
            pass
        assert event["data"][0]["state"] == "completed"


async def test_a_model_of_the_hub_is_found_for_a_chat_a_placement_and_a_preview(api: Served) -> None:
    status, answer = await api.chat(model="org/at-hub")
    assert (status, answer["model"]) == (200, "org/at-hub")
    api.mesh.at_hub = ("org/second", "org/third")
    assert (await call(api, "POST", "/instance", {"model": "org/second"}))[0] == 201
    assert (await call(api, "GET", "/instance/previews?model=org/third"))[0] == 200
    status, answer = await api.chat(model="org/none")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_strangers_on_an_open_mesh_start_no_download(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions()) as api:
        status, answer = await api.chat(model="org/at-hub")
        assert (status, answer["error"]["code"]) == (403, "insufficient_permissions")
        assert "Downloading a model needs local rights or a key" in answer["error"]["message"]
        assert (await call(api, "GET", "/instance/previews?model=org/at-hub"))[0] == 403
        status, answer = await call(api, "POST", "/download/start", {"model": "org/at-hub"})
        assert status == 403 and "local rights" in answer["error"]["message"]
        assert "path" not in (await call(api, "GET", "/store/storage"))[1]
        status, answer = await api.chat(model="gpt-4")
        assert status == 404, "no hub id"
        assert mesh.names == ("exo-mesh-demo",) and not mesh.progress


async def test_a_key_is_enough_to_chat_with_a_model_of_the_hub(mesh: ScriptedMesh, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    text, key = new_key(Role.USE, NOW)
    keys.write([key])
    async with served(mesh, ApiOptions(access=AccessPolicy(keys=keys))) as api:
        chat = {"model": "org/at-hub", "messages": HI}
        assert (await call(api, "POST", "/v1/chat/completions", chat, text))[0] == 200
        assert (await call(api, "POST", "/download/start", {"model": "org/at-hub"}, text))[0] == 403


@pytest.mark.parametrize("is_final", [True, False])
def test_clients_are_told_to_try_again_only_where_that_can_help(is_final: bool) -> None:
    answer = error_response(FetchError("m is gated", is_final=is_final))
    assert ("Retry-After" in answer.headers) is not is_final


async def test_a_download_that_failed_says_what_helps(mesh: ScriptedMesh) -> None:
    async def find(name: str, *, may_download: bool) -> Any:
        raise FetchError(f"{name} is gated", remedy="set HF_TOKEN on alpha", is_final=True)

    mesh.services.models.find = find  # type: ignore[method-assign]
    async with served(mesh, ApiOptions(access=AccessPolicy(open_admin=True))) as api:
        status, answer = await api.chat(model="org/gated")
        assert (status, answer["error"]["message"]) == (503, "org/gated is gated; set HF_TOKEN on alpha")
