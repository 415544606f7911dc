"""Which requests get a trace, and under what id."""

from __future__ import annotations

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions, RequestDefaults
from exo_mesh.api.tracing import MAX_STATE_CHARS, trace_of
from tests.api.scripted_mesh import ScriptedMesh, Served, served

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{ID}-{PARENT}-01", ID),
        (f" 00-{ID.upper()}-{PARENT}-03 ", ID),
        (f"01-{ID}-{PARENT}-01-what-comes-later", ID),
        (f"00-{ID}-{PARENT}-01-extra", ""),
        (f"00-{ID}-{PARENT}-00", ""),
        (f"ff-{ID}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{ID}-{'0' * 16}-01", ""),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_a_callers_trace_context(header: str, expected: str) -> None:
    found = trace_of([header], [], 0.0)
    assert (found.trace_id if found else "") == expected
    assert found is None or (found.parent_span_id == PARENT and len(found.span_id) == 16)


def test_a_share_of_the_others_is_drawn() -> None:
    for headers in ([], [""], ["garbage"], [f"00-{ID}-{PARENT}-01"] * 2):
        found = trace_of(headers, ["vendor=1"], 1.0)
        assert found is not None and len(found.trace_id) == 32 and found.trace_id != ID
        assert (found.parent_span_id, found.state) == ("", ""), "a new trace is nobody's child"
    assert trace_of([f"00-{ID}-{PARENT}-00"], [], 1.0) is None, "the caller has decided against it"
    assert trace_of([], [], 0.0) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (["rojo=00f067aa0ba902b7", " congo=t61rcWkgMzE ,"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (["tenant@system=a b"], "tenant@system=a b"),
        (["no value"], ""),
        (["a=1,B=2"], ""),
        (["a=1\u00e4"], ""),
        ([",".join(f"k{number}=1" for number in range(33))], ""),
        (["a=" + "x" * MAX_STATE_CHARS], ""),
    ],
)
def test_a_tracestate_is_kept_whole_or_dropped(headers: list[str], expected: str) -> None:
    found = trace_of([f"00-{ID}-{PARENT}-01"], headers, 0.0)
    assert found is not None and found.state == expected


async def test_the_reply_names_the_trace_and_the_trace_is_found_by_it(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    headers = {"traceparent": f"00-{ID}-{PARENT}-01", "tracestate": "vendor=1"}
    async with api.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.headers["x-trace-id"] == ID
        version, trace_id, span_id, flags = reply.headers["traceresponse"].split("-")
        assert (version, trace_id, flags) == ("00", ID, "01")
        asked = api.mesh.request
        assert (asked.span_id, asked.parent_span_id, asked.trace_state) == (span_id, PARENT, "vendor=1")
    async with api.http.post("/v1/chat/completions", json=body) as reply:
        assert "x-trace-id" not in reply.headers and "traceresponse" not in reply.headers
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


async def test_choices_have_spans_of_their_own_below_the_same_caller(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3}
    async with api.http.post(
        "/v1/chat/completions", json=body, headers={"traceparent": f"00-{ID}-{PARENT}-01"}
    ) as reply:
        span_id = reply.headers["traceresponse"].split("-")[2]
    asked = api.mesh.requests[-3:]
    assert sorted(one.span_id for one in asked) == ["", "", span_id], "an empty one is derived from the request's ids"
    assert {one.parent_span_id for one in asked} == {PARENT}


async def test_callers_see_how_the_export_goes_and_admins_where_to(mesh: ScriptedMesh) -> None:
    mesh.trace_export = {"endpoint": "http://c/v1/traces", "sent": 7, "dropped": 0, "waiting": 0, "error": ""}
    async with served(mesh, ApiOptions()) as api, api.http.get("/v1/tracing") as reply:
        assert (await reply.json())["export"] == {"sent": 7, "dropped": 0, "waiting": 0}
    admins = ApiOptions(access=AccessPolicy(open_admin=True))
    async with served(mesh, admins) as api, api.http.get("/v1/tracing") as reply:
        assert (await reply.json())["export"] == mesh.trace_export
