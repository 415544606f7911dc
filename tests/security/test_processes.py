"""Real processes of a closed mesh: what they show, and what they never show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of, running_node
from exo_mesh.security.secret import new_secret, write_new
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually, read_until, run, start


@pytest.fixture
def secret(tmp_path: Path) -> str:
    text = new_secret()
    write_new(tmp_path / "secret", text)
    return text


@pytest.fixture
def nodes(tmp_path: Path, secret: str) -> Iterator[list[ChildNode]]:
    """Two nodes: one has the secret from a file, the other from the environment."""
    children: list[ChildNode] = []
    try:
        for name in ("alpha", "beta"):
            home = tmp_path / name
            home.mkdir()
            flags = ["--name", name, "--api-port", "0", "--log-level", "debug", *QUIET_FLAGS]
            environ = clean_environ(home)
            if children:
                flags += ["--bootstrap-peers", children[0].wait_ready(60)["grpc_address"]]
                environ["EXO_MESH_SECRET"] = secret
            else:
                flags += ["--secret-file", str(tmp_path / "secret")]
            children.append(ChildNode(flags, home / "log", environ))
        yield children
    finally:
        for child in children:
            child.stop()


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is one of the lines")
def test_the_lines_that_a_closed_node_prints_to_ask_it_something_work_as_they_are(secret: str, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    flags = [*QUIET_FLAGS, "--engine", "numpy", "--api-port", "0", "--secret-file", str(tmp_path / "secret")]
    node = start([*flags, "--home", str(home)], tmp_path)
    try:
        shown = read_until(node, "Ctrl-C")
        asked = shown[shown.index("exo-mesh run") : shown.rindex("Ctrl-C")]
        environ = clean_environ(tmp_path)
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        done = subprocess.run(
            ["bash", "-euc", asked], check=False, capture_output=True, timeout=60, text=True, env=environ
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("7, 8, 9") == 2 and secret not in shown
    finally:
        node.terminate()
        node.communicate(timeout=20)


def test_a_chat_over_two_processes_and_no_trace_of_the_secret(
    nodes: list[ChildNode], secret: str, tmp_path: Path
) -> None:
    events = [node.wait_ready(60) for node in nodes]
    assert [event["mesh_is_open"] for event in events] == [False, False]
    client = client_of(events[1])
    assert eventually(lambda: len(client.get("/state")["view"]["peers"]) == 2)
    instance = client.post("/instance", {"model": "exo-mesh-demo", "min_peers": 2}, 60)
    assert len({stage["peer"] for stage in instance["stages"]}) == 2
    body = {"model": "exo-mesh-demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello."}]}
    assert client.post("/v1/chat/completions", body, 60)["usage"]["completion_tokens"] == 4
    assert client.get("/health")["mesh"] == "closed"

    shown = [json.dumps(client.get(path)) for path in ("/state", "/health", "/v1/topology", "/v1/models")]
    shown += [json.dumps(event) for event in events]
    family = [one for node in nodes for one in psutil.Process(node.pid).children(recursive=True)]
    assert len(family) >= 2
    for process in family + [psutil.Process(node.pid) for node in nodes]:
        shown.append(" ".join(process.cmdline()))
    for runner in family:
        shown.append(json.dumps(runner.environ()))
    shown += [
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and path.name != "secret"
    ]
    for text in shown:
        assert secret not in text and "PRIVATE KEY" not in text and "Handshake failed" not in text


@pytest.mark.extended
def test_strangers_on_the_network_need_a_key(secret: str, tmp_path: Path) -> None:
    """Being on this machine gives no rights: without the token of its home a caller is a stranger."""
    home = tmp_path / "gamma"
    home.mkdir()
    flags = ["--api-port", "0", "--secret-file", str(tmp_path / "secret"), *QUIET_FLAGS]
    with running_node(home, flags, clean_environ(home)) as child:
        url = child.ready["api_url"]
        assert run(["status", "--api-url", url], home).returncode == 0
        assert run(["status", "--api-url", url, "--home", str(tmp_path)], home).returncode == 1
        refused = run(["ps", "--api-url", url, "--home", str(tmp_path)], home)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "needs a valid key" in refused.stderr
        key = run(["key", "new", "--role", "use"], home).stdout.strip()
        os.environ["EXO_MESH_API_KEY"] = key
        try:
            client = ApiClient(url)
            assert client.get("/state")["view"]["instances"] == []
            with pytest.raises(Exception, match="role admin"):
                client.post("/instance", {"model": "exo-mesh-demo"})
        finally:
            del os.environ["EXO_MESH_API_KEY"]


@pytest.mark.extended
def test_a_readable_secret_file_is_warned_about(secret: str, tmp_path: Path) -> None:
    (tmp_path / "secret").chmod(0o644)
    flags = ["--api-port", "0", "--secret-file", str(tmp_path / "secret"), *QUIET_FLAGS]
    (tmp_path / "home").mkdir()
    with running_node(tmp_path / "home", flags, clean_environ(tmp_path / "home")) as child:
        assert any("chmod 600" in note for note in child.ready["notes"])
