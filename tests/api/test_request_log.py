"""What the log says of a request: its id on every line, route and status, and nothing of what was in it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator

import pytest

from exo_mesh.base.telemetry.logs import add_request_id, current_request
from exo_mesh.domain.request import GenerateRequest, Progress, TokenEvent
from tests.api.scripted_mesh import Served

_node_log = logging.getLogger("exo_mesh.rings.serving.router")


class _Kept(logging.Handler):
    """What the handler of a node would be given to write."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(add_request_id)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    kept, logger = _Kept(), logging.getLogger("exo_mesh")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    yield kept.records
    logger.removeHandler(kept)
    logger.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
async def test_lines_of_the_node_carry_the_id_that_the_client_gave(
    api: Served, lines: list[logging.LogRecord], stream: bool
) -> None:
    async def talkative(request: GenerateRequest) -> AsyncGenerator[TokenEvent | Progress, None]:
        _node_log.warning("a stage was lost; going on")
        async for event in api.mesh.echo(request):
            yield event

    api.mesh.script = talkative
    body = {"messages": [{"role": "user", "content": "a very secret question"}], "stream": stream}
    async with api.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}) as reply:
        assert reply.headers["x-request-id"] == "mine-1"
        await reply.read()
    # the line about the whole request comes when its handler ends: the next request of this connection is later
    await api.chat()
    mine = [record for record in lines if getattr(record, "request_id", "") == "mine-1"]
    assert [record.getMessage().partition(" in ")[0] for record in mine] == [
        "a stage was lost; going on",
        "POST /v1/chat/completions: 200",
    ]
    assert all("secret" not in record.getMessage() for record in lines)
    assert current_request.get() == ""


async def test_who_only_looks_or_knocks_at_the_wrong_door_is_told_at_debug_level(
    api: Served, lines: list[logging.LogRecord]
) -> None:
    await api.http.get("/health")
    for method, path in (("GET", "/version"), ("POST", "/no/such/path"), ("DELETE", "/instance/a-name-of-the-caller")):
        async with api.http.request(method, path) as reply:
            await reply.read()
    await api.chat(temperature=99)
    said = [(record.levelname, record.getMessage().partition(" in ")[0]) for record in lines]
    assert said[:4] == [
        ("DEBUG", "GET /version: 200"),
        ("DEBUG", "POST (no route): 404"),
        ("DEBUG", "DELETE /instance/{id}: 404"),
        ("INFO", "POST /v1/chat/completions: 400"),
    ], "and nothing of /health, which is asked every few seconds"
