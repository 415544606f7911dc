"""Shell lines of an earlier plan for a server, run as they were written by real curl and jq against one real node.

Only three things differ from the text: the address (it says localhost:8000), the model name where the shipped model
cannot do what the line asks, and how the process to kill is found. docs/how-it-works/acceptance.md lists the lines,
these and those that cannot be run yet. The dummy engine computes; it makes each answer take a known time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, running_node
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import MODEL
from tests.support.processes import clean_environ, eventually

MISSING = [name for name in ("bash", "curl", "jq") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

AS_WRITTEN = "localhost:8000"
NOVELIST = "novelist"
"""A model with room for 99,999 tokens of output, which the shipped one has not."""
FLAGS = ["--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none", "--engine", "dummy"]
SPEED = "cost_ms=2,row_cost_ms=0.25"
"""A single answer of 200 tokens takes half a second; 32 at once take 2 s each, so that fifty meet a full queue."""
CONTEXT = 256
"""So that an answer without max_tokens ends after half a second: the dummy engine never ends one by itself."""
CHAT = "curl localhost:8000/v1/chat/completions"


@dataclass(frozen=True)
class Server:
    """A node that was started with the variables that the lines set."""

    child: ChildNode
    api: ApiClient
    home: Path

    def start(self, lines: str) -> subprocess.Popen[str]:
        """Start the lines in a shell whose current directory is the home of the node."""
        return subprocess.Popen(
            ["bash", "-c", lines.replace(AS_WRITTEN, self.api.url.removeprefix("http://"))],
            cwd=self.home,
            env={**os.environ, "no_proxy": "*"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, lines: str) -> str:
        """What the lines write to standard output."""
        return output_of(self.start(lines))


def output_of(shell: subprocess.Popen[str]) -> str:
    shown, complaints = shell.communicate(timeout=30)
    assert shell.returncode == 0, complaints
    return shown


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    """The node, and the line that takes five seconds by its nature: it runs beside all the others."""
    home = tmp_path_factory.mktemp("curl") / "home"
    home.mkdir()
    model = TinyModel(layers=2, hidden=16, intermediate=32, context=200_000)
    write_checkpoint(home.parent / "models" / NOVELIST, model)
    environ = {
        **clean_environ(home),
        "OVERRIDE_MEMORY_MB": "16384",
        "MAX_QUEUE_DEPTH": "5",
        "REQUEST_TIMEOUT_S": "5",
        "REQUEST_LOG_PATH": "logs/requests.jsonl",
    }
    flags = [*FLAGS, "--models-dir", str(home.parent / "models"), "--engine-option", SPEED]
    with running_node(home, flags, environ) as child:
        server = Server(child, child.api, home)
        novel = server.start(
            CHAT + f""" -d '{{"model":"{NOVELIST}","messages":[{{"role":"user","content":"Write a novel"}}],"""
            """"max_tokens":99999}' | jq -r '.choices[0].finish_reason, .usage.completion_tokens'"""
        )
        server.api.post("/instance", {"model": MODEL, "context_limit": CONTEXT}, 60)
        yield server, novel
    with novel:  # also where no test has read what it says
        pass


@pytest.fixture
def server(started: tuple[Server, subprocess.Popen[str]]) -> Server:
    return started[0]


def test_sixteen_gigabytes_are_critical_where_the_system_runs_short(server: Server) -> None:
    assert float(server.run("curl localhost:8000/memory | jq .threshold_pct")) == 96.88


def test_the_live_pressure_is_a_list_of_readings(server: Server) -> None:
    assert 0 <= float(server.run("curl localhost:8000/memory/live | jq '.[0].pressure_pct'")) < 100


def test_a_chat_completion_needs_no_model_name_and_no_header(server: Server) -> None:
    lines = """curl -X POST localhost:8000/v1/chat/completions -d '{
  "messages": [{"role": "user", "content": "Hello"}],
  "max_tokens": 50
}'"""
    assert server.run(lines + " | jq '.usage.completion_tokens'") == "50\n"


def test_a_killed_runner_is_a_child_that_comes_back_and_answers(server: Server) -> None:
    find = f"curl localhost:8000/state | jq '.view.instances[] | select(.model == \"{MODEL}\") | .stages[].pid'"
    runner = psutil.Process(int(server.run(find)))
    assert runner.ppid() == server.child.pid, "the model is loaded in a child process"
    server.run(f"kill -9 $({find})")
    answer = CHAT + """ -d '{"messages":[{"role":"user","content":"Hi"}]}'"""
    shown = server.run(answer + " | jq -c '[.model, .choices[0].finish_reason, .error]'")
    assert shown == f'["{MODEL}","length",null]\n'
    assert "was killed by SIGKILL" in server.child.log_path.read_text()
    assert int(server.run(find)) != runner.pid


@pytest.mark.extended
def test_of_fifty_requests_at_once_some_are_answered_and_some_sent_away(server: Server) -> None:
    lines = r"""for i in $(seq 1 50); do
  curl -s -o /dev/null -w "%{http_code}\n" \
    -X POST localhost:8000/v1/chat/completions \
    -d '{"messages":[{"role":"user","content":"Count to 100"}],"max_tokens":200}' &
done
wait"""
    codes = server.run(lines).split()
    assert len(codes) == 50 and set(codes) == {"200", "429"}
    assert codes.count("200") > 5, "one runs or waits for each place in the queue"


def test_a_request_that_takes_too_long_ends_with_what_there_is(
    started: tuple[Server, subprocess.Popen[str]],
) -> None:
    finish_reason, tokens = output_of(started[1]).split()
    assert finish_reason == "length" and 0 < int(tokens) < 99_999


def test_every_request_is_a_line_of_the_log_and_counted(server: Server) -> None:
    def as_many_as_counted() -> bool:  # lines are written a moment after the answer
        logged = server.run("cat logs/requests.jsonl | jq -s 'length'")
        counted = server.run("curl localhost:8000/requests/stats | jq .total")
        return int(logged) == int(counted) > 0

    server.run("curl localhost:8000/v1/completions -d '" + '{"prompt":"x","max_tokens":1}' + "'")
    assert eventually(as_many_as_counted)
    assert server.run("curl localhost:8000/requests/stats | jq .").startswith("{")
