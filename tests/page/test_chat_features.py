"""What a message of the chat can carry: files, thinking, web tools, presets. The requests of the page are answered by
the test, so that every answer is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.scripted_mesh import Served
from tests.api.webtools.test_pdf_text import pdf, words
from tests.page.chromium import choose_model, conversations, needs_chromium, page_at

pytestmark = needs_chromium

THINKS = {"supported": True, "toggle": True, "effort": True}
MODELS = {
    "object": "list",
    "data": [
        {"id": "able", "status": "loaded", "context_length": 1000,
         "capabilities": {"modalities": {"input": ["text"]}, "tools": {"supported": True}, "thinking": THINKS}},
        {"id": "plain", "status": "loaded", "context_length": 1000,
         "capabilities": {"modalities": {"input": ["text"]}, "tools": {"supported": False}}},
    ],
}  # fmt: skip


def events(*deltas: dict[str, Any], finish: str = "stop") -> str:
    """An answer as the API streams it."""
    usage = {"prompt_tokens": 300, "completion_tokens": 20}
    chunks = [{"id": "c1", "choices": [{"delta": delta, "finish_reason": None}], "usage": None} for delta in deltas]
    chunks.append({"id": "c1", "choices": [{"delta": {}, "finish_reason": finish}], "usage": usage})
    lines = [f"id: {number}\ndata: {json.dumps(chunk)}\n\n" for number, chunk in enumerate(chunks)]
    return "".join([*lines, "data: [DONE]\n\n"])


class Asked:
    """The bodies of the page's requests, each answered with the next of the answers."""

    def __init__(self, *answers: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = list(answers)

    async def answer(self, route: Any) -> None:
        self.bodies.append(json.loads(route.request.post_data))
        answer = self._answers.pop(0) if self._answers else events({"content": "fine"})
        await route.fulfill(body=answer, content_type="text/event-stream")


async def with_models(page: Any, asked: Asked, web_tools: tuple[str, ...] = ()) -> None:
    async def models(route: Any) -> None:
        await route.fulfill(json=MODELS)

    async def live(route: Any) -> None:
        hello = {"type": "hello", "data": {"caller": {"role": "admin"}, "web_tools": list(web_tools)}}
        document = {"type": "document", "data": {"time": 1, "node_id": "a", "peers": {}, "instances": {}}}
        await route.fulfill(
            body="".join(f"data: {json.dumps(one)}\n\n" for one in (hello, document)), content_type="text/event-stream"
        )

    await page.route("**/v1/models", models)
    await page.route("**/metrics/stream", live)
    await page.route("**/v1/chat/completions", asked.answer)
    await page.reload()
    await choose_model(page, "able")


async def write(page: Any, text: str) -> None:
    """Send a message, once the page has a model, and wait for the answer."""
    await page.locator(".model-choice .chosen[data-known=true]").wait_for()
    await page.get_by_label("Write a message").fill(text)
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Regenerate").wait_for()


async def test_text_files_are_sent_with_the_message_and_others_are_refused(api: Served) -> None:
    from playwright.async_api import expect

    asked = Asked()
    async with page_at(api.url) as page:
        await with_models(page, asked)
        files = [("notes.md", b"# A note"), ("bad.bin", bytes(range(256))), ("large.txt", b"x" * 1_100_000)]
        await page.locator("input.attach").set_input_files(
            [{"name": name, "mimeType": "", "buffer": body} for name, body in files]
        )
        await expect(page.locator(".attached .file")).to_have_count(1)
        await expect(page.get_by_role("alert").filter(has_text="large.txt is too large")).to_be_visible()
        await page.get_by_label("Write a message").focus()
        await page.get_by_role("button", name="Remove notes.md").focus()
        await write(page, "What is it?")
        sent = asked.bodies[0]["messages"][-1]["content"]
        assert sent == "notes.md:\n```\n# A note\n```\n\nWhat is it?"
        (kept,) = await conversations(page)
        assert kept["messages"][0]["files"] == [{"name": "notes.md", "text": "# A note"}]
        await expect(page.locator(".message.user .files")).to_contain_text("notes.md")


async def test_the_text_of_a_dropped_pdf_is_read_by_the_node(api: Served) -> None:
    pytest.importorskip("pypdf")
    asked = Asked()
    async with page_at(api.url) as page:
        await with_models(page, asked)
        data = await page.evaluate_handle(
            "bytes => { const data = new DataTransfer();"
            " data.items.add(new File([new Uint8Array(bytes)], 'a.pdf', { type: 'application/pdf' })); return data; }",
            list(pdf(words(b"Hello mesh"))),
        )
        await page.dispatch_event(".composer", "drop", {"dataTransfer": data})
        await page.locator(".attached .icon-file").wait_for()
        await write(page, "Sum it up.")
        assert asked.bodies[0]["messages"][-1]["content"] == "a.pdf:\n```\nHello mesh\n```\n\nSum it up."


async def test_thinking_is_chosen_in_the_composer_where_the_model_thinks(api: Served) -> None:
    from playwright.async_api import expect

    asked = Asked(events({"reasoning_content": "hm"}, {"content": "fine"}))
    async with page_at(api.url) as page:
        await with_models(page, asked)
        for choice, fields in (("", {}), ("off", {"enable_thinking": False}), ("high", {"reasoning_effort": "high"})):
            await page.get_by_label("Thinking").select_option(choice)
            await write(page, "Think.")
            body = asked.bodies[-1]
            names = ("enable_thinking", "reasoning_effort")
            assert {name: body[name] for name in names if name in body} == fields
        await expect(page.locator(".reasoning:not([open]) summary")).to_have_text("Reasoning")
        await choose_model(page, "plain")
        await expect(page.get_by_label("Thinking")).to_have_count(0)


async def test_an_answer_that_stopped_in_its_thinking_continues_there(api: Served) -> None:
    from playwright.async_api import expect

    asked = Asked(
        events({"reasoning_content": "First the"}, finish="length"),
        events({"reasoning_content": " sum."}, {"content": "It is 4."}),
    )
    async with page_at(api.url) as page:
        await with_models(page, asked)
        await write(page, "Add.")
        await page.get_by_role("button", name="Continue").click()
        await expect(page.locator(".message.assistant > .markdown")).to_have_text("It is 4.")
        await expect(page.get_by_role("button", name="Continue")).to_have_count(0)
        body = asked.bodies[-1]
        assert body["continue_final_message"]
        assert body["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": "First the"}
        (kept,) = await conversations(page)
        assert [one.get("reasoning") for one in kept["messages"]] == [None, "First the sum."]


async def test_the_model_searches_the_web_and_answers_with_what_it_found(api: Served) -> None:
    from playwright.async_api import expect

    arguments = json.dumps({"query": "a mesh"})
    call = {"index": 0, "id": "t1", "function": {"name": "web_search", "arguments": arguments}}
    asked = Asked(events({"tool_calls": [call]}, finish="tool_calls"), events({"content": "It is a ring."}))
    async with page_at(api.url) as page:
        await with_models(page, asked, ("web_search", "open_url", "extract_page"))
        await page.route("**/v1/tools/web_search", lambda route: route.fulfill(json={"results": [{"title": "Rings"}]}))
        await page.get_by_role("button", name="Search the web").click()
        await write(page, "What is a mesh?")
        await expect(page.locator(".message.assistant").last).to_contain_text("It is a ring.")
        first, second = asked.bodies
        assert [one["function"]["name"] for one in first["tools"]] == ["web_search", "extract_page"]
        called, result = second["messages"][-2:]
        assert (called["role"], called["tool_calls"][0]["function"]["arguments"]) == ("assistant", arguments)
        assert (result["role"], result["tool_call_id"], "Rings" in result["content"]) == ("tool", "t1", True)
        await expect(page.locator(".call:not([open]) summary")).to_have_text("web_search was called")
        await page.get_by_role("button", name="Regenerate").click()  # the whole turn again, with its calls
        await expect(page.locator(".versions").first).to_have_text("2/2")
        (kept,) = await conversations(page)
        assert [one["role"] for one in kept["messages"]] == ["user", "assistant"]


async def test_a_preset_keeps_options_and_begins_new_conversations(api: Served) -> None:
    from playwright.async_api import expect

    asked = Asked()
    async with page_at(api.url) as page:
        await with_models(page, asked)
        await page.get_by_role("button", name="Options").click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Temperature").fill("0.3")
        await page.get_by_label("Name of a new preset").fill("Brief")
        await page.get_by_role("button", name="Save as preset").click()
        await page.get_by_label("Begin new conversations with it").check()
        await page.get_by_role("button", name="New conversation").click()
        await page.reload()
        await write(page, "Hello")
        assert (asked.bodies[0]["messages"][0], asked.bodies[0]["temperature"]) == (
            {"role": "system", "content": "Be brief."},
            0.3,
        )
        await expect(page.locator(".context button")).to_have_attribute(
            "aria-label", "320 of 1,000 tokens of the context are used (32 %)"
        )
        await page.locator(".context button").click()
        await expect(page.get_by_text("Nothing is left out silently")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Options").click()
        await page.locator(".presets select").select_option("Brief")
        await page.get_by_role("button", name="Delete the preset “Brief”").click()
        assert json.loads(await page.evaluate("localStorage['exo.presets']")) == {"list": [], "preferred": ""}
