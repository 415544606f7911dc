"""The views Mesh and Models in Chromium, on real nodes: place by preview, tend a peer, and see a recovery."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.page.chromium import MODEL, PHONE, needs_chromium, open_view, page_at
from tests.page.mesh_fixture import mesh_state

pytestmark = needs_chromium
SLOW = ["--engine-option", "cost_ms=15"]
QUESTION = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "Count from 7 to 90."}]}


async def test_a_model_is_placed_by_preview_watched_tended_and_recovers() -> None:
    """One mesh for the whole story, since starting one takes seconds."""
    from playwright.async_api import expect

    with local_mesh(3, ["--engine", "dummy", "--open-admin", *SLOW], "views", api_port=0) as mesh:
        mesh.wait_until_joined()
        async with page_at(f"{mesh.api_urls[0]}/#/chat", viewport={"width": 1024, "height": 1200}) as page:
            await expect(page.locator(".readiness")).to_contain_text("the first message loads it")
            await _place_by_preview(page)
            answer = asyncio.create_task(asyncio.to_thread(mesh.client().post, "/v1/chat/completions", QUESTION, 60.0))
            await _tend_a_peer(page, mesh)
            await _see_a_recovery(page, mesh)
            await _stop_the_answer(page)
            with pytest.raises(Exception, match="cancel"):
                await answer


async def _place_by_preview(page: Any) -> None:
    from playwright.async_api import expect

    await page.locator("nav").get_by_role("link", name="Models").click()
    await page.get_by_role("button", name=f"Place … {MODEL}").click()
    way = page.locator(".way", has_text="Peers: 2").first
    await expect(way.locator("tbody tr")).to_have_count(2)
    await expect(way).to_contain_text("GB of")
    await page.get_by_label("Layers of peer-1").fill("0-2")
    await expect(page.locator(".place .note")).to_contain_text("must cover each layer from 0 to 7")
    await page.get_by_label("Layers of peer-2").fill("3-7")
    await page.get_by_role("button", name="Place with these layers").click()
    await expect(page.locator(".stages li")).to_have_count(2)
    await page.locator(".pill.state-ready").first.wait_for(timeout=30_000)
    assert (await page.locator(".stages li").first.inner_text()).strip().startswith("peer-1 layers 0–2")


async def _tend_a_peer(page: Any, mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    await page.locator("nav").get_by_role("link", name="Mesh").click()
    await page.locator("svg.ring .hop.flowing").first.wait_for(timeout=15_000)
    idle = page.locator("svg.ring .peer:not(.holds)")
    await idle.hover()
    await expect(page.locator(".tip")).to_contain_text("peer-3")
    await idle.click()
    card = page.locator(".peer-card.chosen")
    await expect(card.locator(".log li").first).to_be_visible()
    await expect(card).to_contain_text("Python")
    await card.get_by_role("button", name="Drain").click()
    await expect(card.get_by_role("button", name="Accept requests again")).to_be_visible()
    assert mesh.client(2).get("/drain")["draining"]
    await card.get_by_role("button", name="Accept requests again").click()
    await expect(card.get_by_role("button", name="Drain")).to_be_visible()
    await card.get_by_role("button", name="Stop").click()
    await expect(card.get_by_role("button", name="Cancel")).to_be_focused()
    await page.keyboard.press("Escape")
    await idle.click()


async def _see_a_recovery(page: Any, mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    os.killpg(mesh.children[1].pid, signal.SIGKILL)  # the recovery may be over before the page looks again
    await expect(page.locator(".events")).to_contain_text("has recovered", timeout=30_000)
    await expect(page.locator(".events")).to_contain_text("peer-2 is gone", timeout=15_000)
    await expect(page.locator(".story")).to_contain_text(re.compile(r"peer-2 stopped; .* took over layers .*3–7"))
    await page.set_viewport_size(PHONE)
    assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth")


async def _stop_the_answer(page: Any) -> None:
    from playwright.async_api import expect

    await open_view(page, "models")
    answers = page.locator(".answers")
    await expect(answers).to_contain_text("Running answers: 1", timeout=15_000)
    assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth")
    await answers.get_by_role("button", name="Stop").click()
    await answers.get_by_role("button", name="Stop").click()
    await expect(answers).to_have_count(0, timeout=15_000)


async def test_a_recovery_is_shown_for_as_long_as_it_lasts(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    scripted = replace(scripted)
    states = {"before": mesh_state(4), "during": mesh_state(4, lost=True, state="loading"), "after": mesh_state(4)}
    now = "before"
    scripted.services.observation.state = lambda: states[now]  # type: ignore[method-assign]
    async with served(scripted, ApiOptions(live_interval_s=0.02)) as api, page_at(f"{api.url}/#/mesh") as page:
        await page.locator("svg.ring .peer").first.wait_for()
        now = "during"
        await expect(page.locator(".recovery")).to_contain_text("is recovering")
        assert "recovering" in (await page.locator("svg.ring").get_attribute("class") or "")
        now = "after"
        await expect(page.locator(".recovery")).to_have_count(0)
        await expect(page.locator(".events")).to_contain_text("has recovered")


HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_a_hidden_tab_asks_for_nothing(scripted: ScriptedMesh) -> None:
    scripted = replace(scripted)
    looked: list[int] = []
    scripted.services.observation.state = lambda: looked.append(1) or mesh_state(2)  # type: ignore[method-assign]
    async with served(scripted, ApiOptions(live_interval_s=0.02)) as api, page_at(f"{api.url}/#/mesh") as page:
        await open_view(page, "settings")  # the last view that the page fetches
        await open_view(page, "mesh")
        await page.locator("svg.ring .peer").first.wait_for()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.evaluate(HIDE, True)
        async with asyncio.timeout(10):
            while not await _is_quiet(page, looked):
                pass
        assert not asked
        async with page.expect_request("**/metrics/stream"):
            await page.evaluate(HIDE, False)


async def test_the_card_of_a_peer_says_what_its_gpu_does_and_who_told(scripted: ScriptedMesh) -> None:
    from playwright.async_api import expect

    scripted = replace(scripted)
    scripted.services.observation.state = lambda: mesh_state(2)  # type: ignore[method-assign]
    async with served(scripted, ApiOptions(live_interval_s=0.05)) as api, page_at(f"{api.url}/#/mesh") as page:
        figures = page.locator(".peer-card dd", has_text="RTX 4090")
        await expect(figures).to_have_text("RTX 4090 · 50 % busy · 212 W · 61 °C · 6.0 GB of 24 GB")
        await expect(figures).to_have_attribute("title", "read from nvml")


async def _is_quiet(page: Any, looked: list[int]) -> bool:
    """Whether the node makes no document during ten intervals."""
    before = len(looked)
    await page.wait_for_timeout(200)
    return len(looked) == before
