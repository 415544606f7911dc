"""The view of requests in Chromium: what runs, the waterfall of a traced request, diagnostics and raw documents."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exo_mesh.client.local_mesh import LocalMesh, local_mesh

playwright = pytest.importorskip("playwright.async_api", reason="the browser tests need playwright")
CHROMIUM = os.environ.get("PAGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium; PAGE_CHROMIUM names it"),
]
MODEL = "exo-mesh-demo"
PICTURES = os.environ.get("PAGE_REVIEW")
"""A directory for pictures of the view at every width, light and dark, for people to look at."""


@pytest.fixture(scope="module")
def traced_mesh() -> Iterator[LocalMesh]:
    """Two nodes with one instance over both, that trace every request because one of them was told to."""
    flags = ["--engine", "dummy", "--open-admin", "--engine-option", "cost_ms=10"]
    with local_mesh(2, flags, "requests-view", api_port=0) as mesh:
        mesh.wait_until_joined()
        urls = mesh.api_urls
        assert put(f"{urls[0]}/v1/tracing", {"enabled": True})["enabled"]
        until(lambda: mesh.client(1).get("/v1/tracing")["enabled"], 2.0)
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        ask(mesh, 1, 12)
        yield mesh


def put(url: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(asked, timeout=10.0) as reply:
        return json.load(reply)


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the switch reaches the other peer in time"


def ask(mesh: LocalMesh, index: int, num_tokens: int) -> Any:
    messages = [{"role": "user", "content": "Count from 7 to 90."}]
    body = {"model": MODEL, "max_tokens": num_tokens, "temperature": 0, "messages": messages}
    return mesh.client(index).post("/v1/chat/completions", body, 60.0)


@asynccontextmanager
async def requests_view(url: str, **context: Any) -> AsyncIterator[Any]:
    found: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = await browser.new_context(**{"locale": "en-US", "viewport": {"width": 1024, "height": 900}, **context})
        page = await opened.new_page()
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("console", lambda said: found.append(said.text[:200]) if "Content Security" in said.text else None)
        await page.goto(f"{url}/#/requests")
        yield page
        await browser.close()
    assert not found


async def test_a_request_of_another_peer_is_shown_hop_by_hop(traced_mesh: LocalMesh) -> None:
    async with requests_view(traced_mesh.api_urls[0]) as page:
        traces = page.locator("section.traces")
        await traces.get_by_role("button", name="Show").first.click()
        await playwright.expect(traces.locator(".waterfall .row-name")).to_have_count(3)
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


async def test_a_running_answer_is_listed_and_stopped(traced_mesh: LocalMesh) -> None:
    async with requests_view(traced_mesh.api_urls[0]) as page:
        asking = threading.Thread(target=lambda: ends_early(traced_mesh))
        asking.start()
        await page.locator("section", has_text="Running now").get_by_role("button", name="Stop").click(timeout=20_000)
        asking.join(20.0)
        assert not asking.is_alive()
        await playwright.expect(page.get_by_text("No answer that you may see is running.")).to_be_visible(
            timeout=10_000
        )


def ends_early(mesh: LocalMesh) -> None:
    with pytest.raises(Exception, match="cancel"):
        ask(mesh, 0, 1500)


async def test_diagnostics_of_every_node_and_a_capture(traced_mesh: LocalMesh) -> None:
    async with requests_view(traced_mesh.api_urls[0]) as page:
        await page.get_by_role("button", name="Ask all nodes").click()
        nodes = page.locator("section.diagnostics .item")
        await playwright.expect(nodes).to_have_count(2)
        await nodes.nth(1).get_by_text("Capture stacks and memory").click()
        captured = nodes.nth(1).locator("pre")
        await playwright.expect(captured).to_contain_text("most recent call first", timeout=15_000)
        assert "Count from 7" not in await captured.inner_text()
        assert await page.locator("section.diagnostics tbody tr").count() > 5


async def test_the_view_is_never_wider_than_the_window(traced_mesh: LocalMesh) -> None:
    drivers = [
        any("kv_pool_tokens" in stage for stage in traced_mesh.client(i).get("/memory")["stages"]) for i in (0, 1)
    ]
    url = traced_mesh.api_urls[drivers.index(True)]
    for scheme in ("light", "dark") if PICTURES else ("dark",):
        async with requests_view(url, color_scheme=scheme) as page:
            await page.locator("section.traces").get_by_role("button", name="Show").last.click()
            await page.locator(".waterfall .legend").wait_for()
            await page.get_by_role("button", name="Ask all nodes").click()
            await page.locator("section.diagnostics .item").first.wait_for()
            await playwright.expect(page.get_by_text("peak of the last 90 s")).to_be_visible()
            await playwright.expect(page.get_by_text("positions used")).to_be_visible()
            for width in (390, 1024, 1920):
                await page.set_viewport_size({"width": width, "height": 900})
                assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), width
                if PICTURES:
                    await page.evaluate("document.querySelector('#app').style.height = 'auto'")
                    await page.screenshot(path=f"{PICTURES}/requests-{width}-{scheme}.png", full_page=True)
