"""Unmodified clients ask a mesh of two peers for vectors. CLIENTS_PYTHON, OPENAI_NODE_DIR: see test_clients."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.clients.test_clients import SCRIPTS, _last_line, python_client
from tests.support.peers import MODEL

pytestmark = pytest.mark.extended


def test_openai_litellm_langchain_and_ollama_get_the_same_vectors(url: str) -> None:
    seen = python_client("embedding", url)
    assert (seen.pop("length"), seen.pop("short")) == (1.0, 8)
    assert seen and all(seen.values()), seen


def test_openais_node_client_gets_vectors(url: str, tmp_path: Path) -> None:
    if not os.environ.get("OPENAI_NODE_DIR") or shutil.which("node") is None:
        pytest.skip("OPENAI_NODE_DIR is not set, or there is no node: a directory with node_modules/openai is needed")
    (tmp_path / "node_modules").symlink_to(Path(os.environ["OPENAI_NODE_DIR"]).resolve() / "node_modules")
    program = shutil.copy(SCRIPTS / "embedding_client.mjs", tmp_path)  # node looks for packages beside the program
    seen = _last_line(["node", str(program), url, MODEL], dict(os.environ))
    assert seen == {"same": True, "length": 1, "tokens": True}
