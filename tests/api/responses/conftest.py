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

Json = dict[str, Any]


class Asking:
    """A client that knows nothing but HTTP."""

    def __init__(self, api: Served) -> None:
        self.api = api
        self.mesh = api.mesh

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Json]:
        async with self.api.http.request(method, path, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def response(self, **fields: Any) -> Json:
        """The response to one message of the user."""
        status, body = await self.call("POST", "/v1/responses", {"input": "Hi", **fields})
        assert status == 200, body
        return body

    async def refusal(self, **fields: Any) -> tuple[int, str | None, str]:
        """(status, param, message) of a request that fails."""
        status, body = await self.call("POST", "/v1/responses", {"input": "Hi", **fields})
        assert "error" in body and status >= 400, body
        return status, body["error"]["param"], body["error"]["message"]

    async def events(self, **fields: Any) -> list[Json]:
        """The events of a stream."""
        async with self.api.http.post("/v1/responses", json={"input": "Hi", "stream": True, **fields}) as reply:
            assert reply.status == 200, await reply.text()
            return events_of(await reply.text())

    def prompt(self) -> str:
        """The prompt of the last request."""
        return str(self.mesh.text.tokenizer.decode(list(self.mesh.request.prompt_ids), skip_special_tokens=False))


def events_of(text: str) -> list[Json]:
    """The data of each event of a stream, whose name is its type."""
    found: list[Json] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if fields:
            found.append(json.loads(fields["data"]))
            assert found[-1]["type"] == fields["event"]
    return found


@pytest.fixture(scope="package")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("thinking-model"), TEMPLATE)


@pytest.fixture
async def asking(thinking_model: Path) -> AsyncIterator[Asking]:
    mesh = ScriptedMesh(thinking_model, limit=4096)
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield Asking(server)
