"""The unmodified openai-node client against each peer of a mesh of two.

Needs Node 18 or newer, and the npm package `openai` in OPENAI_NODE_DIR/node_modules
(`npm install --prefix DIR openai`); without them these tests are skipped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import MODEL, Peer, await_all

COUNTED = "7, 8, 9, 10, 11, 12"
SCRIPT = Path(__file__).with_name("openai_client.mjs")


def why_not() -> str:
    """Why these tests cannot run here, or nothing."""
    directory = os.environ.get("OPENAI_NODE_DIR")
    node = shutil.which("node")
    if not directory:
        return "OPENAI_NODE_DIR is not set: a directory with node_modules/openai is needed"
    if not (Path(directory) / "node_modules" / "openai" / "package.json").is_file():
        return f"there is no openai in {directory}/node_modules; npm install --prefix {directory} openai"
    if node is None:
        return "node is not installed"
    version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    return "" if int(version.lstrip("v").split(".")[0]) >= 18 else f"node is {version}; 18 or newer is needed"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

Seen = dict[str, Any]


@pytest.fixture(scope="module", params=[0, 1], ids=["first peer", "second peer"])
def seen(request: pytest.FixtureRequest, pair: list[Peer]) -> Iterator[Seen]:
    """What the client saw, by name; `busy` and `idle`: what the mesh did when its stream ran and was closed."""
    process = subprocess.Popen(
        ["node", str(SCRIPT), f"{pair[request.param].url}/v1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        seen: Seen = {}
        read_until(process, "streaming", seen)
        await_all(pair, Peer.busy)
        tell(process)
        read_until(process, "closed", seen)
        await_all(pair, Peer.idle)
        tell(process)
        assert process.wait(10) == 0
        yield seen
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], name: str, seen: Seen) -> None:
    assert process.stdout is not None and process.stderr is not None
    while name not in seen:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        event = json.loads(line)
        seen[event["name"]] = event["value"]


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def test_chat_and_stream(seen: Seen) -> None:
    usage = seen["chat"]["usage"]
    assert seen["chat"] == {"content": COUNTED, "finish": "stop", "usage": usage}
    assert seen["stream"] == seen["chat"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"]


def test_logprobs(seen: Seen) -> None:
    assert b"".join(bytes(token["bytes"]) for token in seen["logprobs"]).decode() == COUNTED
    for token in seen["logprobs"]:
        assert len(token["top_logprobs"]) == 3
        assert token["logprob"] == token["top_logprobs"][0]["logprob"]
        assert sum(math.exp(top["logprob"]) for top in token["top_logprobs"]) <= 1 + 1e-5


def test_stop_seed_and_length(seen: Seen) -> None:
    assert seen["stop"] == {"content": "7, 8, 9", "finish": "stop"}
    one, two, again = seen["seed"]
    assert one == again != two
    assert seen["length"] == {"finish": "length", "tokens": 5}


def test_models(seen: Seen) -> None:
    assert MODEL in seen["models"]["listed"]
    assert seen["models"]["retrieved"] == MODEL


def test_errors_are_the_clients_own(seen: Seen) -> None:
    shown = {name: (error["kind"], error["status"], error["code"], error["param"]) for name, error in seen.items()
             if name in ("unknown model", "unknown field", "too long")}  # fmt: skip
    assert shown == {
        "unknown model": ("NotFoundError", 404, "model_not_found", "model"),
        "unknown field": ("BadRequestError", 400, "invalid_request", "frobnicate"),
        "too long": ("BadRequestError", 400, "context_length_exceeded", "messages"),
    }
    assert "frobnicate" in seen["unknown field"]["message"]
    assert "8192" in seen["too long"]["message"]


def test_leaving_a_stream_frees_the_ring(seen: Seen) -> None:
    """The fixture has seen the ring busy while it ran, and idle after it was left."""
    assert seen["closed"] == seen["streaming"] + 1
