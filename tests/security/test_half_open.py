"""Sockets that never send a whole request, against a real node that may open few files."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from tests.support.processes import COMMAND, QUIET_FLAGS, clean_environ, read_until

FILES, SOCKETS = 256, 300
HELD_S = 1.5
KINDS = {
    "silent": b"",
    "half a head": b"POST / HTTP/1.1\r\nX: ",
    "half a body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    "idle": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@contextmanager
def limited_node(home: Path, limit: str) -> Iterator[tuple[subprocess.Popen[str], ApiClient]]:
    """A node whose shell ran `ulimit` first."""
    command = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *COMMAND, "serve", *QUIET_FLAGS, "--api-port", "0"]
    with (home / "log").open("w") as log:
        node = subprocess.Popen(
            [*command, "--log-format", "json"], stdout=subprocess.PIPE, stderr=log, text=True, env=clean_environ(home)
        )
        try:
            yield node, ApiClient(json.loads(read_until(node, '"event": "ready"').splitlines()[-1])["api_url"])
        finally:
            node.kill()
            node.communicate()


@contextmanager
def half_open(url: str, count: int, sent: bytes) -> Iterator[None]:
    """Hold so many connections; those that the node closes stay closed."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with ExitStack() as held:
        for _ in range(count):
            held.enter_context(connection := socket.create_connection((host, int(port)), timeout=5))
            connection.sendall(sent)
        yield


@pytest.mark.extended
@pytest.mark.timeout(90)
def test_a_node_that_may_open_few_files_outlives_them(tmp_path: Path) -> None:
    with limited_node(tmp_path, f"-n {FILES}") as (node, api):
        process = psutil.Process(node.pid)
        api.get("/health")
        idle_bytes = process.memory_info().rss
        for kind, sent in KINDS.items():
            with half_open(api.url, SOCKETS, sent):
                until = time.monotonic() + HELD_S
                while time.monotonic() < until:
                    assert api.get("/healthz", 5), kind
                assert process.memory_info().rss < 1.5 * idle_bytes, kind
        assert [reason["code"] for reason in api.get("/health")["reasons"]] == []
        assert "Too many open files" not in (tmp_path / "log").read_text()
        with half_open(api.url, 5, KINDS["half a head"]), half_open(api.url, 5, KINDS["half a body"]):
            assert api.get("/healthz")
            node.send_signal(signal.SIGTERM)
            assert node.wait(5) == 0


def test_the_soft_limit_of_open_files_is_raised() -> None:
    code = "from exo_mesh.machine import open_files as f; print(f.limit(), f.raise_limit(), f.limit())"
    shell = ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn 2048; exec "$@"', "sh", sys.executable, "-c", code]
    shown = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["256", "2048", "2048"]
