"""A node that is told to stop lets its streams finish; what it must cut says how to go on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import free_port
from tests.support.processes import COMMAND, QUIET_FLAGS, clean_environ, eventually, run, start

FLAGS = ["--api-port", "0", "--log-format", "json", "--engine-option", "cost_ms=20", *QUIET_FLAGS]


class ServedNode:
    """A node as an operator starts it: no standard input, so that only signals and calls stop it."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self.process = start([*FLAGS, *flags], home)
        self.ready = self.event("ready")
        self.api = ApiClient(self.ready["api_url"], str(home))

    def event(self, name: str) -> dict[str, Any]:
        """The next event of this name; fails if its output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"') and (event := json.loads(line))["event"] == name:
                return dict(event)
        raise AssertionError(f"no event {name}")

    def chat(self, max_tokens: int) -> HTTPResponse:
        """A stream whose first piece is there."""
        body = {"max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        body["messages"] = [{"role": "user", "content": "Count from 7 to 20."}]
        request = urllib.request.Request(
            f"{self.ready['api_url']}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Idempotency-Key": f"k{max_tokens}"},
        )
        stream: HTTPResponse = urllib.request.urlopen(request, timeout=60)
        while b'"content":"' not in stream.readline():
            pass
        return stream

    def wait(self, deadline_s: float) -> int:
        return self.process.wait(deadline_s)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedNode]:
    served = ServedNode(tmp_path)
    yield served
    if served.process.poll() is None:
        os.killpg(served.process.pid, signal.SIGKILL)
    served.process.communicate()


@pytest.mark.extended
def test_a_signal_lets_a_stream_finish_and_refuses_new_requests(node: ServedNode) -> None:
    stream = node.chat(100)
    node.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: node.api.get("/healthz")["status"] == "alive")
    with pytest.raises(Exception, match="stopping") as refused:
        eventually(lambda: not node.api.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
    assert getattr(refused.value, "code", "") == "node_stopping"
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert node.wait(5) == exit_codes.OK


@pytest.mark.extended
def test_a_second_signal_ends_the_streams_with_a_code_that_says_how_to_go_on(node: ServedNode) -> None:
    stream = node.chat(1500)
    began = time.monotonic()
    for _ in range(2):
        node.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    last = stream.read().decode().strip().splitlines()[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "node_stopping" and "another peer" in error["message"]
    assert "Idempotency-Key" in error["message"]
    assert node.wait(5) == exit_codes.OK and time.monotonic() - began < 5


@pytest.mark.extended
def test_a_node_is_restarted_and_stopped_over_the_api_and_by_the_command_line(node: ServedNode) -> None:
    pid, node_id = node.process.pid, node.ready["node_id"]
    asked = run(["node", "restart", "--api-url", node.ready["api_url"]], node.home)
    assert (asked.returncode, asked.stderr) == (exit_codes.OK, "")
    again = node.event("ready")
    assert (again["node_id"], node.process.pid) == (node_id, pid), "the same process, for whoever supervises it"
    api = ApiClient(again["api_url"], str(node.home))
    assert api.post("/quit", {})["status"] == "stopping"
    assert node.wait(5) == exit_codes.OK


def test_the_units_of_systemd_leave_time_for_the_grace() -> None:
    for unit in ("exo-mesh.service", "user/exo-mesh.service"):
        text = (Path(__file__).resolve().parents[2] / "systemd" / unit).read_text()
        assert "TimeoutStopSec=45" in text


@pytest.mark.extended
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_nobody_reads_and_a_full_disk_hold_up_neither_requests_nor_the_stop(tmp_path: Path) -> None:
    flags = [*FLAGS, "--log-format", "both", "-v", "--log-file", "/dev/full", "--api-port"]
    port = str(free_port())
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [*COMMAND, *flags, port], stdout=full, stderr=subprocess.PIPE, env=clean_environ(tmp_path)
        )
    try:
        url = f"http://127.0.0.1:{port}"
        api = ApiClient(url, str(tmp_path))
        assert eventually(lambda: answers(url), 30)
        caller = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
        for _ in range(400):  # a pipe holds 64 KiB
            caller.request("GET", "/no/such/path", headers={"x-request-id": "x" * 128})
            caller.getresponse().read()
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        assert api.post("/v1/chat/completions", body, 60)["usage"]["completion_tokens"] == 5
        lost = api.get("/v1/logging")["lost_lines"]
        assert lost["stdout"] > 400 and lost["file"] > 400
        process.terminate()
        assert process.wait(10) == exit_codes.OK
    finally:
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/healthz", timeout=5).status == 200)
    except OSError:
        return False
