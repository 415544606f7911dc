"""The page in Chromium, on two real nodes: chats, and answers that outlive a reload, a runner and a node."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key
from tests.page.chromium import MODEL, PHONE, ask, needs_chromium, page_at, until_written, view_names, whole_answer

pytestmark = needs_chromium

QUESTION = "Count from 7 to 90."
NUM_TOKENS = 90
GREEDY = {"Temperature": "0", "Token_limit": str(NUM_TOKENS)}
SLOW = ["--engine", "dummy", "--engine-option", "cost_ms=15"]


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[LocalMesh]:
    """Two nodes with one instance over both, whose answers take seconds."""
    with local_mesh(2, [*SLOW, "--open-admin"], "page", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        yield mesh


@pytest.fixture(scope="module")
def whole_text(slow_mesh: LocalMesh) -> str:
    """What such a mesh answers to a program: the engine gives the same text on any mesh."""
    body = {
        "model": MODEL,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    text: str = slow_mesh.client(1).post("/v1/chat/completions", body, 60.0)["choices"][0]["message"]["content"]
    return text


def key_of(home: Path) -> str:
    """A new key of the mesh that may read and chat."""
    key, record = new_key(Role.USE, datetime.now(UTC))
    KeyFile(home / FILE_NAME).write([record])
    return key


async def test_views_show_the_mesh_also_on_a_phone(slow_mesh: LocalMesh) -> None:
    from playwright.async_api import expect

    async with page_at(*slow_mesh.api_urls, viewport=PHONE, has_touch=True, color_scheme="dark") as page:
        await page.get_by_role("button", name="Menu").tap()
        await page.locator("nav").get_by_role("link", name="Mesh").tap()
        await expect(page.locator("svg.ring .peer")).to_have_count(2)
        await expect(page.locator("svg.ring .hop")).to_have_count(2)
        for name in await view_names(page):  # the last one is that of the settings
            await page.get_by_role("button", name="Menu").tap()
            await page.locator(f"nav a[href='#/{name}']").tap()
            assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), name
        await page.locator("main").get_by_label("Language").select_option("de")
        await page.get_by_role("button", name="Menü").tap()
        await expect(page.locator("nav").get_by_role("link", name="Modelle")).to_be_visible()


async def test_stop_ends_an_answer_and_the_request(slow_mesh: LocalMesh) -> None:
    async with page_at(*slow_mesh.api_urls) as page:
        await ask(page, QUESTION, **GREEDY)
        await until_written(page, 5)
        await page.get_by_role("button", name="Stop").click()
        assert 0 < (await whole_answer(page))["tokens"] < NUM_TOKENS
    async with asyncio.timeout(10):
        while slow_mesh.client().get("/queue")["entered"]:
            await asyncio.sleep(0.05)


async def test_an_answer_goes_on_after_a_runner_is_killed_and_the_ring_recovers(
    slow_mesh: LocalMesh, whole_text: str
) -> None:
    from playwright.async_api import expect

    async with page_at(*slow_mesh.api_urls) as page:
        await ask(page, QUESTION, **GREEDY)
        await until_written(page, 10)
        stages = slow_mesh.client().get("/state")["view"]["instances"][0]["stages"]
        os.kill(stages[-1]["pid"], signal.SIGKILL)
        answer = await whole_answer(page)
        assert (answer["error"], answer["tokens"]) == (None, NUM_TOKENS)
        assert answer["content"] == whole_text
        await page.locator("nav").get_by_role("link", name="Mesh").click()
        await expect(page.locator(".pill.state-ready").first).to_be_visible()
        await expect(page.locator("svg.ring .hop")).to_have_count(2)


async def test_an_answer_outlives_a_reload_and_then_the_node_that_serves_the_page(whole_text: str) -> None:
    from playwright.async_api import expect

    with local_mesh(2, [*SLOW, "--open-admin"], "page", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        async with page_at(*mesh.api_urls) as page:
            await ask(page, QUESTION, **GREEDY)
            await until_written(page, 10)
            await page.reload()
            await until_written(page, 30)
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            answer = await whole_answer(page)
            assert (answer["error"], answer["finish"], answer["tokens"]) == (None, "length", NUM_TOKENS)
            assert answer["content"] == whole_text
            await expect(page.locator(".connection")).to_contain_text("peer-2")


def secret_flags(folder: Path) -> list[str]:
    """The flags of nodes that share a new secret."""
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    return ["--secret-file", str(secret)]


async def test_a_page_of_a_closed_mesh_that_was_opened_by_the_printed_link_outlives_its_node(
    tmp_path: Path, whole_text: str
) -> None:
    from playwright.async_api import expect

    with local_mesh(2, [*SLOW, *secret_flags(tmp_path)], "closed", api_port=0) as mesh:
        mesh.wait_until_joined()
        mesh.client().post("/instance", {"model": MODEL, "min_peers": 2}, 60.0)
        token = mesh.client().local_token()
        async with page_at(f"{mesh.api_urls[0]}/#token={token}", *mesh.api_urls[1:]) as page:
            await expect(page.locator(".connection")).to_contain_text("May change the mesh")
            await ask(page, QUESTION, **GREEDY)
            await until_written(page, 10)
            await page.reload()
            await until_written(page, 30)
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            answer = await whole_answer(page)
            assert (answer["error"], answer["finish"], answer["tokens"]) == (None, "length", NUM_TOKENS)
            assert answer["content"] == whole_text
            await expect(page.locator(".connection")).to_contain_text("peer-2")
            await expect(page.locator(".connection")).to_contain_text("May change the mesh")
            session = await page.evaluate("sessionStorage['exo.key']")
            assert token not in page.url and session not in page.url
            assert session not in await page.evaluate("JSON.stringify(localStorage)")
        assert not [child for child in mesh.children if session in child.log_path.read_text()]


async def test_a_page_without_a_session_says_which_node_has_gone_and_which_one_needs_a_key(tmp_path: Path) -> None:
    from playwright.async_api import expect

    with local_mesh(2, [*SLOW[:2], *secret_flags(tmp_path)], "closed", api_port=0) as mesh:
        mesh.wait_until_joined()
        key = key_of(Path(mesh.children[1].ready["home"]))
        async with page_at(*mesh.api_urls) as page:
            await page.route("**/v1/session", lambda route: route.fulfill(status=404, json={}))  # an older node
            await page.get_by_label("API key").fill(mesh.client().local_token())
            await page.get_by_role("button", name="Use key").click()
            await expect(page.locator(".connection")).to_contain_text("peer-1")
            os.killpg(mesh.children[0].pid, signal.SIGKILL)
            await expect(page.get_by_text("peer-1 no longer answers; peer-2 needs a key of the mesh")).to_be_visible()
            await page.get_by_label("API key").fill(key)
            await page.get_by_role("button", name="Use key").click()
            await expect(page.locator(".connection")).to_contain_text("peer-2")


async def test_a_closed_mesh_asks_for_a_key_and_says_what_it_may_do(tmp_path: Path) -> None:
    from playwright.async_api import expect

    with local_mesh(2, [*SLOW[:2], *secret_flags(tmp_path)], "closed", api_port=0) as mesh:
        mesh.wait_until_joined()
        key = key_of(Path(mesh.children[0].ready["home"]))
        async with page_at(*mesh.api_urls) as page:
            prompt = page.get_by_label("API key")
            await prompt.fill("xm-wrong")
            await page.keyboard.press("Enter")
            await prompt.fill(key)
            await page.get_by_role("button", name="Use key").click()
            await expect(page.locator(".connection")).to_contain_text("May read and chat")
            await ask(page, "Hello")
            assert (await whole_answer(page))["content"]
            await page.locator("nav").get_by_role("link", name="Models").click()
            await expect(page.locator("main")).to_contain_text("Changing models needs a key with the role admin")
            await expect(page.get_by_role("button", name="Unload")).to_have_count(0)
            await page.reload()
            await expect(page.locator(".connection")).to_contain_text("May read and chat")
            assert not await prompt.count(), "it is asked for once in a tab"
