"""The view of requests in Chromium: what runs, the waterfall of a traced request, diagnostics and raw documents."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.page.chromium import MODEL, needs_chromium, page_at, review
from tests.support.processes import eventually

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def traced_mesh() -> Iterator[LocalMesh]:
    """Two nodes with one instance over both, that trace every request because one of them was told to."""
    flags = ["--engine", "dummy", "--open-admin", "--engine-option", "cost_ms=10"]
    with local_mesh(2, flags, "requests-view", api_port=0) as mesh:
        mesh.wait_until_joined()
        urls = mesh.api_urls
        assert put(f"{urls[0]}/v1/tracing", {"enabled": True})["enabled"]
        assert eventually(lambda: mesh.client(1).get("/v1/tracing")["enabled"])
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        ask(mesh, 1, 12)
        yield mesh


def put(url: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(asked, timeout=10.0) as reply:
        return json.load(reply)


def ask(mesh: LocalMesh, index: int, num_tokens: int) -> Any:
    messages = [{"role": "user", "content": "Count from 7 to 90."}]
    body = {"model": MODEL, "max_tokens": num_tokens, "temperature": 0, "messages": messages}
    return mesh.client(index).post("/v1/chat/completions", body, 60.0)


def requests_view(url: str, **context: Any) -> AbstractAsyncContextManager[Any]:
    return page_at(f"{url}/#/requests", **context)


async def test_a_request_of_another_peer_is_shown_hop_by_hop(traced_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with requests_view(traced_mesh.api_urls[0]) as page:
        traces = page.locator("section.traces")
        await traces.get_by_role("button", name="Show").first.click()
        await expect(traces.locator(".waterfall .row-name")).to_have_count(3)
        names = await traces.locator(".waterfall .row-name").all_text_contents()
        peers = {peer["name"] for peer in traced_mesh.client().get("/state")["view"]["peers"]}
        assert names[0] == "Request" and {name.split(" ", 1)[1] for name in names[1:]} == peers
        assert await traces.locator(".waterfall rect.kind-compute").count() >= 20, "two stages, twelve tokens"
        assert await traces.locator(".waterfall rect.kind-hop").count() >= 20
        assert await traces.locator(".waterfall .token").count() >= 10
        wide = await traces.locator(".waterfall svg").first.get_attribute("aria-label")
        await traces.get_by_role("button", name="Zoom in").click()
        assert await traces.locator(".waterfall svg").first.get_attribute("aria-label") != wide
        await traces.locator(".raw summary").click()
        assert json.loads(await traces.locator(".raw pre").inner_text())["otherData"]["output_tokens"] == 12
        async with page.expect_download() as saved:
            await traces.get_by_role("button", name="Save as a file").click()
        assert (await saved.value).suggested_filename.endswith(".json")


async def test_each_of_the_last_requests_shows_the_stages_that_computed_it(traced_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    ask(traced_mesh, 0, 2)
    view = traced_mesh.client().get("/state")["view"]
    names = {one["id"]: one["name"] for one in view["peers"]}
    expected = [
        f"{names[one['peer']]} {one['layers'][0]}–{one['layers'][1] - 1}" for one in view["instances"][0]["stages"]
    ]
    async with requests_view(traced_mesh.api_urls[0]) as page:
        found = page.locator("section", has_text="requests").locator("td .computed-by").first
        await expect(found.locator(".by")).to_have_count(2)
        for place, colour in enumerate(("stage-0", "stage-1")):
            await expect(found.locator(".by").nth(place).locator(f".swatch.{colour}")).to_have_count(1)
        shown = [" ".join(text.split()) for text in await found.locator(".by").all_inner_texts()]
        assert shown == expected


async def test_a_running_answer_is_listed_and_stopped(traced_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with requests_view(traced_mesh.api_urls[0]) as page:
        asking = threading.Thread(target=lambda: ends_early(traced_mesh))
        asking.start()
        await page.locator("section", has_text="Running now").get_by_role("button", name="Stop").click(timeout=20_000)
        asking.join(20.0)
        assert not asking.is_alive()
        await expect(page.get_by_text("No running answer that you may see.")).to_be_visible(timeout=10_000)


def ends_early(mesh: LocalMesh) -> None:
    with pytest.raises(Exception, match="cancel"):
        ask(mesh, 0, 1500)


async def test_diagnostics_of_every_node_and_a_capture(traced_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with requests_view(traced_mesh.api_urls[0]) as page:
        await page.get_by_role("button", name="Ask all nodes").click()
        nodes = page.locator("section.diagnostics .item")
        await expect(nodes).to_have_count(2)
        await nodes.nth(1).get_by_text("Capture stacks and memory").click()
        captured = nodes.nth(1).locator("pre")
        await expect(captured).to_contain_text("most recent call first", timeout=15_000)
        assert "Count from 7" not in await captured.inner_text()
        assert await page.locator("section.diagnostics tbody tr").count() > 5


async def test_the_view_is_never_wider_than_the_window(traced_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    drivers = [
        any("kv_pool_tokens" in stage for stage in traced_mesh.client(i).get("/memory")["stages"]) for i in (0, 1)
    ]
    url = traced_mesh.api_urls[drivers.index(True)]
    async with requests_view(url, color_scheme="dark") as page:
        await page.locator("section.traces").get_by_role("button", name="Show").last.click()
        await page.locator(".waterfall .legend").wait_for()
        await page.get_by_role("button", name="Ask all nodes").click()
        await page.locator("section.diagnostics .item").first.wait_for()
        await expect(page.get_by_text("peak of the last 90 s")).to_be_visible()
        await expect(page.get_by_text("positions used")).to_be_visible()
        for width in (390, 1024, 1920):
            await page.set_viewport_size({"width": width, "height": 900})
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), width
            if "PAGE_REVIEW" in os.environ:
                await review(page, Path(os.environ["PAGE_REVIEW"]), f"waterfall-{width}")
