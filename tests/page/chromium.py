"""Chromium at the page of a mesh. PAGE_CHROMIUM names the browser; default: `chromium` in the path.

AXE_CORE_DIR is the directory into which `npm install --prefix DIR axe-core@4` put the accessibility checker.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = os.environ.get("PAGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
AXE = Path(os.environ.get("AXE_CORE_DIR", ""), "node_modules", "axe-core", "axe.min.js")
MODEL = "exo-mesh-demo"
PHONE = {"width": 390, "height": 844}

needs_chromium = [
    pytest.mark.extended,
    pytest.mark.skipif(find_spec("playwright") is None, reason="browser tests need playwright: pip install playwright"),
    pytest.mark.skipif(CHROMIUM is None, reason="browser tests need Chromium; PAGE_CHROMIUM names it"),
]
needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason="AXE_CORE_DIR must name a directory with the npm package axe-core"
)


@asynccontextmanager
async def page_at(url: str, *members: str, **context: Any) -> AsyncIterator[Any]:
    """A page in a browser of its own, at the start page of the node `url`; context: of Playwright's `new_context`.

    At its end the page has thrown no error, opened no dialog, broken no rule of its security policy, and asked nothing
    of addresses other than `url` and `members`.
    """
    from playwright.async_api import async_playwright, expect

    expect.set_options(timeout=20_000)
    found: list[str] = []
    allowed = {urlsplit(one).netloc for one in (url, *members)} | {""}  # blob: and data: have no address
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        usual = {"locale": "en-US", "viewport": {"width": 1024, "height": 768}, "service_workers": "block"}
        opened = await browser.new_context(**{**usual, **context})
        opened.set_default_timeout(20_000)
        page = await opened.new_page()
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("request", lambda asked: None if urlsplit(asked.url).netloc in allowed else found.append(asked.url))
        page.on("dialog", lambda dialog: found.append(f"dialog: {dialog.message}"))
        page.on("console", lambda said: found.append(said.text[:200]) if "Content Security" in said.text else None)
        await page.goto(url)
        yield page
        await browser.close()
    assert not found, "\n".join(sorted(set(found)))


async def view_names(page: Any) -> list[str]:
    """As the addresses of the page name them: `chat`, `mesh`, and so on; the last one is `settings`."""
    links: list[str] = await page.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.hash.slice(2))")
    assert len(links) >= 4
    return links


async def open_view(page: Any, name: str) -> None:
    """Open a view and wait until it shows what the node says, and until it is painted."""
    await page.evaluate("(name) => { location.hash = `#/${name}`; }", name)
    await page.locator(f"main.view-{name}").wait_for()
    await page.locator(".connection small").last.wait_for(state="attached")  # on a phone it is in the drawer
    await page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def ask(page: Any, question: str, **sampling: str) -> None:
    """Write a question and send it, once the page has a model. sampling: labels of fields and their values."""
    from playwright.async_api import expect

    await expect(page.locator(".model-choice .chosen")).to_have_attribute("value", MODEL)
    if sampling:
        await page.get_by_role("button", name="Options").click()
        for name, value in sampling.items():
            await page.get_by_label(name.replace("_", " ").capitalize()).fill(value)
        await page.get_by_role("button", name="Options").click()
    await page.get_by_label("Write a message").fill(question)
    await page.keyboard.press("Enter")


async def choose_model(page: Any, name: str) -> None:
    """Choose a model in the composer."""
    await page.locator(".model-choice .chosen").click()
    await page.get_by_role("option", name=name).click()


async def until_written(page: Any, num_characters: int) -> None:
    """Until the running answer is as long as this."""
    async with asyncio.timeout(30):
        while sum(map(len, await page.locator(".message.assistant > .markdown").all_inner_texts())) < num_characters:
            await asyncio.sleep(0.05)


async def conversations(page: Any) -> list[dict[str, Any]]:
    """All that the browser keeps, the newest first."""
    kept: list[dict[str, Any]] = await page.evaluate(
        """() => new Promise((resolve, reject) => {
            const opened = indexedDB.open("exo-mesh");
            opened.onerror = () => reject(opened.error);
            opened.onsuccess = () => {
                const asked = opened.result.transaction("conversations").objectStore("conversations").getAll();
                asked.onsuccess = () => { opened.result.close(); resolve(asked.result); };
            };
        })"""
    )
    return sorted(kept, key=lambda one: -float(one["updated"]))


async def whole_answer(page: Any) -> dict[str, Any]:
    """The last message of the newest conversation as the browser keeps it, once it is complete."""
    await page.get_by_role("button", name="Regenerate").wait_for(timeout=60_000)
    message: dict[str, Any] = (await conversations(page))[0]["messages"][-1]
    return message


async def import_conversations(page: Any, given: Iterable[dict[str, Any]]) -> None:
    """Through the page's own import, and open the first."""
    body = json.dumps({"conversations": list(given)}).encode()
    await page.locator("input.import").set_input_files(
        {"name": "c.json", "mimeType": "application/json", "buffer": body}
    )
    await page.locator(".conversations .title").first.wait_for(state="attached")
    await page.locator(".conversations .title").first.dispatch_event("click")  # on a phone the list is folded


async def review(page: Any, folder: Path, name: str) -> None:
    """Write pictures of what it shows, light and dark."""
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        await page.screenshot(path=folder / f"{name}-{scheme}.png")


@cache
def _axe() -> str:
    return AXE.read_text("utf-8")


async def axe_findings(page: Any) -> list[str]:
    """What axe calls serious or critical in what is shown now: rule, element, and what is wrong."""
    await page.evaluate(_axe())
    violations = (await page.evaluate("axe.run({resultTypes: ['violations']})"))["violations"]
    return [
        f"{one['id']} {node['target']}: {node['failureSummary']}"
        for one in violations
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
