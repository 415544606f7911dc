"""The routes of the web tools: who may call them, what they answer, and what they refuse."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.webtools.options import WebToolOptions
from exo_mesh.settings.config import ConfigError, default_settings
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.api.webtools.web_server import WebServer, web_server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/tools/web_search": {"query": "a mesh"},
    "/v1/tools/open_url": {"url": "http://127.0.0.1/"},
    "/v1/tools/extract_page": {"url": "http://127.0.0.1/"},
}


@pytest.fixture
async def site() -> AsyncIterator[WebServer]:
    async with web_server() as server:
        yield server


@pytest.fixture
async def tools(site: WebServer, mesh: ScriptedMesh) -> AsyncIterator[Served]:
    options = WebToolOptions(True, site.url(""), allowed={("127.0.0.1", site.port)})
    async with served(mesh, ApiOptions(access=OPEN_ADMIN, web_tools=options)) as api:
        yield api


async def call(api: Served, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with api.http.post(path, data=json.dumps(body)) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("path", BODIES)
async def test_the_tools_are_off_unless_the_operator_turns_them_on(api: Served, path: str) -> None:
    status, answer = await call(api, path, BODIES[path])
    assert (status, answer["error"]["code"]) == (503, "web_tools_off")
    assert "--web-tools" in answer["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_caller_without_a_key_may_not_browse_through_an_open_mesh(mesh: ScriptedMesh, path: str) -> None:
    options = ApiOptions(access=AccessPolicy(), web_tools=WebToolOptions(is_on=True))
    async with served(mesh, options) as api:
        status, answer = await call(api, path, BODIES[path])
    assert (status, answer["error"]["code"]) == (403, "insufficient_permissions")


@pytest.mark.parametrize("path", ["/v1/tools/open_url", "/v1/tools/extract_page"])
async def test_this_machine_is_refused_by_default(mesh: ScriptedMesh, site: WebServer, path: str) -> None:
    options = WebToolOptions(is_on=True, ports=frozenset({site.port}))
    async with served(mesh, ApiOptions(access=OPEN_ADMIN, web_tools=options)) as api:
        status, answer = await call(api, path, {"url": site.url("/page")})
    assert (status, answer["error"]["param"]) == (400, "url") and not site.calls


async def test_a_page_is_opened_with_its_title_and_final_address(tools: Served, site: WebServer) -> None:
    url = site.url("/hops/2")
    assert await call(tools, "/v1/tools/open_url", {"url": url}) == (
        200,
        {
            "url": url,
            "final_url": site.url("/page"),
            "title": "A mesh & more",
            "status_code": 200,
            "content_type": "text/html",
        },
    )


async def test_the_status_of_a_page_that_is_gone_is_told(tools: Served, site: WebServer) -> None:
    status, answer = await call(tools, "/v1/tools/open_url", {"url": site.url("/gone")})
    assert (status, answer["status_code"], answer["title"]) == (200, 404, "Gone")


async def test_the_text_of_a_page_is_extracted(tools: Served, site: WebServer) -> None:
    status, answer = await call(tools, "/v1/tools/extract_page", {"url": site.url("/page")})
    assert status == 200 and not answer["truncated"]
    assert answer["text"] == "# Rings\n\nOne peer sends to the next.\n\n- first\n- second"


async def test_a_long_page_is_cut_and_says_so(tools: Served, site: WebServer) -> None:
    status, answer = await call(tools, "/v1/tools/extract_page", {"url": site.url("/large"), "max_chars": 500})
    assert (status, len(answer["text"]), answer["truncated"]) == (200, 500, True)


async def test_a_page_without_text_is_refused_by_its_type(tools: Served, site: WebServer) -> None:
    status, answer = await call(tools, "/v1/tools/extract_page", {"url": site.url("/pdf")})
    assert status == 400 and "application/pdf" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tools/extract_page", {"url": "http://a.example", "max_chars": 499}, "max_chars"),
        ("/v1/tools/extract_page", {"url": "http://a.example", "max_chars": 50_001}, "max_chars"),
        ("/v1/tools/extract_page", {"url": "http://a.example", "depth": 2}, "depth"),
        ("/v1/tools/extract_page", {}, "url"),
        ("/v1/tools/open_url", {"url": 7}, "url"),
        ("/v1/tools/open_url", {"url": "ftp://a.example"}, "url"),
        ("/v1/tools/web_search", {"query": "x", "top_k": 0}, "top_k"),
        ("/v1/tools/web_search", {"query": "x", "top_k": 11}, "top_k"),
        ("/v1/tools/web_search", {"query": "  "}, "query"),
        ("/v1/tools/web_search", {"query": "x" * 401}, "query"),
    ],
)
async def test_a_wrong_field_is_named(tools: Served, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await call(tools, path, body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("service", ["searxng", "brave", "tavily"])
async def test_a_search_asks_the_service_as_it_documents(mesh: ScriptedMesh, site: WebServer, service: str) -> None:
    search = site.url("") if service == "searxng" else service
    options = WebToolOptions(True, search, "k-1", brave_url=site.url(""), tavily_url=site.url(""))
    async with served(mesh, ApiOptions(access=OPEN_ADMIN, web_tools=options)) as api:
        status, answer = await call(api, "/v1/tools/web_search", {"query": " a  mesh ", "top_k": 2})
    snippet = "d & e" if service == "brave" else "c"
    assert (status, answer["query"], answer["provider"]) == (200, "a mesh", service)
    assert answer["results"] == [
        {"title": "A mesh", "url": url, "snippet": snippet} for url in ("https://a.example/x", "http://b.example")
    ]
    assert ("k-1" in site.headers[0].get("Authorization", site.headers[0].get("X-Subscription-Token", ""))) is True
    assert site.calls[0][0] == ("/web/search" if service == "brave" else "/search")


async def test_a_service_that_does_not_answer_is_named_without_the_key(mesh: ScriptedMesh) -> None:
    options = WebToolOptions(True, "http://127.0.0.1:1", "k-1")
    async with served(mesh, ApiOptions(access=OPEN_ADMIN, web_tools=options)) as api:
        status, answer = await call(api, "/v1/tools/web_search", {"query": "x"})
    assert status == 503 and "searxng" in answer["error"]["message"] and "k-1" not in json.dumps(answer)


LIBRARY = """
class DDGS:
    def __init__(self, timeout):
        assert timeout < 10

    def text(self, query, max_results):
        if query == "nothing":
            raise ValueError("a message with the query nothing")
        while query == "slow":
            pass
        rows = [{"title": f"<b>{query}</b> {n}", "href": f"https://{n}.example", "body": "c &amp; d"} for n in range(9)]
        return [{"title": "no page", "href": "ftp://a", "body": ""}, *rows]
"""
"""In place of ddgs, which asks search engines of the Internet: the same call and the same rows."""


@pytest.fixture
async def keyless(mesh: ScriptedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    (tmp_path / "ddgs.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = WebToolOptions(is_on=True, search="ddgs")
    async with served(mesh, ApiOptions(access=OPEN_ADMIN, web_tools=options)) as api:
        yield api


async def test_a_search_without_a_key_is_made_in_a_child_process(keyless: Served) -> None:
    status, answer = await call(keyless, "/v1/tools/web_search", {"query": "a mesh", "top_k": 2})
    assert (status, answer["provider"]) == (200, "ddgs")
    assert answer["results"] == [
        {"title": f"a mesh {n}", "url": f"https://{n}.example", "snippet": "c & d"} for n in (0, 1)
    ]


async def test_an_error_of_the_library_does_not_repeat_the_query(keyless: Served) -> None:
    status, answer = await call(keyless, "/v1/tools/web_search", {"query": "nothing"})
    assert status == 503 and "(ValueError)" in answer["error"]["message"]
    assert "a message" not in answer["error"]["message"]


async def test_a_search_that_takes_too_long_is_ended(keyless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.api.webtools.searching.SEARCH_S", 0.5)
    status, answer = await call(keyless, "/v1/tools/web_search", {"query": "slow"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert not [child for child in psutil.Process().children() if "search_child" in " ".join(child.cmdline())]


async def test_a_search_without_the_library_says_how_to_install_it(
    mesh: ScriptedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddgs.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = ApiOptions(access=OPEN_ADMIN, web_tools=WebToolOptions(is_on=True, search="ddgs"))
    async with served(mesh, options) as api:
        status, answer = await call(api, "/v1/tools/web_search", {"query": "x"})
    assert (status, answer["error"]["code"]) == (503, "web_tools_off")
    assert 'pip install "exo-mesh[web]"' in answer["error"]["message"]


@pytest.mark.extended
async def test_the_real_library_is_called_as_it_wants(mesh: ScriptedMesh) -> None:
    """Without the Internet its engines fail, which is an error of the library's own kind."""
    pytest.importorskip("ddgs")
    options = ApiOptions(access=OPEN_ADMIN, web_tools=WebToolOptions(is_on=True, search="ddgs"))
    async with served(mesh, options) as api:
        status, answer = await call(api, "/v1/tools/web_search", {"query": "a mesh", "top_k": 1})
    assert status == 200 or "DDGSException" in answer["error"]["message"] or status == 504, answer


async def test_without_a_service_the_search_says_how_to_name_one(mesh: ScriptedMesh) -> None:
    options = ApiOptions(access=OPEN_ADMIN, web_tools=WebToolOptions(is_on=True))
    async with served(mesh, options) as api:
        status, answer = await call(api, "/v1/tools/web_search", {"query": "x"})
    assert (status, answer["error"]["code"]) == (503, "web_tools_off")
    assert "--web-search" in answer["error"]["message"]


def test_the_options_follow_the_settings(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k-1\n")
    settings = replace(
        default_settings(), web_tools=True, web_search="brave", web_search_key_file=key, web_tools_ports=(8080,)
    )
    options = WebToolOptions.of(settings)
    assert (options.is_on, options.search, options.search_key, options.ports) == (True, "brave", "k-1", {8080})
    assert "k-1" not in repr(options)
    assert not WebToolOptions.of(default_settings()).is_on


@pytest.mark.parametrize("content", [None, "", "two\nlines", "k" * 600, "\xff"])
def test_a_key_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content.encode("latin-1"))
    settings = replace(default_settings(), web_search="brave", web_search_key_file=key)
    with pytest.raises(ConfigError, match="--web-search-key-file"):
        WebToolOptions.of(settings)
    with pytest.raises(ConfigError, match="needs a key"):
        WebToolOptions.of(replace(settings, web_search_key_file=None))
