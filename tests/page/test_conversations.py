"""Conversations in Chromium: keyboard, versions, copies, search, export and import, several tabs of one browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from tests.page.chromium import (
    MODEL,
    ask,
    conversations,
    import_conversations,
    needs_chromium,
    page_at,
    until_written,
    whole_answer,
)
from tests.page.samples import RICH, answered, conversation, said

pytestmark = needs_chromium
SLOW = ["--engine", "dummy", "--engine-option", "cost_ms=30"]
LIMITED = {"Temperature": "0", "Token_limit": "80"}


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    """One node, whose answers take seconds."""
    with local_mesh(1, [*SLOW, "--open-admin"], "talks", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL}, 60.0)
        yield mesh


async def test_answers_and_edited_messages_are_versions_and_all_of_them_stay(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await ask(page, "first", Temperature="0", Token_limit="3", System_prompt="Be brief.")
        before = await whole_answer(page)
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.locator(".versions")).to_have_text("2/2")
        assert (await whole_answer(page))["content"] == before["content"]
        await page.get_by_label("Write a message").press("ArrowUp")
        await page.get_by_label("Edit the message").fill("second")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("line")
        await page.keyboard.press("Enter")
        await whole_answer(page)
        await expect(page.locator(".message.user .versions")).to_have_text("2/2")
        await expect(page.locator(".message.assistant .versions")).to_have_count(0)
        await page.reload()
        await page.get_by_role("button", name="Previous version").click()
        await expect(page.locator(".bubble")).to_have_text("first")
        await expect(page.locator(".message.assistant .versions")).to_have_text("2/2")
        await page.get_by_label("Write a message").press("ArrowUp")
        await page.keyboard.press("Escape")
        await expect(page.locator(".bubble")).to_have_text("first")
        await page.get_by_role("button", name="Branch").click()
        copy, original = await conversations(page)
        assert [one["content"] for one in original["messages"] if one["role"] == "user"] == ["first"]
        assert [len(one["messages"]) for one in (copy, original)] == [2, 2]
        assert copy["settings"] == original["settings"] and copy["settings"]["system"] == "Be brief."


async def test_a_stopped_answer_is_marked_and_continues_where_it_ended(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await ask(page, "Hello", **LIMITED)
        await until_written(page, 10)
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_text("Stopped by you").wait_for()
        stopped = await whole_answer(page)
        await page.get_by_role("button", name="Continue").click()
        await until_written(page, len(stopped["content"]) + 10)
        await page.reload()  # also a continued answer outlives this
        await expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=30_000)
        whole = await whole_answer(page)
        assert whole["content"].startswith(stopped["content"])
        assert whole["tokens"] == stopped["tokens"] + 80
        assert [one["role"] for one in (await conversations(page))[0]["messages"]] == ["user", "assistant"]


async def test_conversations_are_found_renamed_pinned_and_deleted(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    day = 86_400_000
    now = datetime.now().timestamp() * 1000
    async with page_at(*mesh.api_urls) as page:
        talks = [("today", 0), ("yesterday", day), ("in the week", 4 * day), ("long ago", 400 * day)]
        given = [conversation(name, said(f"words of {name}"), answered("x"), updated=now - age) for name, age in talks]
        await import_conversations(page, given)
        heads = page.locator(".list h2")
        await expect(heads).to_have_text(["Today", "Yesterday", "Previous 7 days", "Older"])
        await page.get_by_label("Search").fill("words LONG")
        await expect(page.locator(".list .title")).to_have_text(["long ago"])
        await menu(page, "long ago", "Rename")
        await page.get_by_label("Title").fill("kept")
        await page.keyboard.press("Enter")
        await page.get_by_label("Search").fill("")
        await menu(page, "kept", "Pin")
        await expect(heads).to_have_text(["Pinned", "Today", "Yesterday", "Previous 7 days"])
        await menu(page, "yesterday", "Delete")
        await page.locator(".asks").get_by_role("button", name="Delete").click()
        await expect(page.locator(".list .title")).to_have_text(["kept", "today", "in the week"])
        async with page.expect_download() as waiting:
            await menu(page, "kept", "Export as Markdown")
        text = (await (await waiting.value).path()).read_text()
        assert text == "# kept\n\n## You\n\nwords of long ago\n\n## Model\n\nx\n"


async def menu(page: Any, title: str, action: str) -> None:
    """Choose an action of a conversation, with the keyboard."""
    await page.get_by_role("button", name=f"Actions for “{title}”").focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("menuitem", name=action, exact=True).focus()
    await page.keyboard.press("Enter")


async def test_keys_stop_an_answer_and_lead_to_the_next_message(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await ask(page, "Hello", **LIMITED)
        await until_written(page, 3)
        await page.locator(".messages").focus()
        await page.keyboard.press("Escape")
        assert (await whole_answer(page))["tokens"] < 80
        await page.locator(".messages").focus()
        await page.keyboard.press("/")
        await expect(page.get_by_label("Write a message")).to_be_focused()
        await page.goto(f"{mesh.api_urls[0]}/#/mesh")
        await page.reload()
        await page.get_by_role("navigation").wait_for()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()


async def test_code_is_copied_and_conversations_move_as_a_file(mesh: LocalMesh) -> None:
    async with page_at(*mesh.api_urls, permissions=["clipboard-read", "clipboard-write"]) as page:
        await import_conversations(page, [RICH])
        await page.locator(".code button").click()
        await page.locator(".code").get_by_text("Copied").wait_for()
        assert await page.locator(".code-bar span").inner_text() == "Python"
        assert (await page.evaluate("navigator.clipboard.readText()")).startswith("def greet(name: str)")
        assert await page.locator(".reasoning:not([open]), .call[open]").count() == 2
        async with page.expect_download() as waiting:
            await page.get_by_role("button", name="All conversations").click()
            await page.get_by_role("menuitem", name="Export all").click()
        (exported,) = exported_from(await (await waiting.value).path())
        assert exported["messages"] == RICH["messages"]


def exported_from(path: Path) -> list[dict[str, Any]]:
    conversations: list[dict[str, Any]] = json.loads(path.read_text())["conversations"]
    return conversations


async def test_running_answers_are_listed_and_taken_up_before_the_first_token_too(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await ask(page, "word " * 1500, **LIMITED)  # takes some frames to read
        await page.reload()
        await expect(page.get_by_role("button", name="Stop")).to_be_visible()
        await page.get_by_role("button", name="New conversation").click()
        await expect(page.locator(".conversations .spinner")).to_have_count(1)
        await expect(page.locator(".conversations .spinner")).to_have_count(0, timeout=30_000)
        (only,) = await conversations(page)
        assert only["running"] is None
        assert (only["messages"][-1]["tokens"], only["messages"][-1]["error"]) == (80, None)


async def test_a_second_tab_shows_an_answer_and_takes_it_over_when_the_first_one_closes(mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*mesh.api_urls) as page:
        await ask(page, "Hello", Temperature="0", Token_limit="150")
        await until_written(page, 5)
        other = await page.context.new_page()
        await other.goto(mesh.api_urls[0])
        await until_written(other, 10)
        assert "superseded" not in [one["outcome"] for one in mesh.client().get("/requests/recent")["requests"]]
        await page.close()
        answer = await whole_answer(other)
        assert (answer["tokens"], answer["error"]) == (150, None)
        await expect(other.get_by_role("button", name="Send")).to_be_visible()


async def test_a_long_history_is_imported_searched_and_opened_in_parts(mesh: LocalMesh) -> None:
    """500 conversations and 5 MB: each is found, and only a part of them and of a long conversation is drawn."""
    from playwright.async_api import expect

    def long(name: str, turns: int, updated: float) -> dict[str, Any]:
        turn = (said(f"question of {name}"), answered("some **words** of an answer " * 37))
        return conversation(name, *turn * turns, updated=updated)

    given = [long(f"talk {number}", 9, 1e12 - number) for number in range(499)]
    given.insert(0, long("the long one", 300, 1e12 + 1))
    assert len(json.dumps(given)) > 5_000_000
    async with page_at(*mesh.api_urls) as page:
        await import_conversations(page, given)
        await expect(page.locator(".bar .heading")).to_have_text("the long one")
        assert 6 <= await page.locator(".message").count() < 120
        await page.get_by_role("button", name="Show earlier messages").click()
        assert 120 < await page.locator(".message").count() < 240
        await page.reload()
        await expect(page.locator(".list .title")).to_have_count(200)
        await page.get_by_role("button", name="Show 300 more").click()
        await expect(page.locator(".list .title")).to_have_count(400)
        await page.get_by_label("Search").fill("question of talk 498")
        await expect(page.locator(".list .title")).to_have_text(["talk 498"])
        await page.locator(".list .title").click()
        await expect(page.locator(".bubble").first).to_have_text("question of talk 498")
