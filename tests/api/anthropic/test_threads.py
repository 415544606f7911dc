"""Threads: a node holds the conversation under the id of its reply, and the next request has only new messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.rings.serving.kept_answers import KeptAnswers
from tests.api.anthropic.conftest import Asking
from tests.api.openai.test_tools import CALL
from tests.api.scripted_mesh import ScriptedMesh, served

TOOL: dict[str, Any] = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}
CREATE = {"type": "create"}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def result(call: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]}]


def after(message_id: str) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": message_id}


@pytest.fixture
async def open_asking(thinking_model: Path) -> AsyncIterator[Asking]:
    """Nobody has the rights of an admin."""
    async with served(ScriptedMesh(thinking_model, limit=4096), ApiOptions(access=AccessPolicy())) as server:
        yield Asking(server)


async def test_a_thread_goes_on_with_its_system_prompt_tools_calls_and_results(asking: Asking) -> None:
    asking.mesh.answer = f"<think>hm</think>\n\nOne moment.{CALL}"
    first = await asking.message(
        system="Be brief.", tools=[TOOL], messages=user("Weather?"), thread=CREATE, thinking={"type": "adaptive"}
    )
    asking.mesh.answer = "Blue."
    second = await asking.message(messages=result(first["content"][-1], "sun"), thread=after(first["id"]))
    await asking.message(messages=user("And now?"), thread=after(second["id"]))
    prompt = asking.prompt()
    words = ("get_weather", "Be brief.", "Weather?", "One moment.", "Rome", "sun", "Blue.", "And now?")
    assert [word for word in words if word not in prompt] == []
    said = [prompt.index(word) for word in words[2:]]
    assert said == sorted(said)


async def test_the_prompt_of_a_thread_is_that_of_the_whole_conversation(asking: Asking) -> None:
    first = await asking.message(system="Be brief.", messages=user("Hi"), thread=CREATE)
    status, counted = await asking.post(
        "/v1/messages/count_tokens", {"messages": user("And?"), "thread": after(first["id"])}
    )
    await asking.message(messages=user("And?"), thread=after(first["id"]))
    held = asking.prompt()
    assert (status, counted["input_tokens"]) == (200, len(asking.mesh.request.prompt_ids))
    reply = {"role": "assistant", "content": first["content"]}
    await asking.message(system="Be brief.", messages=[*user("Hi"), reply, *user("And?")])
    assert asking.prompt() == held


@pytest.mark.parametrize(
    "begun", ["The sky is", [{"type": "text", "text": "The sky"}, {"type": "text", "text": " is"}]]
)
async def test_a_reply_that_continues_the_last_message_is_one_text_with_it(asking: Asking, begun: Any) -> None:
    asking.mesh.answer = " blue."
    messages = [*user("Hi"), {"role": "assistant", "content": begun}]
    first = await asking.message(messages=messages, thread=CREATE)
    await asking.message(messages=user("And?"), thread=after(first["id"]))
    assert " is blue." in asking.prompt()


@pytest.mark.parametrize("display", [None, "omitted"])
async def test_a_streamed_reply_is_held_like_a_whole_one_with_its_thinking(asking: Asking, display: Any) -> None:
    asking.mesh.answer = f"<think>secret</think>\n\nWell.{CALL}"
    fields = {"tools": [TOOL], "thread": CREATE, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    fields["thinking"]["display"] = display
    whole = await asking.message(**fields)
    events = await asking.events(**fields)
    streamed = events[0][1]["message"]
    shown = "".join(data["delta"].get("thinking", "") for name, data in events if name == "content_block_delta")
    assert shown == whole["content"][0]["thinking"] == ("" if display else "secret")
    held = []
    for message_id in (whole["id"], streamed["id"]):
        answer = await asking.mesh.services.requests.kept_answers.read(None, message_id)
        assert answer is not None
        held.append(answer.data.replace(message_id.encode(), b""))
    assert held[0].count(b"secret") == held[1].count(b"secret") == 1 and b"Rome" in held[1]


async def test_one_reply_may_be_continued_in_two_ways(asking: Asking) -> None:
    first = await asking.message(messages=user("Hi"), thread=CREATE)
    for text in ("left", "right"):
        await asking.message(messages=user(text), thread=after(first["id"]))
    assert "right" in asking.prompt() and "left" not in asking.prompt()


async def test_a_thread_that_is_not_held_is_named_so_that_clients_send_all_again(asking: Asking) -> None:
    first = await asking.message(messages=user("Hi"))
    for unknown in (first["id"], "msg_none", "resp_0123456789", "", "\ud800", "x" * 5000):
        status, error = await asking.refusal(messages=user("And?"), thread=after(unknown))
        if unknown == "\ud800":
            assert status == 400
            continue
        assert (status, error["type"]) == (404, "not_found_error")
        assert error["details"] == {"error_code": "thread_not_found"}


async def test_a_held_message_is_no_response_of_the_other_dialect(asking: Asking) -> None:
    first = await asking.message(messages=user("Hi"), thread=CREATE)
    for method in ("GET", "DELETE"):
        async with asking.api.http.request(method, f"/v1/responses/{first['id']}") as reply:
            assert reply.status == 404
    status, reply = await asking.post("/v1/responses", {"input": "And?", "previous_response_id": first["id"]})
    assert (status, reply["error"]["param"]) == (404, "previous_response_id")
    await asking.message(messages=user("And?"), thread=after(first["id"]))


async def test_only_the_caller_who_created_a_thread_continues_it(open_asking: Asking) -> None:
    first = await open_asking.message(messages=user("Hi"), thread=CREATE)
    assert (await open_asking.message(messages=user("And?"), thread=after(first["id"])))["id"] != first["id"]
    without_secret = first["id"].rpartition("_")[0]
    assert (await open_asking.refusal(messages=user("And?"), thread=after(without_secret)))[0] == 404


async def test_what_a_thread_keeps_cannot_change_in_it(asking: Asking) -> None:
    first = await asking.message(messages=user("Hi"), tools=[TOOL], system="s", thread=CREATE)
    for fields in ({"system": "t"}, {"tools": [TOOL]}):
        status, error = await asking.refusal(messages=user("And?"), thread=after(first["id"]), **fields)
        assert status == 400 and next(iter(fields)) in error["message"]
    await asking.message(messages=user("And?"), thread=after(first["id"]), system="", tools=[])
    status, error = await asking.refusal(messages=[], thread=after(first["id"]))
    assert status == 400 and "messages is empty" in error["message"]
    status, error = await asking.refusal(
        messages=[{"role": "user", "content": [{"type": "x"}]}], thread=after(first["id"])
    )
    assert status == 400 and error["message"].startswith("messages[0].content[0]")


async def test_a_node_that_keeps_nothing_says_that_it_holds_no_thread(thinking_model: Path) -> None:
    mesh = ScriptedMesh(thinking_model, limit=4096)
    mesh.answers = KeptAnswers(0, lambda: 0.0)
    async with served(mesh, ApiOptions()) as server:
        status, error = await Asking(server).refusal(messages=user("Hi"), thread=CREATE)
        assert (status, error["details"]["error_code"]) == (400, "thread_unsupported_request")
        assert (await Asking(server).message(messages=user("Hi"), thread=None))["id"]


async def test_an_empty_thread_holds_nothing(asking: Asking) -> None:
    for value in (None, {}, "", False, []):
        first = await asking.message(messages=user("Hi"), thread=value)
        assert await asking.mesh.services.requests.kept_answers.read(None, first["id"]) is None
    status, error = await asking.refusal(messages=user("Hi"), thread={"type": "fork"})
    assert status == 400 and "thread" in error["message"]
