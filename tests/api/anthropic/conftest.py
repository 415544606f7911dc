"""A scripted service with a model that thinks and calls tools, and how these tests talk to it."""

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

Event = tuple[str, dict[str, Any]]


class Asking:
    """A client that knows nothing but HTTP."""

    def __init__(self, api: Served) -> None:
        self.api = api
        self.mesh = api.mesh

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        async with self.api.http.post(path, json=body, headers=sent) as reply:
            return reply.status, await reply.json()

    async def message(self, **fields: Any) -> dict[str, Any]:
        """The reply to one message of the user."""
        status, body = await self.post("/v1/messages", self.body(**fields))
        assert status == 200, body
        return body

    async def refusal(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that fails."""
        status, body = await self.post("/v1/messages", self.body(**fields))
        assert body["type"] == "error", body
        return status, body["error"]

    async def events(self, **fields: Any) -> list[Event]:
        """(name, data) of each event of a stream but pings."""
        async with self.api.http.post("/v1/messages", json=self.body(stream=True, **fields)) as reply:
            assert reply.status == 200, await reply.text()
            return [event for event in events_of(await reply.text()) if event[0] != "ping"]

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}], **fields}

    def prompt(self) -> str:
        """The prompt of the last request."""
        return str(self.mesh.text.tokenizer.decode(list(self.mesh.request.prompt_ids), skip_special_tokens=False))


def events_of(text: str) -> list[Event]:
    """(name, data) of each event of a stream."""
    found: list[Event] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


@pytest.fixture(scope="package")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("thinking-model"), TEMPLATE)


@pytest.fixture
async def asking(thinking_model: Path) -> AsyncIterator[Asking]:
    mesh = ScriptedMesh(thinking_model, limit=4096)
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield Asking(server)
