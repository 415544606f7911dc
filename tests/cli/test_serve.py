"""A real `exo-mesh serve`: what it prints, what it answers, how it stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of, running_node
from exo_mesh.cli.main import main
from tests.cli.closed_port import closed_port
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually, gone, read_until, run, start


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ChildNode]:
    child = ChildNode(["--name", "alpha", "--api-port", "0", *QUIET_FLAGS], tmp_path / "log", clean_environ(tmp_path))
    yield child
    child.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildNode]:
    """For tests that only ask it."""
    home = tmp_path_factory.mktemp("shared")
    child = ChildNode(["--name", "alpha", "--api-port", "0", *QUIET_FLAGS], home / "log", clean_environ(home))
    yield child
    child.stop()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, which only Linux has")
def test_a_node_loads_no_library_for_arrays_and_tensors(shared: ChildNode) -> None:
    shared.wait_ready(30.0)
    loaded = Path(f"/proc/{shared.pid}/maps").read_text()
    assert "cygrpc" in loaded
    assert not [name for name in ("/numpy", "/torch", "/mlx") if f"{name}/" in loaded]


def test_it_says_what_it_is_and_stops_cleanly(tmp_path: Path) -> None:
    process = start(["--name", "alpha", "--api-port", "0", *QUIET_FLAGS], tmp_path)
    try:
        shown = read_until(process, "Ctrl-C")
        for word in ("alpha (", "engine", "dummy", "usable of", "exo-mesh-demo", "http://127.0.0.1:", "mesh is open"):
            assert word in shown, shown
        assert 'exo-mesh run exo-mesh-demo "Count from 7 to 20."' in shown
        assert "/v1/chat/completions -H 'Content-Type: application/json'" in shown
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest, complaints = process.communicate(timeout=10)
        assert time.monotonic() - began < 5
        assert process.returncode == exit_codes.OK
        assert "stopping" in rest
        assert "Traceback" not in complaints
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.extended), signal.SIGTERM])
def test_a_signal_stops_node_and_runners_within_five_seconds(node: ChildNode, signum: signal.Signals) -> None:
    client = client_of(node.wait_ready(60))
    client.post("/instance", {"model": "exo-mesh-demo"}, 60)
    family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    assert len(family) >= 2
    began = time.monotonic()
    os.kill(node.pid, signum)
    assert eventually(lambda: not node.alive and gone(family), 6)
    assert time.monotonic() - began < 5


def test_it_stops_when_standard_input_closes_or_its_parent_is_killed(node: ChildNode) -> None:
    client = client_of(node.wait_ready(60))
    client.post("/instance", {"model": "exo-mesh-demo"}, 60)
    family = psutil.Process(node.pid).children(recursive=True)
    assert node._process.stdin is not None
    node._process.stdin.close()
    assert eventually(lambda: not node.alive and gone(family), 6)
    assert '"standard input has closed"' in node.log_path.read_text()


SERVE = """
import asyncio, atexit, sys, time
from exo_mesh.cli import main
from exo_mesh.cli.verbs import serve
from exo_mesh.node.node import Node
serve.STOP_DEADLINE_S = 0.5
{harm}
sys.exit(main.main(sys.argv[1:]))
"""
THREAD = """
async def stop(node):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
Node.stop = stop
"""


@pytest.mark.parametrize(
    ("harm", "code", "message"),
    [
        pytest.param("atexit.register(time.sleep, 60)", exit_codes.OK, "", id="the interpreter"),
        pytest.param(
            "Node.stop = lambda node: time.sleep(60)",
            exit_codes.FAILED,
            "did not stop in time",
            id="the event loop",
            marks=pytest.mark.extended,
        ),
        pytest.param(THREAD, exit_codes.FAILED, "did not stop in time", id="a thread", marks=pytest.mark.extended),
    ],
)
def test_whatever_would_hold_up_its_end_it_is_gone_in_time(harm: str, code: int, message: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(harm=harm), "--api-port", "0", *QUIET_FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(tmp_path),
    )
    try:
        assert "Ctrl-C" in read_until(process, "Ctrl-C")
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=5)
        assert process.returncode == code and message in complaints and "Traceback" not in complaints, complaints
    finally:
        process.kill()
        process.communicate()


def test_a_killed_node_leaves_no_runner(node: ChildNode) -> None:
    client = client_of(node.wait_ready(60))
    client.post("/instance", {"model": "exo-mesh-demo"}, 60)
    runners = psutil.Process(node.pid).children(recursive=True)
    os.kill(node.pid, signal.SIGKILL)
    assert eventually(lambda: gone(runners), 3)


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a verb in this process: (exit code, standard output, standard error)."""

    def run_here(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(argv), *capsys.readouterr()

    return run_here


def test_the_reading_verbs_read_it(shared: ChildNode, tmp_path: Path, say: Said) -> None:
    ready = shared.wait_ready(60)
    client = client_of(ready)
    instance = client.post("/instance", {"model": "exo-mesh-demo"}, 60)
    here = ["--api-url", client.url, "--home", ready["home"]]
    for verb in (["status"], ["topology"], ["ps"], ["models"], ["list"], ["show", "exo-mesh-demo"]):
        code, shown, complaints = say(*verb, *here)
        assert (code, complaints) == (exit_codes.OK, "")
        assert "exo-mesh-demo" in shown
        assert json.loads(say(*verb, "--json", *here)[1])
    assert instance["id"] in run(["ps", *here], tmp_path).stdout
    code, _, complaints = say("stop", "nothing", *here)
    assert (code, complaints) == (exit_codes.FAILED, "exo-mesh: no instance or loaded model nothing; see exo-mesh ps\n")
    assert say("stop", "exo-mesh-demo", *here)[1] == f"stopped {instance['id']}\n"
    assert eventually(lambda: client.get("/state")["view"]["instances"] == [])


def test_run_asks_it(shared: ChildNode, tmp_path: Path, say: Said) -> None:
    here = ["--api-url", shared.wait_ready(60)["api_url"]]
    asked = run(["run", "exo-mesh-demo", "Hello.", "--max-tokens", "5", "--verbose", *here], tmp_path)
    assert asked.returncode == exit_codes.OK
    assert asked.stdout.strip()
    assert "5 tokens, " in asked.stderr
    piped = run(["run", "exo-mesh-demo", "--json", "--max-tokens", "5", *here], tmp_path, stdin="Hello.\n")
    assert json.loads(piped.stdout)["usage"]["completion_tokens"] == 5
    code, _, complaints = say("run", "exo-mesh-dem", "Hello.", *here)
    assert code == exit_codes.FAILED
    assert "exo-mesh-demo" in complaints
    empty = run(["run", "exo-mesh-demo", *here], tmp_path)
    assert (empty.returncode, empty.stderr) == (1, "exo-mesh: the prompt on standard input is empty\n")


def test_its_log_has_the_id_of_the_request_and_nothing_that_was_asked_or_answered(node: ChildNode) -> None:
    url = node.wait_ready(60)["api_url"]
    body = {"model": "exo-mesh-demo", "messages": [{"role": "user", "content": "Spell zebra."}], "max_tokens": 20}
    headers = {"content-type": "application/json", "x-request-id": "mine-1"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["x-request-id"] == "mine-1"
        answer = json.load(reply)["choices"][0]["message"]["content"]
    node.stop()
    assert node._process.returncode == exit_codes.OK, node.log_tail()
    lines = [json.loads(line) for line in node.log_path.read_text().splitlines()]
    records = [line for line in lines if "logger" in line]
    mine = [line["message"] for line in records if line.get("request_id") == "mine-1"]
    assert {message.partition(" ")[0] for message in mine} == {"placing", "placed", "request", "POST"}
    assert sum(message.startswith("POST /v1/chat/completions: 200 in ") for message in mine) == 1
    # whatever watches the ring outlives the request that placed it
    assert any(line["message"].startswith("stage ") for line in records)
    text = json.dumps(records)
    assert "zebra" not in text
    assert answer not in text


def is_taken(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(is_taken(52415), reason="a node answers at the default address")
def test_run_starts_a_node_where_there_is_none(tmp_path: Path) -> None:
    flags = ["--api-port", "0", "--max-tokens", "5", *QUIET_FLAGS]
    environ_port = closed_port()
    asked = run(["run", "exo-mesh-demo", "Hello.", *flags, "--listen-port", str(environ_port)], tmp_path)
    assert (asked.returncode, asked.stdout.strip() != "") == (exit_codes.OK, True), asked.stderr
    assert asked.stderr.startswith("exo-mesh: no node runs here: starting one for this question\n")


@pytest.mark.skipif(is_taken(52415), reason="a node answers at the default address")
@pytest.mark.extended
def test_run_serves_a_directory_by_a_node_of_its_own(tmp_path: Path) -> None:
    flags = ["--api-port", "0", "--max-tokens", "5", *QUIET_FLAGS, "--listen-port", str(closed_port())]
    model = write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    asked = run(["run", str(model), "Hello.", *flags], tmp_path / "home")
    assert (asked.returncode, asked.stdout.strip() != "") == (exit_codes.OK, True), asked.stderr
    absent = run(["run", str(tmp_path / "absent"), "Hello.", *flags], tmp_path / "home")
    assert absent.returncode == exit_codes.FAILED and "absent does not exist" in absent.stderr


@pytest.mark.extended
def test_two_nodes_find_each_other_by_a_bootstrap_peer(node: ChildNode, tmp_path: Path) -> None:
    first = node.wait_ready(60)
    (tmp_path / "b").mkdir()
    flags = ["--name", "beta", "--api-port", "0", *QUIET_FLAGS, "--bootstrap-peers", first["grpc_address"]]
    other = ChildNode(flags, tmp_path / "b" / "log", clean_environ(tmp_path / "b"))
    try:
        clients = [client_of(first), client_of(other.wait_ready(60))]

        def names(client: ApiClient) -> list[str]:
            return sorted(peer["name"] for peer in client.get("/state")["view"]["peers"] if peer["alive"])

        for client in clients:
            assert eventually(lambda client=client: names(client) == ["alpha", "beta"]), node.log_tail(40)
        other.stop()
        assert eventually(lambda: names(clients[0]) == ["alpha"], 5)
    finally:
        other.stop()


def test_a_taken_api_port_that_was_asked_for_is_exit_code_4(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = run(["--api-port", str(port), *QUIET_FLAGS], tmp_path)
    assert refused.returncode == exit_codes.ADDRESS_IN_USE
    assert refused.stderr == (
        f"exo-mesh: the API port {port} on 127.0.0.1 is taken; name another with --api-port, or 0 for any free one\n"
    )


def test_a_taken_default_port_is_replaced_and_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already, which is what this test needs
            other.bind(("127.0.0.1", 52415))
            other.listen()
        process = start(QUIET_FLAGS, tmp_path)
        shown = read_until(process, "Ctrl-C")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert "port 52415 is taken" in shown
    assert process.returncode == exit_codes.OK


@pytest.mark.extended
def test_without_an_api_there_is_none(tmp_path: Path) -> None:
    with running_node(tmp_path, ["--engine", "dummy", "--no-api"], clean_environ(tmp_path)) as child:
        assert child.ready["api_url"] == ""


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        pytest.param(["--engine", "nope"], exit_codes.USAGE, 'no engine "nope"', marks=pytest.mark.extended),
        pytest.param(["--host", "203.0.113.1"], exit_codes.USAGE, "--host 203.0.113.1: ", marks=pytest.mark.extended),
        (["--home", "/dev/null/x"], exit_codes.USAGE, "/dev/null/x"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags: list[str], code: int, message: str, tmp_path: Path) -> None:
    refused = run([*QUIET_FLAGS, "--api-port", "0", *flags], tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (code, 1), refused.stderr
    assert message in refused.stderr
    assert refused.stderr.startswith("exo-mesh: ")


@pytest.mark.extended
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    process = start(["--api-port", "0", *QUIET_FLAGS], tmp_path)
    read_until(process, "Ctrl-C")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode in (exit_codes.OK, exit_codes.FAILED)
