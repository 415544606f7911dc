"""The engine keeps the promises of every whole-model engine, with a server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exo_mesh.engine.conformance_whole import *  # noqa: F403
from exo_mesh.engine.conformance_whole import WholeSubject
from tests.support.fake_rkllama import board


@pytest.fixture(scope="module", params=["ollama", "openai", "native"])
def whole_subject(request: pytest.FixtureRequest) -> Iterator[WholeSubject]:
    with board("--dialect", request.param, "--token-s", "0.006") as server:
        options = {"host": "127.0.0.1", "port": str(server.port), "models_dir": "/nowhere"}
        yield WholeSubject("exo_mesh_rkllm:provider", server, options, stops_when_cancelled=False)
