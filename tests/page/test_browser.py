"""The page in Chromium, on two real nodes. PAGE_CHROMIUM names the browser; default: chromium in the path."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.security.api_keys import KeyFile, Role, new_key
from tests.api.scripted_mesh import ScriptedMesh, served

playwright = pytest.importorskip("playwright.async_api", reason="the browser tests need playwright")
CHROMIUM = os.environ.get("PAGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium; PAGE_CHROMIUM names it"),
]

MODEL, QUESTION = "exo-mesh-demo", "Count from 7 to 90."
NUM_TOKENS = 90
SLOW = ["--engine-option", "cost_ms=15"]
PHONE = {"width": 390, "height": 844}
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script> [x](javascript:alert(3)) ![y](https://example.com/y.png)"
)


@asynccontextmanager
async def page_at(url: str, **context: Any) -> AsyncIterator[Any]:
    """A page in a browser of its own. At its end: no error was thrown, no dialog opened, nothing foreign was asked."""
    found: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = await browser.new_context(**{"locale": "en-US", "viewport": {"width": 1024, "height": 768}, **context})
        page = await opened.new_page()
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("request", lambda asked: None if "//127.0.0.1:" in asked.url else found.append(asked.url))
        page.on("dialog", lambda dialog: found.append(f"dialog: {dialog.message}"))
        await page.goto(url)
        yield page
        await browser.close()
    assert not found


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[LocalMesh]:
    """Two nodes with one instance over both, whose answers take seconds."""
    with local_mesh(2, ["--engine", "dummy", "--open-admin", *SLOW], "page", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        yield mesh


async def ask(page: Any, question: str) -> None:
    await playwright.expect(page.locator(".model-choice select")).to_have_value(MODEL)
    await page.locator(".bar > button").last.click()
    await page.locator(".sampling input").nth(0).fill("0")
    await page.locator(".sampling input").nth(2).fill(str(NUM_TOKENS))
    await page.locator(".composer textarea").fill(question)
    await page.keyboard.press("Enter")


async def until_written(page: Any, num_characters: int) -> None:
    async with asyncio.timeout(30):
        while len(await page.locator(".message.assistant .markdown").inner_text()) < num_characters:
            await asyncio.sleep(0.05)


async def whole_answer(page: Any) -> dict[str, Any]:
    """The last message as the browser keeps it, once it is complete."""
    await page.get_by_role("button", name="Regenerate").wait_for(timeout=60_000)
    kept = await page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('exo.conversation.'))"
                               ".map((name) => localStorage.getItem(name))[0]")  # fmt: skip
    message: dict[str, Any] = json.loads(kept)["messages"][-1]
    return message


def computed(mesh: LocalMesh, index: int) -> str:
    """What a node answers to a program."""
    body = {
        "model": MODEL,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    text: str = mesh.client(index).post("/v1/chat/completions", body, 60.0)["choices"][0]["message"]["content"]
    return text


async def test_views_show_the_mesh_also_on_a_phone(slow_mesh: LocalMesh) -> None:
    async with page_at(slow_mesh.api_urls[0], viewport=PHONE, color_scheme="dark") as page:
        await page.get_by_role("link", name="Mesh").click()
        await playwright.expect(page.locator("svg.ring .peer")).to_have_count(2)
        await playwright.expect(page.locator("svg.ring .hop")).to_have_count(2)
        for name in ("Chat", "Mesh", "Models", "Requests"):
            await page.get_by_role("link", name=name).click()
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), name
        await page.get_by_label("Language").select_option("de")
        await playwright.expect(page.get_by_role("link", name="Modelle")).to_be_visible()


async def test_stop_ends_an_answer_and_the_request(slow_mesh: LocalMesh) -> None:
    async with page_at(slow_mesh.api_urls[0]) as page:
        await ask(page, QUESTION)
        await until_written(page, 5)
        await page.get_by_role("button", name="Stop").click()
        assert 0 < (await whole_answer(page))["tokens"] < NUM_TOKENS
    async with asyncio.timeout(10):
        while slow_mesh.client().get("/queue")["entered"]:
            await asyncio.sleep(0.05)


async def test_an_answer_outlives_a_reload_and_then_the_node_that_serves_the_page() -> None:
    with local_mesh(2, ["--engine", "dummy", "--open-admin", *SLOW], "page", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        async with page_at(mesh.api_urls[0]) as page:
            await ask(page, QUESTION)
            await until_written(page, 10)
            await page.reload()
            await until_written(page, 30)
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            answer = await whole_answer(page)
            assert (answer["error"], answer["finish"], answer["tokens"]) == (None, "length", NUM_TOKENS)
            assert answer["content"] == computed(mesh, 1)
            await playwright.expect(page.locator(".connection")).to_contain_text("peer-2")


async def test_a_closed_mesh_asks_for_a_key_and_shows_hostile_text_as_text(
    scripted: ScriptedMesh, tmp_path: Path
) -> None:
    key, record = new_key(Role.USE, datetime.now(UTC))
    keys = KeyFile(tmp_path / "keys")
    keys.write([record])
    async with served(scripted, ApiOptions(access=AccessPolicy(keys, needs_key=True))) as api, page_at(api.url) as page:
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Use key").click()
        await playwright.expect(page.locator(".connection")).to_contain_text("May read and chat")
        said = {"content": HOSTILE, "reasoning": HOSTILE, "calls": [], "error": None}
        messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", **said}]
        hostile = {"conversations": [{"id": "h", "title": HOSTILE, "messages": messages}]}
        file = {"name": "c.json", "mimeType": "application/json", "buffer": json.dumps(hostile).encode()}
        await page.locator("input[type=file]").set_input_files(file)
        await page.locator(".conversations .title").first.click()
        await playwright.expect(page.locator(".message.assistant > .markdown")).to_contain_text(
            "<script>alert(2)</script>"
        )
        assert await page.locator("main img, main script, main a[href^=javascript]").count() == 0
