"""Fixtures of the tests of Ollama's dialect: a model with tools and thoughts, and how to read lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from tests.api.conftest import OPEN_ADMIN
from tests.api.openai.test_tools import TEMPLATE
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

MODEL = "exo-mesh-demo"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("thinking-model"), TEMPLATE)


@pytest.fixture
async def able(thinking_model: Path) -> AsyncIterator[Served]:
    """A server whose model can think and call tools."""
    options = ApiOptions(keep_alive_s=0.05, progress_s=0.01, access=OPEN_ADMIN)
    async with served(ScriptedMesh(thinking_model, limit=4096), options) as server:
        yield server


async def whole(api: Served, path: str, **fields: Any) -> dict[str, Any]:
    """The reply to a request without streaming, which must succeed."""
    status, reply = await asked(api, path, stream=False, **fields)
    assert status == 200, reply
    return reply


async def asked(api: Served, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of a reply."""
    async with api.http.post(path, json={"model": MODEL, **fields}) as reply:
        return reply.status, await reply.json(content_type=None)


async def lines(api: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which must succeed."""
    async with api.http.post(path, json={"model": MODEL, **fields}) as reply:
        text = await reply.text()
        assert (reply.status, reply.content_type) == (200, "application/x-ndjson"), text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def refusal(api: Served, path: str, **fields: Any) -> str:
    """The sentence of a 400."""
    status, reply = await asked(api, path, **fields)
    assert status == 400, reply
    assert set(reply) == {"error"}
    return str(reply["error"])
