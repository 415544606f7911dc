"""Fixtures of the API's tests: a scripted service, and a server over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

OPEN_ADMIN = AccessPolicy(open_admin=True)
"""Who may call is tested in tests/security."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture
def mesh(model_dir: Path) -> ScriptedMesh:
    return ScriptedMesh(model_dir)


@pytest.fixture
async def api(mesh: ScriptedMesh) -> AsyncIterator[Served]:
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield server


@pytest.fixture(scope="module")
def fuzzer(model_dir: Path) -> Iterator[Callable[[str, Any], int]]:
    """POST a body from outside the loop, as hypothesis needs it; returns the status."""
    with asyncio.Runner() as runner:
        context = served(ScriptedMesh(model_dir), ApiOptions(access=OPEN_ADMIN))
        server = runner.run(context.__aenter__())

        async def post(path: str, body: Any) -> int:
            async with server.http.post(path, data=json.dumps(body)) as reply:
                await reply.read()
                return reply.status

        yield lambda path, body: runner.run(post(path, body))
        runner.run(context.__aexit__(None, None, None))
