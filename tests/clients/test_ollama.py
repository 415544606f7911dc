"""Unmodified clients of Ollama, for Python and Node, against a mesh of two peers.

CLIENTS_PYTHON: see test_clients. OLLAMA_NODE_DIR names a directory in which `npm install ollama@0.6` was run.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_clients import ANSWER, CALL, COUNTED, PERSON, SCRIPTS, _last_line, clients_python, environ_of
from tests.support.peers import MODEL, Peer

pytestmark = pytest.mark.extended

MISSING = {
    "model": 404,
    "create": 501,
    "copy": 501,
    "push": 501,
    "delete": 404,
}


def node_client(entry: Peer, folder: Path) -> Any:
    if not os.environ.get("OLLAMA_NODE_DIR") or shutil.which("node") is None:
        pytest.skip("OLLAMA_NODE_DIR is not set, or there is no node: a directory with node_modules/ollama is needed")
    (folder / "node_modules").symlink_to(Path(os.environ["OLLAMA_NODE_DIR"]).resolve() / "node_modules")
    program = shutil.copy(SCRIPTS / "ollama_client.mjs", folder)  # node looks for packages beside the program
    environ = {**os.environ, "OLLAMA_API_KEY": entry.api.local_token()}
    return _last_line(["node", str(program), entry.url, MODEL], environ)


def check_refusals(missing: dict[str, list[Any]]) -> None:
    """Each refusal has its status, and one sentence that the client shows."""
    pulled = missing.pop("pull")
    assert pulled[0] in (404, 503), pulled
    assert {name: status for name, (status, _) in missing.items()} == MISSING
    assert all(text and not text.startswith("{") for _, text in [*missing.values(), pulled])


def test_the_python_client_of_ollama_can_call_everything(entry: Peer, versions: str) -> None:
    python = clients_python(versions)
    environ = {**environ_of(python), "OLLAMA_API_KEY": entry.api.local_token()}
    seen = _last_line([python, str(SCRIPTS / "ollama_client.py"), entry.url, MODEL], environ)
    # Ollama's own server sends the bytes, too; the package's types of today leave them out
    bytes_of = {"ChatResponse.logprobs.bytes", "ChatResponse.logprobs.top_logprobs.bytes"}
    assert set(seen.pop("unknown")) <= bytes_of, "fields that the package's types do not have"
    check_refusals(seen.pop("missing"))
    assert re.fullmatch(r"0\.\d+\.\d+", seen.pop("version"))
    assert seen == {
        "root": 200,
        "listed": [MODEL],
        "shown": [["completion", "tools", "thinking"], True, True],
        "chat": COUNTED,
        "streamed": COUNTED,
        "counts": [True, "stop", True, True, True],
        "tool": CALL,
        "answer": ANSWER,
        "streamed_tools": ["get_weather"],
        "schema": PERSON,
        "json": "dict",
        "generated": COUNTED,
        "generated_stream": COUNTED,
        "raw": True,
        "logprobs": 2,
        "loaded": "load",
        "embedded": [8, True],
        "running": [MODEL],
        "kept": "load",
        "pulled": ["pulling manifest", "success"],
    }


def test_the_node_client_of_ollama_can_call_everything(entry: Peer, tmp_path: Path) -> None:
    seen = node_client(entry, tmp_path)
    check_refusals(seen.pop("missing"))
    assert seen.pop("version").startswith("0.")
    assert seen == {
        "listed": [MODEL],
        "shown": ["completion", "tools", "thinking"],
        "chat": COUNTED,
        "streamed": COUNTED,
        "tool": CALL,
        "answer": ANSWER,
        "generated": COUNTED,
        "generated_stream": COUNTED,
        "stopped": False,
        "embedded": [8, True],
        "running": [MODEL],
    }
