"""A node on a machine that is said to be small: what it shows of memory, what it refuses, what it logs of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of
from exo_mesh.errors import MeshError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import MODEL
from tests.support.processes import clean_environ, eventually

FLAGS = ["--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none", "--engine", "dummy"]
LONG = "long"


def start(home: Path, flags: list[str], **environ: str) -> tuple[ChildNode, ApiClient]:
    home.mkdir()
    node = ChildNode([*FLAGS, *flags], home / "node.log", {**clean_environ(home), **environ})
    try:
        return node, client_of(node.wait_ready(60))
    except MeshError:
        node.stop()
        raise


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ApiClient]]:
    """16 GiB by the variable of older programs; a request may take 2 s, a token 20 ms; the first forward fails."""
    home = tmp_path_factory.mktemp("one") / "home"
    write_checkpoint(home.parent / LONG, TinyModel(layers=2, hidden=16, intermediate=32, context=20_000))
    flags = ["--models-dir", str(home.parent), "--response-timeout", "2", "--engine-option", "cost_ms=20,fail_at=1"]
    child, api = start(home, flags, OVERRIDE_MEMORY_MB="16384", REQUEST_LOG_MAX="3")
    api.post("/instance", {"model": LONG}, 90)
    yield home, api
    child.stop()


def test_an_overridden_machine_is_shown_with_its_size_and_the_threshold_that_goes_with_it(
    node: tuple[Path, ApiClient],
) -> None:
    _, api = node
    told = api.get("/memory?scope=cluster")
    assert (told["total_bytes"], told["threshold_pct"], told["level"]) == (2**34, 96.88, "ok")
    (peer,) = told["peers"]
    assert peer["total_bytes"] == 2**34 and 0 < peer["usable_bytes"] < 2**34
    assert peer["usable_bytes"] < peer["headroom_bytes"] < 2**34 - 2**29 and peer["short"] == []
    assert api.get("/memory/live")[-1]["total_bytes"] == 2**34


@pytest.mark.extended
async def test_each_way_to_end_is_one_line_without_text(node: tuple[Path, ApiClient]) -> None:
    home, api = node
    async with aiohttp.ClientSession() as http:
        assert (await ask(http, api, "/v1/completions", body(5)))["error"]["code"] == "engine_error"
        assert (await ask(http, api, "/v1/completions", body(5)))["usage"]["completion_tokens"] == 5
        late = await ask(http, api, "/v1/completions", body(10_000))
        assert late["choices"][0]["finish_reason"] == "length" and 0 < late["usage"]["completion_tokens"] < 10_000
        async with http.post(f"{api.url}/v1/completions", json={**body(10_000), "stream": True}) as reply:
            await reply.content.readline()
    log = home / "logs" / "requests.jsonl"
    assert eventually(lambda: log.is_file() and len(log.read_text().splitlines()) == 4, 10)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["error", "ok", "timeout", "cancelled"]
    assert [line["outcome"] for line in lines] == ["engine_error", "length", "length", "cancelled"]
    assert "fail_at" in lines[0]["error_message"] and not any(line["error_message"] for line in lines[1:])
    assert (lines[1]["output_tokens"], lines[1]["max_tokens"], lines[1]["kind"]) == (5, 5, "completion")
    assert lines[2]["output_tokens"] == late["usage"]["completion_tokens"]
    assert all(0 < line["memory_before_bytes"] < 2**34 and line["duration_s"] > 0 for line in lines)
    assert "secret" not in log.read_text() and "\\u" not in log.read_text()
    recent = api.get("/requests/recent")["requests"]
    stages = [one.pop("stages") for one in recent]
    assert {stage["names"][0] for ring in stages for stage in ring} == {api.get("/state")["view"]["peers"][0]["name"]}
    assert [[stage["layers"] for stage in ring] for ring in stages] == [[[0, 2]]] * 3
    assert recent == lines[:0:-1], "the last three are in memory, as REQUEST_LOG_MAX says"
    assert api.get("/requests/stats")["total"] == 4


def body(tokens: int) -> dict[str, Any]:
    return {"model": LONG, "prompt": "a secret question", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def ask(http: aiohttp.ClientSession, api: ApiClient, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    async with http.post(f"{api.url}{path}", json=wanted) as reply:
        answer: dict[str, Any] = await reply.json()
        return answer


@pytest.mark.extended
def test_what_does_not_fit_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    child, api = start(tmp_path / "tiny", [], OVERRIDE_MEMORY_MB="64")
    try:
        with pytest.raises(MeshError) as refused:
            api.post("/instance", {"model": MODEL}, 60)
        assert refused.value.code == "no_placement"
        needs_and_has = r"needs \d+ MB .*there is 0 MB: " + api.get("/state")["node_id"][:8]
        assert re.search(needs_and_has, str(refused.value)), str(refused.value)
        assert api.get("/memory")["total_bytes"] == 64 * 2**20
    finally:
        child.stop()
