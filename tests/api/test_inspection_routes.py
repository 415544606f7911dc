"""The routes of traces, captures, events and runners."""

from __future__ import annotations

import asyncio
import json

from exo_mesh.api.context import ApiOptions, RequestDefaults
from exo_mesh.settings.config import default_settings
from exo_mesh.settings.effective import EffectiveSettings, LoneSettings
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.api.test_ops import get
from tests.api.test_tracing import ID, PARENT

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_a_trace_is_shown_in_three_forms_and_deleted(api: Served) -> None:
    headers = {"traceparent": f"00-{ID}-{PARENT}-01", "x-request-id": "mine-1"}
    async with api.http.post("/v1/chat/completions", json=BODY, headers=headers) as reply:
        reply_id = (await reply.json())["id"]
    for wanted in (ID, reply_id, "mine-1"):
        for path in (f"/v1/traces/{wanted}", f"/v1/traces/cluster/{wanted}"):
            status, shown = await get(api, path)
            assert status == 200 and shown["otherData"]["trace_id"] == ID
            status, stats = await get(api, f"{path}/stats")
            assert status == 200 and stats["stages"] == []
            async with api.http.get(f"{path}/raw") as reply:
                assert reply.headers["Content-Disposition"] == f'attachment; filename="{ID}.json"'
                assert await reply.json() == shown
    status, listed = await get(api, "/v1/traces/cluster")
    assert [row["trace_id"] for row in listed["data"]] == [ID] and listed["unreachable"] == []
    for body in ({}, {"all": True, "trace_ids": [ID]}, {"trace_ids": ["x"] * 1000}):
        assert (await get(api, "/v1/traces/delete", "POST", json=body))[0] == 400
    status, deleted = await get(api, "/v1/traces/delete", "POST", json={"all": True})
    assert (status, deleted["deleted"]) == (200, 1)
    for form in ("", "/stats", "/raw"):
        assert (await get(api, f"/v1/traces/{ID}{form}"))[0] == 404


async def test_the_switch_traces_new_requests(mesh: ScriptedMesh) -> None:
    desk = LoneSettings(EffectiveSettings(default_settings(), {}))
    options = ApiOptions(access=OPEN_ADMIN, config=desk, defaults=lambda: RequestDefaults.of(desk.effective.now))
    async with served(mesh, options) as api:
        await turned_on_and_off(api)


async def turned_on_and_off(api: Served) -> None:
    before = (await get(api, "/v1/tracing"))[1]
    assert not before["enabled"]
    status, on = await get(api, "/v1/tracing", "PUT", json={"enabled": True})
    assert (status, on["enabled"], on["sample"], on["origin"]) == (200, True, 1.0, "mesh")
    for number in range(5):
        async with api.http.post("/v1/chat/completions", json=BODY) as reply:
            assert "x-trace-id" in reply.headers, number
    assert (await get(api, "/v1/tracing", "PUT", json={"enabled": True, "sample": 0.25}))[1]["sample"] == 0.25
    for body in ({}, {"enabled": 1}, {"enabled": True, "sample": 0}, {"enabled": True, "sample": 2}):
        assert (await get(api, "/v1/tracing", "PUT", json=body))[0] == 400
    assert (await get(api, "/v1/tracing", "PUT", json={"enabled": False}))[1] == before


async def test_events_are_lines_of_json(api: Served) -> None:
    async with api.http.get("/events?since=1&n=1") as reply:
        assert reply.content_type == "application/x-ndjson"
        assert [json.loads(line)["at"] for line in (await reply.text()).splitlines()] == [3.0], "the newest"
    async with api.http.get("/events?scope=cluster") as reply:
        assert await reply.text() == ""
    for query in ("since=nan", "since=x", "n=0", "n=5000", "scope=all"):
        assert (await get(api, f"/events?{query}"))[0] == 400


async def test_captures_and_runners_of_a_peer_by_its_id(api: Served) -> None:
    base = "/v1/diagnostics"
    for path in (f"{base}/node/capture", f"{base}/cluster/peer1/capture", f"{base}/node/capture?runner=i1"):
        assert (await get(api, path, "POST"))[1]["node_id"] == "peer1"
    for path in (f"{base}/cluster/other/capture", f"{base}/node/capture?runner=i2", f"{base}/node/runners/i2/cancel"):
        assert (await get(api, path, "POST"))[0] == 404
    running = asyncio.create_task(api.chat(max_tokens=100_000, stream=False))
    for path in (f"{base}/node/runners/i1/cancel", f"{base}/cluster/peer1/runners/i1/cancel"):
        status, done = await get(api, path, "POST")
        assert status == 200 and done["object"] == "runner.cancelled"
    await running
