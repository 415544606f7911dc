"""A real node answers clients of Ollama at a port of its own, and runs without it if the port is taken."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import MODEL, control_ports, mesh
from tests.support.processes import eventually

pytestmark = pytest.mark.extended


def call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=60) as reply:
        return reply.status, reply.read().decode()


def test_the_port_serves_the_api_and_loads_and_unloads_a_model(tmp_path: Path) -> None:
    (port,) = control_ports(1)
    base = f"http://127.0.0.1:{port}"
    with mesh(tmp_path, [["--ollama-port", str(port)]], engine="numpy") as (peer,):
        assert call(f"{base}/") == (200, "Ollama is running")
        assert call(f"{base}/", method="HEAD") == (200, "")
        assert "Ollama is running" not in call(peer.url)[1]
        loaded = json.loads(call(f"{base}/api/generate", {"model": f"{MODEL}:latest", "keep_alive": "1h"})[1])
        assert (loaded["done_reason"], loaded["model"]) == ("load", f"{MODEL}:latest")
        (running,) = json.loads(call(f"{base}/api/ps")[1])["models"]
        assert running["name"] == MODEL and running["size_vram"] > 0
        asked = {"model": MODEL, "prompt": "Hi", "stream": False, "options": {"num_predict": 3}}
        assert json.loads(call(f"{base}/api/generate", asked)[1])["eval_count"] == 3
        unloaded = json.loads(call(f"{base}/api/chat", {"model": MODEL, "keep_alive": 0})[1])
        assert unloaded["done_reason"] == "unload"
        assert eventually(lambda: json.loads(call(f"{base}/api/ps")[1])["models"] == [], 15)


def test_a_taken_port_is_one_note_and_the_node_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with mesh(tmp_path, [["--ollama-port", str(port)]], engine="numpy") as (peer,):
            (note,) = [note for note in peer.ready["notes"] if "--ollama-port" in note]
            assert f"--ollama-port {port} is taken" in note
            assert json.loads(call(f"{peer.url}/api/version")[1])["version"]
