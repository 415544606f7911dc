"""The chat for everybody, in Chromium: by keyboard, for screen readers, in German, from right to left, at any width."""

from __future__ import annotations

from typing import Any

from tests.api.scripted_mesh import Served
from tests.page.chromium import axe_findings, choose_model, import_conversations, needs_axe, needs_chromium, page_at
from tests.page.samples import RICH, answered, conversation, said
from tests.page.test_chat_features import Asked, events, with_models

pytestmark = needs_chromium
WIDTHS = (390, 768, 1280, 1920)
VERSIONS = conversation(
    "a talk",
    said("first"),
    {**answered("one", finish="stopped"), "versions": {"before": [[answered("two")]], "after": []}},
)


async def tab_to(page: Any, name: str, *, back: bool = False) -> None:
    """Move the focus by Tab until an element has this name."""
    focused = "(document.activeElement.getAttribute('aria-label') || document.activeElement.labels?.[0]?.innerText"
    focused += " || document.activeElement.textContent).trim()"
    for _ in range(60):
        await page.keyboard.press("Shift+Tab" if back else "Tab")
        if (await page.evaluate(focused)).startswith(name):
            return
    raise AssertionError(f"Tab does not lead to {name}")


async def test_everything_of_a_talk_is_reached_by_keyboard(api: Served) -> None:
    from playwright.async_api import expect

    asked = Asked(events({"content": "one"}), events({"content": "two"}), events({"content": "three"}))
    async with page_at(api.url) as page:
        await with_models(page, asked)
        await page.locator(".list p").click()
        await page.keyboard.press("/")
        await page.keyboard.type("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message.assistant")).to_contain_text("one")
        await tab_to(page, "Regenerate", back=True)
        await page.keyboard.press("Enter")
        await expect(page.locator(".message.assistant")).to_contain_text("two")
        await page.keyboard.press("/")
        await tab_to(page, "Previous version", back=True)
        await page.keyboard.press("Enter")
        await expect(page.locator(".message.assistant")).to_contain_text("one")
        await page.keyboard.press("/")
        await page.keyboard.press("ArrowUp")
        await page.keyboard.type(" again")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message.assistant")).to_contain_text("three")
        assert asked.bodies[-1]["messages"] == [{"role": "user", "content": "Hello again"}]
        await page.keyboard.press("/")
        for name in ("Attach files", "Model", "Thinking"):
            await tab_to(page, name)
        await tab_to(page, "Actions for", back=True)
        await page.keyboard.press("Enter")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await page.keyboard.type("renamed")
        await page.keyboard.press("Enter")
        await expect(page.locator(".list .title")).to_have_text("renamed")


@needs_axe
async def test_axe_finds_nothing_in_any_state_of_the_chat(api: Served) -> None:
    async with page_at(api.url, reduced_motion="reduce") as page:
        await with_models(page, Asked(), ("web_search", "extract_page"))
        await import_conversations(page, [VERSIONS, RICH])
        found = {}

        async def look(state: str) -> None:
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                found[state, scheme] = await axe_findings(page)

        await page.locator(".list .title", has_text="a talk").click()
        await choose_model(page, "able")
        await look("versions and a stopped answer")
        await page.locator(".model-choice .chosen").click()
        await look("models")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Actions for “a talk”").click()
        await look("menu")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Edit").click()
        await look("edit")
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Options").click()
        await page.locator("input.attach").set_input_files([{"name": "a.txt", "mimeType": "", "buffer": b"text"}])
        await page.locator(".context button").click()
        await look("options, file and context")
        await page.locator(".list .title", has_text="A conversation").click()
        await look("everything that a model writes")
        assert {where: findings for where, findings in found.items() if findings} == {}


async def test_the_chat_fits_every_width_also_from_right_to_left_and_in_german(api: Served) -> None:
    async with page_at(api.url, locale="de-DE") as page:
        await with_models(page, Asked(), ("web_search", "extract_page"))
        await import_conversations(page, [RICH])
        await page.get_by_role("button", name="Optionen").click()
        for direction in ("ltr", "rtl"):
            await page.evaluate("(direction) => { document.documentElement.dir = direction; }", direction)
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": 800})
                assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), (direction, width)
                controls = "'.talk :is(button, select, textarea)'"
                outside = (
                    f"() => [...document.querySelectorAll({controls})]"
                    + """.filter((one) => {
                    const { left, right, width } = one.getBoundingClientRect();
                    return width && !one.closest('.code') && (left < 0 || right > innerWidth + 1);
                }).map((one) => one.outerHTML.slice(0, 90))"""
                )
                assert await page.evaluate(outside) == [], (direction, width)
        await page.set_viewport_size({"width": 1920, "height": 1000})
        parts = "['.composer', '.message.assistant'].map((one) => document.querySelector(one).getBoundingClientRect())"
        edges = await page.evaluate(f"{parts}.map((one) => [Math.round(one.left), Math.round(one.width)])")
        assert edges[0] == edges[1] and edges[0][1] == 720
