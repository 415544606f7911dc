"""The suite of every whole-model engine, on a server that can continue answers and on one that cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.engine.conformance_whole import *  # noqa: F403
from exo_mesh.engine.conformance_whole import WholeSubject
from tests.support.fake_openai import FakeProcess


@pytest.fixture(scope="module", params=["llama-server", "other"])
def whole_subject(request: pytest.FixtureRequest) -> Iterator[WholeSubject]:
    server = FakeProcess(request.param, free_port())
    yield WholeSubject("exo_mesh_openai:provider", server, {"servers": f"{server.url}/v1"})
    server.kill()
