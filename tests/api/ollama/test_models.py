"""Ollama's routes around models, its errors, and its port."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.ollama import pulling
from exo_mesh.api.ollama.describing import details_of, digest_of, model_info_of
from exo_mesh.api.ollama.pulling import PullFollower, PullPhase
from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, entry_of
from exo_mesh.domain.reports import InstanceReport
from exo_mesh.errors import FetchError
from exo_mesh.models.entry import ModelEntry
from tests.api.ollama.conftest import MODEL, USER, asked, whole
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.support.reports import report_of


async def got(api: Served, path: str) -> Any:
    async with api.http.get(path) as reply:
        assert reply.status == 200
        return await reply.json()


def download(state: DownloadState, done: int = 0, peer: str = "p1", reason: str = "") -> DownloadEntry:
    return entry_of(peer, f"name of {peer}", DownloadInfo("org/m", state, done, 100, reason=reason))


async def test_tags_lists_the_models_of_the_mesh(api: Served) -> None:
    for path in ("/api/tags", "/ollama/api/tags"):
        (model,) = (await got(api, path))["models"]
        assert (model["name"], model["model"]) == (MODEL, MODEL)
        assert re.fullmatch("[0-9a-f]{64}", model["digest"])
        assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
        assert set(model["details"]) == {
            "parent_model", "format", "family", "families", "parameter_size", "quantization_level",
        }  # fmt: skip


async def test_ps_lists_the_loaded_models_with_their_expiry(api: Served) -> None:
    assert await got(api, "/api/ps") == {"models": []}
    api.mesh.loaded = ("i1",)
    stages = [{"reserve_bytes": 5}, {"reserve_bytes": 7}]
    api.mesh.instances[0] = report_of(InstanceReport, id="i1", context_limit=128, stages=stages)
    (model,) = (await got(api, "/api/ps"))["models"]
    assert (model["name"], model["size"], model["size_vram"], model["context_length"]) == (MODEL, 12, 12, 128)
    assert datetime.fromisoformat(model["expires_at"]).year > 2100
    api.mesh.kept["i1"] = 60.0
    (model,) = (await got(api, "/api/ps"))["models"]
    assert datetime.fromisoformat(model["expires_at"]).timestamp() == 1_700_000_060


async def test_show_has_the_template_and_the_capabilities(able: Served) -> None:
    shown = await whole_post(able, "/api/show", {"model": MODEL, "verbose": True})
    assert "<tools>" in shown["template"]
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["general.architecture"] and "exo_mesh.context_limit" not in shown["model_info"]
    able.mesh.loaded = ("i1",)
    able.mesh.instances[0].context_limit = 128
    shown = await whole_post(able, "/api/show", {"model": MODEL})
    assert shown["model_info"]["exo_mesh.context_limit"] == 128
    status, reply = await asked(able, "/api/show", model="nope")
    assert status == 404 and reply == {"error": "no peer has nope"}
    async with able.http.post("/api/show", data=b"") as refused:
        assert refused.status == 400 and "model" in (await refused.json())["error"]


async def whole_post(api: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with api.http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return dict(await reply.json())


def test_the_details_of_a_model_come_from_its_card_and_its_name() -> None:
    entry = ModelEntry("org/Model-0.6B-4bit", (), (), 10, (), num_bytes=300, quantization="4bit", digest="ab" * 32)
    assert digest_of(entry) == "ab" * 32
    assert (details_of(entry).parameter_size, details_of(entry).quantization_level) == ("0.6B", "4bit")
    assert "general.parameter_count" not in model_info_of(entry)
    plain = ModelEntry("tiny", (), (), 10, (), num_bytes=7_000_000, quantization="bf16", num_layers=3)
    assert details_of(plain).parameter_size == "3.5M"
    assert model_info_of(plain)["general.parameter_count"] == 3_500_000
    assert digest_of(plain) == hashlib.sha256(b"tiny").hexdigest()


async def test_version_and_the_sign_of_life(api: Served) -> None:
    version = (await got(api, "/api/version"))["version"]
    assert re.fullmatch(r"0\.\d+\.\d+", version)
    async with api.http.get("/ollama") as reply:
        assert (reply.status, await reply.text()) == (200, "Ollama is running")
    async with api.http.head("/ollama") as reply:
        assert reply.status == 200


async def test_delete_takes_a_body_and_answers_404_for_an_unknown_model(api: Served) -> None:
    async with api.http.delete("/api/delete", json={"model": MODEL}) as reply:
        assert reply.status == 200
    assert api.mesh.deleted == [(MODEL, ())]
    async with api.http.delete("/api/delete", json={"name": "nope"}) as reply:
        assert reply.status == 404 and await reply.json() == {"error": "no peer has nope"}


@pytest.mark.parametrize("path", ["create", "copy", "push"])
async def test_what_is_missing_is_a_501_with_a_sentence(api: Served, path: str) -> None:
    for prefix in ("", "/ollama"):
        status, reply = await asked(api, f"{prefix}/api/{path}", input="x")
        assert status == 501 and re.fullmatch(r"exo-mesh does not \w+.*", reply["error"])


async def test_an_unknown_path_below_api_has_an_error_of_ollama(api: Served) -> None:
    async with api.http.post("/api/nope", json={}) as reply:
        assert reply.status == 404 and set(await reply.json()) == {"error"}
        assert "no route POST /api/nope" in (await reply.json())["error"]
    async with api.http.get("/api/chat") as reply:
        assert reply.status == 405 and isinstance((await reply.json())["error"], str)
    async with api.http.post("/v1/nope", json={}) as reply:
        assert isinstance((await reply.json())["error"], dict)
    async with api.http.get("/api/openapi.json") as reply:
        assert reply.status == 200


async def test_a_caller_without_rights_gets_an_error_of_ollama(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions()) as server:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            async with server.http.request(method, path, json={"model": MODEL}) as reply:
                assert reply.status == 403 and isinstance((await reply.json())["error"], str)
        assert (await whole(server, "/api/chat", messages=[USER]))["done"]
    async with served(mesh, ApiOptions(access=AccessPolicy(needs_key=True))) as server:
        async with server.http.get("/api/tags") as reply:
            assert reply.status == 401 and isinstance((await reply.json())["error"], str)
        async with server.http.get("/api/version") as reply:
            assert reply.status == 200


@pytest.fixture
async def pulls(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(pulling, "SETTLE_S", 0.0)
    options = ApiOptions(progress_s=0.01, access=AccessPolicy(open_admin=True))
    async with served(mesh, options) as server:
        yield server


async def test_pull_reports_progress_and_success(pulls: Served) -> None:
    async with pulls.http.post("/api/pull", json={"model": "org/at-hub"}) as reply:
        assert reply.content_type == "application/x-ndjson"
        lines = [json.loads(await reply.content.readline()) for _ in range(2)]
        (entry,) = pulls.mesh.progress
        done = DownloadInfo(entry.model, DownloadState.COMPLETED, 100, 100)
        pulls.mesh.progress = [entry_of(entry.peer_id, entry.peer_name, done)]
        lines += [json.loads(line) for line in (await reply.text()).splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"status": "success"}
    digest = lines[1]["digest"]
    assert [(line["digest"], line["completed"], line["total"]) for line in lines[1:-1]] == [
        (digest, 0, 100),
        (digest, 100, 100),
    ]


async def test_pull_without_a_stream_answers_at_the_end(pulls: Served) -> None:
    async def finish() -> None:
        while not pulls.mesh.progress:
            await asyncio.sleep(0.005)
        done = DownloadInfo("org/at-hub", DownloadState.COMPLETED, 100, 100)
        pulls.mesh.progress = [entry_of("peer1", "name", done)]

    finishing = asyncio.create_task(finish())
    reply = await whole_post(pulls, "/api/pull", {"name": "org/at-hub", "stream": False, "insecure": True})
    await finishing
    assert reply == {"status": "success"}


async def test_a_pull_of_an_unknown_model_is_a_404_and_a_failed_one_ends_with_an_error(pulls: Served) -> None:
    status, reply = await asked(pulls, "/api/pull", model="org/nowhere")
    assert status == 404 and isinstance(reply["error"], str)
    async with pulls.http.post("/api/pull", json={"model": "org/at-hub"}) as response:
        await response.content.readline()
        failed = DownloadInfo("org/at-hub", DownloadState.FAILED, 5, 100, reason="the disk is full", remedy="make room")
        pulls.mesh.progress = [entry_of("peer1", "alpha", failed)]
        last = json.loads((await response.text()).splitlines()[-1])
    assert last == {"error": "alpha could not download it: the disk is full; make room"}


def test_a_pull_ignores_what_ended_before_it_and_waits_for_late_peers() -> None:
    old = download(DownloadState.FAILED, peer="p2", reason="old")
    follower = PullFollower("org/m", "ab", [old], [download(DownloadState.PENDING)], 0.0)
    assert follower.take([old, download(DownloadState.ONGOING, 50)], 1.0) is PullPhase.UNDER_WAY
    assert (follower.line().completed, follower.line().total) == (50, 100)
    done = download(DownloadState.COMPLETED, 100)
    assert follower.take([old, done], 1.5) is PullPhase.UNDER_WAY  # another peer may still report
    assert follower.take([old, done], 2.5) is PullPhase.DONE


def test_a_pull_ends_with_an_error_if_it_is_cancelled_or_silent() -> None:
    ongoing = download(DownloadState.ONGOING, 50)
    follower = PullFollower("org/m", "ab", [], [ongoing], 0.0)
    with pytest.raises(FetchError, match="was cancelled"):
        follower.take([], 3.0)
    follower = PullFollower("org/m", "ab", [], [ongoing], 0.0)
    assert follower.take([ongoing], pulling.SILENCE_S - 1) is PullPhase.UNDER_WAY
    with pytest.raises(FetchError, match="has not changed"):
        follower.take([ongoing], pulling.SILENCE_S)


def test_a_model_that_is_there_is_pulled_at_once() -> None:
    done = download(DownloadState.COMPLETED, 100)
    follower = PullFollower("org/m", "ab", [done], [done], 0.0)
    assert follower.take([done], 0.0) is PullPhase.UNDER_WAY
    assert follower.take([done], pulling.SETTLE_S) is PullPhase.DONE


async def test_the_port_of_its_own_says_that_ollama_is_running(model_dir: Path) -> None:
    async with served(ScriptedMesh(model_dir), ApiOptions(), ollama=True) as server:
        base = server.ollama_url
        for method in (server.http.get, server.http.head):
            async with method(f"{base}/") as reply:
                assert reply.status == 200 and reply.content_type == "text/plain"
        async with server.http.get(f"{base}/") as reply:
            assert await reply.text() == "Ollama is running"
        async with server.http.get(f"{base}/api/tags") as reply:
            assert reply.status == 200
        async with server.http.get("/") as reply:
            assert "Ollama is running" not in await reply.text()
