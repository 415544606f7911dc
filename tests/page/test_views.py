"""Every view of the page in Chromium on a real mesh that computes: changes of the mesh, layout, accessibility, safety.

`PAGE_REVIEW=DIR` makes it write every view at every width, light and dark, for people to look at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.page.chromium import (
    MODEL,
    PHONE,
    ask,
    axe_findings,
    import_conversations,
    needs_axe,
    needs_chromium,
    open_view,
    page_at,
    review,
    view_names,
    whole_answer,
)
from tests.page.samples import EVIL, HOSTILE, RICH
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.hub import LoopbackHub

pytestmark = needs_chromium

WIDTHS = (390, 768, 1280, 1920)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    model_dir = tmp_path_factory.mktemp("hub") / "tiny"
    write_checkpoint(model_dir, TinyModel(layers=6, hidden=256, intermediate=512))
    with LoopbackHub() as hub:
        hub.add("org/tiny", model_dir)
        yield hub


@pytest.fixture(scope="module")
def mesh(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    """Two nodes that know the hub, with the demo model over both."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**hub.environment, "HF_HOME": str(tmp_path_factory.mktemp("hf"))}.items():
            patch.setenv(name, value)
        with local_mesh(2, ["--engine", "numpy", "--open-admin"], "views", api_port=0) as mesh:
            mesh.wait_until_joined()
            mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
            yield mesh


async def test_a_question_gets_the_right_answer(mesh: LocalMesh) -> None:
    async with page_at(*mesh.api_urls) as page:
        await ask(page, "Count from 3 to 12.", Temperature="0")
        answer = await whole_answer(page)
        assert answer["content"] == ", ".join(map(str, range(3, 13)))
        assert (answer["finish"], answer["error"]) == ("stop", None)
        assert answer["tokens"] == 22
        assert answer["ttft"] > 0


async def test_a_model_is_pulled_with_progress_then_loaded_and_unloaded(mesh: LocalMesh, hub: LoopbackHub) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await open_view(page, "models")
        hub.faults.pause_s = 0.1
        await page.get_by_label("Hugging Face hub").fill("org/tiny")
        await page.get_by_role("button", name="Pull", exact=True).click()
        await expect(page.locator(".download").get_by_text("downloading").first).to_be_visible()
        await expect(page.locator(".download .quiet").last).to_have_text(re.compile(r"^[1-9]\d? %: .*B of .*B"))
        hub.faults.pause_s = 0
        tiny = page.locator(".item", has_text="org/tiny")
        await tiny.get_by_role("button", name=re.compile("^Load")).click()
        await expect(tiny.get_by_text("ready", exact=True)).to_be_visible()
        await tiny.get_by_role("button", name="Unload").click()
        await expect(tiny.get_by_text("ready", exact=True)).to_have_count(0)
        assert [one["model"] for one in mesh.client().get("/state")["view"]["instances"]] == [MODEL]


async def test_pictures_of_every_view_fit_their_width(mesh: LocalMesh) -> None:
    async with page_at(*mesh.api_urls) as page:
        await import_conversations(page, [RICH])
        for width in WIDTHS:
            height = PHONE["height"] if width == PHONE["width"] else width * 3 // 4
            await page.set_viewport_size({"width": width, "height": height})
            for name in await view_names(page):
                await open_view(page, name)
                assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), (name, width)
                if "PAGE_REVIEW" in os.environ:
                    await review(page, Path(os.environ["PAGE_REVIEW"]), f"{name}-{width}")


@needs_axe
async def test_axe_finds_nothing_serious_in_any_view(mesh: LocalMesh) -> None:
    async with page_at(*mesh.api_urls, reduced_motion="reduce") as page:
        await import_conversations(page, [RICH])
        await page.get_by_role("button", name="Options").click()
        found = {}
        for name in await view_names(page):
            await open_view(page, name)
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                found[name, scheme] = await axe_findings(page)
        await page.set_viewport_size(PHONE)
        await open_view(page, "chat")
        found["chat", "phone"] = await axe_findings(page)
        assert {where: findings for where, findings in found.items() if findings} == {}


@needs_axe
async def test_axe_finds_nothing_serious_at_any_width_in_german(mesh: LocalMesh) -> None:
    """Together with the test above: each width, both colours, both languages."""
    async with page_at(*mesh.api_urls, locale="de-DE", reduced_motion="reduce") as page:
        await import_conversations(page, [RICH])
        found = {}
        for width, scheme in zip(WIDTHS, ("dark", "light", "dark", "light"), strict=True):
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme=scheme)
            for name in await view_names(page):
                await open_view(page, name)
                found[name, width] = await axe_findings(page)
                assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), (name, width)
        assert {where: findings for where, findings in found.items() if findings} == {}


async def test_hostile_names_models_and_answers_stay_text(mesh: LocalMesh) -> None:
    """Every text that a node sends, but addresses and ids, is replaced by markup."""
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await page.route("**/*", answer_with_markup)
        await page.reload()
        await import_conversations(page, [EVIL])
        for name in await view_names(page):
            await open_view(page, name)
            for one in await page.locator("main details:not([open]) > summary, svg .peer").all():
                await one.click()
            await expect(page.locator("main")).to_contain_text("<script>alert(2)</script>")
            assert not await page.locator("main img, main script, main a[href^=javascript]").count(), name


async def answer_with_markup(route: Any) -> None:
    path = urlsplit(route.request.url).path
    if path == "/" or path.startswith("/page/") or route.request.method != "GET":
        return await route.continue_()
    if path == "/metrics/stream":
        reply = await route.fetch(url=route.request.url.replace("/stream", "/snapshot"))
        document = await reply.json()
        hello = {"type": "hello", "data": document}
        events = [hello, {"type": "document", "number": 1, "data": marked_up(document, KEPT)}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return await route.fulfill(body=body, content_type="text/event-stream")
    reply = await route.fetch()
    settings = {"name"} if path == "/config" else set()  # the page looks for settings by their names
    return await route.fulfill(response=reply, json=marked_up(await reply.json(), KEPT | settings))


KEPT = {"id", "node_id", "peer", "from", "to", "api_url", "driver", "object"}
"""Fields that refer to others, or that the page calls."""


def marked_up(value: Any, kept: set[str], name: str = "") -> Any:
    """The value with HOSTILE for each text in it, but those of the fields `kept`."""
    if isinstance(value, dict):
        return {key: marked_up(inner, kept, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [marked_up(inner, kept, name) for inner in value]
    return HOSTILE if isinstance(value, str) and name not in kept else value
