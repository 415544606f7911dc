"""Which requests get a trace, and under what id."""

from __future__ import annotations

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.defaults import RequestDefaults
from exo_mesh.api.tracing import trace_id_of
from tests.api.scripted_mesh import ScriptedMesh, Served, served

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{ID}-{PARENT}-01", ID),
        (f" 00-{ID.upper()}-{PARENT}-03 ", ID),
        (f"01-{ID}-{PARENT}-01-what-comes-later", ID),
        (f"00-{ID}-{PARENT}-00", ""),
        (f"ff-{ID}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{ID}-{'0' * 16}-01", ""),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_a_callers_trace_context(header: str, expected: str) -> None:
    assert trace_id_of(header, 0.0) == expected


def test_a_share_of_the_others_is_drawn() -> None:
    assert len(trace_id_of("", 1.0)) == 32 and trace_id_of("garbage", 1.0)
    assert trace_id_of(f"00-{ID}-{PARENT}-00", 1.0) == "", "the caller has decided against it"


async def test_the_reply_names_the_trace_and_the_trace_is_found_by_it(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    headers = {"traceparent": f"00-{ID}-{PARENT}-01"}
    async with api.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.headers["x-trace-id"] == ID
    async with api.http.post("/v1/chat/completions", json=body) as reply:
        assert "x-trace-id" not in reply.headers
    async with api.http.get("/v1/traces") as reply:
        assert [row["trace_id"] for row in (await reply.json())["data"]] == [ID]
    async with api.http.get(f"/v1/traces/{ID}") as reply:
        assert reply.status == 200
    async with api.http.get("/v1/traces/unknown") as reply:
        assert reply.status == 404


async def test_with_a_sample_of_one_every_request_has_one(mesh: ScriptedMesh) -> None:
    async with served(mesh, ApiOptions(defaults=lambda: RequestDefaults(trace_sample=1.0))) as api:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with api.http.post("/v1/chat/completions", json=body) as reply:
            assert len(reply.headers["x-trace-id"]) == 32
            await reply.read()
        assert mesh.request.trace_id
