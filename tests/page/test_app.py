"""The page as an app in Chromium: it opens while its node is gone, and goes on at another node if there is one."""

from __future__ import annotations

import os
import signal

from exo_mesh.cli.client.local_mesh import local_mesh
from tests.page.chromium import MODEL, ask, import_conversations, needs_chromium, page_at, whole_answer
from tests.page.samples import RICH

pytestmark = needs_chromium
FLAGS = ["--engine", "dummy", "--open-admin"]


async def test_a_page_opens_without_its_node_and_then_without_any() -> None:
    from playwright.async_api import expect

    with local_mesh(2, FLAGS, "app", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client(1).post("/instance", {"model": MODEL, "exclude_peers": ["peer-1"]}, 60.0)
        async with page_at(*mesh.api_urls, service_workers="allow") as page:
            await import_conversations(page, [{**RICH, "updated": 1}])
            await expect(page.locator(".connection")).to_contain_text("peer-1")
            await page.evaluate("navigator.serviceWorker.ready.then(() => true)")
            await page.reload()
            await expect(page.locator(".connection")).to_contain_text("peer-1")
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            await page.reload()
            await expect(page.locator(".connection")).to_contain_text("peer-2", timeout=40_000)
            await page.get_by_role("button", name="New conversation").click()
            await ask(page, "Hello", Token_limit="5")
            assert (await whole_answer(page))["tokens"] == 5
            os.killpg(mesh.children[1].pid, signal.SIGKILL)
            await page.reload()
            gone = page.get_by_role("alert").filter(has_text="None of these nodes answers: peer-1, peer-2.")
            await expect(gone).to_be_visible(timeout=40_000)
            await page.locator(".conversations .title").last.click()
            await expect(page.locator(".message.assistant").first).to_contain_text("Text with code")
            await page.get_by_role("link", name="Settings").click()
            await expect(page.get_by_label("Theme")).to_be_visible()
