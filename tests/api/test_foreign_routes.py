"""docs/reference/routes.md says which routes of other programs there are; what it says is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from exo_mesh.api.app import build_app
from exo_mesh.api.compat.absent import ABSENT
from exo_mesh.api.routes import ROUTES
from exo_mesh.domain.download import DownloadInfo, DownloadState, entry_of
from tests.api.scripted_mesh import ScriptedMesh, Served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "routes.md"
MAY_BE_ABSENT = {
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/images/edits"),
    ("POST", "/bench/images/generations"),
    ("POST", "/bench/images/edits"),
    ("GET", "/images/{}"),
    ("GET", "/filesystem/browse"),
}
"""The only routes of the seeds that exo-mesh may refuse."""


def nameless(path: str) -> str:
    """The path with its parameters but without their names."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def documented() -> dict[tuple[str, str], str]:
    """The first table of the page: (method, path) -> the answer, works or 501."""
    rows = re.findall(r"^\| `([A-Z]+) (/.*?) \| (works|501)", PAGE.read_text(), re.MULTILINE)
    return {
        (method, nameless(path)): answer for method, paths, answer in rows for path in re.findall(r"(/[^`]*)`", paths)
    }


async def test_every_documented_route_is_in_the_table_of_the_node(mesh: ScriptedMesh) -> None:
    table = build_app(mesh.services)[ROUTES]
    known = {(row.method, nameless(path)) for row in table for path in row.paths}
    page = documented()
    assert len(page) > 85, "the pattern finds the rows"
    assert page.keys() <= known


async def test_only_the_routes_that_may_be_absent_are(mesh: ScriptedMesh) -> None:
    absent = {route for route, answer in documented().items() if answer == "501"}
    assert absent == MAY_BE_ABSENT == {(method, nameless(path)) for method, path in ABSENT}


@pytest.mark.parametrize(("method", "path"), ABSENT)
async def test_an_absent_route_says_why_and_what_to_use_instead(api: Served, method: str, path: str) -> None:
    async with api.http.request(method, path.replace("{id}", "x.png"), data=b"\x00not json") as reply:
        answer = await reply.json()
    assert (reply.status, answer["error"]["code"]) == (501, "not_implemented")
    assert answer["error"]["message"] == ABSENT[method, path]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b/results"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/f/content"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/b"),
    ],
)
async def test_routes_for_files_of_requests_name_the_command_that_runs_them(
    api: Served, method: str, path: str
) -> None:
    async with api.http.request(method, path) as reply:
        answer = await reply.json()
    assert reply.status == 404 and "exo-mesh batch" in answer["error"]["message"]


async def test_the_older_lists_of_models_have_models_and_downloads(api: Served) -> None:
    info = DownloadInfo("org/other", DownloadState.ONGOING, 25, 100)
    api.mesh.progress.append(entry_of("p1", "alpha", info))
    async with api.http.get("/initial_models") as reply:
        listed = await reply.json()
    async with api.http.get("/modelpool") as reply:
        events = [line.removeprefix("data: ") for line in (await reply.text()).splitlines() if line]
    assert listed["exo-mesh-demo"]["downloaded"] is True
    assert (listed["org/other"]["downloaded"], listed["org/other"]["download_percentage"]) == (False, 25.0)
    assert events[-1] == "[DONE]"
    assert {name: entry for event in events[:-1] for name, entry in json.loads(event).items()} == listed


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/api/api/chat", "/api/chat"),
        ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1//chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/openai/deployments/m/chat/completions", "/chat/completions"),
        ("POST", "/completion", "/completions"),
        ("POST", "/embedding", "/embeddings"),
        ("GET", "/v1/health", "/health"),
        ("GET", "/api/v0/models", "/models"),
        ("GET", "/v1/messages/", ""),
        ("POST", "/v1/audio/speech", ""),
        ("GET", "/" + "a/" * 3000, ""),
    ],
)
async def test_a_path_that_is_almost_a_route_is_answered_with_the_route(
    api: Served, method: str, path: str, near: str
) -> None:
    async with api.http.request(method, path) as reply:
        answer = await reply.json()
    error = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
    assert reply.status == 404
    assert error.endswith(f"; did you mean {near}?" if near else "; GET / lists the routes"), error
