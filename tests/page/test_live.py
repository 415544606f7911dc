"""The live data of the page: one document, and patches of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.web.live import LiveFeed, live_document, merge_patch
from exo_mesh.api.web.live_routes import MAX_LISTENERS
from exo_mesh.base.clock import monotonic
from exo_mesh.cli.verbs.top.live_data import patched
from exo_mesh.domain.reports import StateReport
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.support.reports import report_of

values = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from("abc"), values)


@given(documents, documents)
@settings(max_examples=20, deadline=None)
def test_a_patch_makes_the_new_document_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert patched(old, merge_patch(old, new)) == new


def test_a_patch_has_only_what_changed() -> None:
    old = {"peers": {"a": {"load": 1, "name": "n"}, "b": {"load": 2}}, "queue": {"depth": 0}}
    new = {"peers": {"a": {"load": 3, "name": "n"}}, "queue": {"depth": 0}}
    assert merge_patch(old, new) == {"peers": {"a": {"load": 3}, "b": None}}


def event(frame: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))
    return found


def test_the_document_is_made_once_for_all_pages_and_only_when_one_looks() -> None:
    now, made = [0.0], [0]

    def make() -> dict[str, Any]:
        made[0] += 1
        return {"count": made[0], "same": 1}

    feed = LiveFeed(make, 2.0, lambda: now[0])
    assert made[0] == 0
    for _ in range(10):
        feed.refresh()
    assert event(feed.frame(0)) == {"type": "document", "number": 1, "data": {"count": 1, "same": 1}}
    assert feed.frame(1) == b""
    now[0] = 2.0
    for _ in range(10):
        feed.refresh()
    assert made[0] == 2
    assert event(feed.frame(1)) == {"type": "patch", "number": 2, "data": {"count": 2}}
    now[0] = 4.0
    feed.refresh()
    assert event(feed.frame(1))["type"] == "document", "a page that missed a patch gets all"


async def test_a_change_of_the_view_is_sent_before_its_time(scripted: ScriptedMesh) -> None:
    async with served(scripted, ApiOptions(live_interval_s=4)) as api, api.http.get("/metrics/stream") as reply:
        numbers: list[tuple[float, int]] = []
        async for line in reply.content:
            if line.startswith(b"data: ") and (number := event(line).get("number")):
                numbers.append((monotonic(), number))
                if number == 1:
                    asyncio.get_running_loop().call_later(0.25, scripted.changed.beat)
                else:
                    break
    assert numbers[1][0] - numbers[0][0] < 3, "the next one was due after 4 s, and the change came while it rested"


def test_the_document_has_the_hops_that_other_peers_measured(scripted: ScriptedMesh) -> None:
    hop = {"to": "c", "rtt_ms": 0.4, "mb_per_s": 900.0, "kind": "ethernet"}
    state = report_of(
        StateReport,
        view={"peers": [{"id": "b", "name": "beta"}]},
        telemetry={"b": {"temperature_c": 60.0, "hops": [hop]}},
        links=[{"from": "a", "to": "b", "rtt_ms": 1.0}],
    )
    scripted = replace(scripted)
    scripted.services.observation.state = lambda: state  # type: ignore[method-assign]
    document = live_document(scripted.services.observation, 1.0)
    assert document["links"] == {"b c": {"from": "b", **hop}, "a b": msgspec.to_builtins(state.links[0])}
    assert document["peers"]["b"]["temperature_c"] == 60.0 and document["peers"]["b"]["power_w"] is None


async def test_a_stream_begins_with_who_asks_then_the_document_then_patches(api: Served) -> None:
    async with api.http.get("/dashboard/metrics") as reply:
        assert reply.content_type == "text/event-stream"
        events = []
        async for line in reply.content:
            if line.startswith(b"data: "):
                events.append(event(line))
            if len(events) == 2:
                break
    assert events[0]["data"]["caller"] == {"role": "admin", "key": "", "may_download": True}
    assert events[1]["type"] == "document"
    assert events[1]["data"]["queue"]["max"] == 32
    async with api.http.get("/metrics/snapshot") as reply:
        snapshot = await reply.json()
        assert snapshot["health"]["status"] == "ok"
        assert snapshot["peers"] == {}


async def test_a_closed_mesh_shows_nothing_live_to_strangers(scripted: ScriptedMesh) -> None:
    async with served(scripted, ApiOptions(access=AccessPolicy(needs_key=True))) as api:
        for path in ("/metrics/stream", "/metrics/snapshot", "/dashboard/metrics"):
            async with api.http.get(path) as reply:
                assert reply.status == 401
        async with api.http.get("/", headers={"Accept": "text/html"}) as reply:
            assert reply.status == 200, "the page itself asks for the key"


async def test_too_many_listeners_are_refused(api: Served) -> None:
    replies = [await api.http.get("/metrics/stream") for _ in range(MAX_LISTENERS)]
    async with api.http.get("/metrics/stream") as refused:
        assert refused.status == 429
        assert "Retry-After" in refused.headers
    for reply in replies:
        reply.close()


def test_a_document_holds_what_the_page_shows_and_no_list_of_requests(scripted: ScriptedMesh) -> None:
    described = {
        "peers",
        "instances",
        "links",
        "cables",
        "downloads",
        "stages_here",
        "health",
        "queue",
        "requests",
        "memory",
    }
    document = live_document(scripted.services.observation, 1.0)
    assert document.keys() == {"time", "node_id"} | described
    assert document["requests"] == scripted.services.observation.request_stats()
