"""A real node downloads a model from a hub on the loopback, shows it and deletes it, as a client of Ollama asks."""

from __future__ import annotations

import http.client
import json
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from exo_mesh.cli.client.child_node import client_of, running_node
from tests.support.hub import LoopbackHub
from tests.support.processes import clean_environ

pytestmark = pytest.mark.extended

DEMO = "org/demo"
FLAGS = ["--name", "alpha", "--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none",
         "--engine", "numpy"]  # fmt: skip


def call(ready: dict[str, Any], method: str, path: str, body: Any = None, *, token: str = "") -> tuple[int, list[Any]]:
    """The status, and the JSON of each line."""
    connection = http.client.HTTPConnection(urlsplit(ready["api_url"]).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    lines = [json.loads(line) for line in reply.read().splitlines()]
    connection.close()
    return reply.status, lines


def names(ready: dict[str, Any]) -> set[str]:
    return {model["name"] for model in call(ready, "GET", "/api/tags")[1][0]["models"]}


def test_a_model_is_pulled_answers_and_is_deleted(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with LoopbackHub() as hub:
        hub.add(DEMO, Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo")))
        environ = {**clean_environ(home), **hub.environment, "HF_HOME": str(home / "hf")}
        with running_node(home, FLAGS, environ) as node:
            ready = node.ready
            token = client_of(ready).local_token()
            status, (refused,) = call(ready, "POST", "/api/pull", {"model": DEMO})
            assert status == 403 and "changes an open mesh" in refused["error"]
            status, lines = call(ready, "POST", "/api/pull", {"model": DEMO}, token=token)
            assert status == 200, lines
            assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
            *_, last = [line for line in lines if "digest" in line]
            assert last["completed"] == last["total"] > 6_000_000
            (tag,) = [one for one in call(ready, "GET", "/api/tags")[1][0]["models"] if one["name"] == DEMO]
            assert last["digest"] == f"sha256:{tag['digest']}"
            asked = {"model": DEMO, "prompt": "Count from 7 to 12.", "stream": False, "options": {"temperature": 0}}
            assert call(ready, "POST", "/api/generate", asked)[1][0]["response"] == "7, 8, 9, 10, 11, 12"
            status, (in_use,) = call(ready, "DELETE", "/api/delete", {"model": DEMO}, token=token)
            assert status == 400 and "in use" in in_use["error"]
            client_of(ready).post("/model/unload", {"model": DEMO}, 30)
            assert call(ready, "DELETE", "/api/delete", {"model": DEMO}, token=token) == (200, [{}])
            assert DEMO not in names(ready)
            status, lines = call(ready, "POST", "/api/pull", {"model": "org/none", "stream": False}, token=token)
            assert status == 404 and 'there is no model "org/none"' in lines[0]["error"]
