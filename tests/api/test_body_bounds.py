"""What a body may cost: values are counted before they are decoded, and large bodies take turns."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import random
import tracemalloc
import zlib
from typing import Any

import pytest

from exo_mesh.api.bodies.room import FREE_BYTES, Room
from exo_mesh.api.bodies.values import MAX_VALUES, count_values
from exo_mesh.api.core.conversation import with_late_system_as_user
from exo_mesh.api.core.request import Turn
from exo_mesh.api.openai.schema import ChatBody
from exo_mesh.errors import BodiesWaitError
from tests.api.scripted_mesh import Served

LISTS: list[list[int]] = [[]] * (MAX_VALUES // 2 + 1)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": LISTS})}}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": LISTS}}}
BOMB = "exo-mesh-1:" + base64.b64encode(zlib.compress(b"a" * (4 << 20))).decode()


def sent(body: dict[str, Any]) -> io.BytesIO:
    return io.BytesIO(json.dumps(body).encode())  # aiohttp warns of more than 1 MB of bytes


def count_plainly(value: Any) -> int:
    """Values and names of fields."""
    if isinstance(value, dict):
        return 1 + sum(1 + count_plainly(item) for item in value.values())
    return 1 + sum(map(count_plainly, value)) if isinstance(value, list) else 1


def test_a_count_is_never_below_the_number_of_values_and_ignores_strings() -> None:
    drawn = random.Random(7)
    signs = ['"', "\\", "[", "]", "{", ":", ",", "\\\\", '\\"', "a", "ü"]

    def value(depth: int) -> Any:
        kind = drawn.randrange(4 if depth else 2)
        if kind == 0:
            return drawn.randrange(100)
        if kind == 1:
            return "".join(drawn.choices(signs, k=drawn.randrange(40_000 if depth == 3 else 30)))
        if kind == 2:
            return [value(depth - 1) for _ in range(drawn.randrange(5))]
        return {f"{name}{drawn.choice(signs)}": value(depth - 1) for name in range(drawn.randrange(5))}

    for _ in range(200):
        made = value(3)
        text = json.dumps(made).encode()
        plain = count_plainly(made)
        assert plain <= count_values(text) <= 2 * plain


def test_a_long_text_of_code_is_one_value() -> None:
    text = json.dumps({"content": 'f = [{"a": 1}, "\\\\"]\n' * 100_000}).encode()
    assert count_values(text) < 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"x": LISTS}}),
        ("/v1/chat/completions", {"messages": [USER] * (MAX_VALUES // 5)}),
        ("/v1/chat/completions", {"messages": [USER], "stop": [""] * MAX_VALUES}),
        ("/v1/chat/completions", {"messages": [USER], "metadata": {"x": LISTS}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LISTS}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
        ("/v1/completions", {"prompt": [0] * (MAX_VALUES + 1)}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * (MAX_VALUES // 5)}),
        ("/v1/responses", {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": BOMB}] * 2}),
        ("/v1/messages", {"messages": [USER] * (MAX_VALUES // 5), "max_tokens": 1}),
        ("/api/chat", {"messages": [USER] * (MAX_VALUES // 5)}),
        ("/v1/embeddings", {"input": [[0]] * MAX_VALUES}),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"x": LISTS}}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LISTS}]}),
    ],
)
async def test_too_many_values_are_refused_before_they_are_made(api: Served, path: str, body: dict[str, Any]) -> None:
    size = len(sent(body).getvalue())
    stream = sent(body)
    tracemalloc.start()
    async with api.http.post(path, data=stream) as reply:
        text = await reply.text()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reply.status == 400 and ("values" in text or "packed reasoning" in text), text
    assert peak < 3 * size + (16 << 20)


async def test_a_prompt_of_100000_token_ids_and_a_long_text_are_read(api: Served) -> None:
    async with api.http.post("/v1/completions", json={"prompt": [1] * 100_000}) as reply:
        assert (await reply.json())["error"]["code"] == "context_length_exceeded"
    code = 'f = [{"a": 1}, "\\\\"]\n' * 300_000
    async with api.http.post("/v1/completions", data=sent({"prompt": code})) as reply:
        assert (await reply.json())["error"]["code"] == "context_length_exceeded"


async def test_tools_and_variables_have_a_bound_of_their_own(api: Served) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"x": "a" * (5 << 20)}}
    async with api.http.post("/v1/chat/completions", data=sent(body)) as reply:
        error = (await reply.json())["error"]
    assert reply.status == 400 and error["param"] == "chat_template_kwargs" and "4194304" in error["message"]


async def test_a_body_is_dropped_once_its_prompt_is_ready(api: Served) -> None:
    async with api.http.post(
        "/v1/chat/completions", json={"messages": [USER], "stream": True, "metadata": {"x": "a" * FREE_BYTES}}
    ) as reply:
        await reply.content.readany()
        gc.collect()
        left = [one for one in gc.get_objects() if isinstance(one, ChatBody)]
        assert not left, "a body in memory while its answer is written"


async def test_room_goes_to_those_who_hold_the_least() -> None:
    room = Room(10, 6, "it", wait_s=5)
    await room.take(6, "a")
    order: list[str] = []

    async def ask(name: str, amount: int) -> None:
        await room.take(amount, name)
        order.append(name)

    tasks = [asyncio.create_task(ask("a", 4)), asyncio.create_task(ask("b", 6)), asyncio.create_task(ask("c", 4))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["c"], "a has its share, and b does not fit"
    room.give_back(6, "a")
    await asyncio.wait(tasks[:1], timeout=5)
    assert order == ["c", "a"], "in their order"
    room.give_back(4, "a")
    await asyncio.wait(tasks, timeout=5)
    assert order == ["c", "a", "b"]
    room.give_back(4, "c")
    room.give_back(6, "b")
    assert not room._taken.total()


async def test_who_waits_too_long_or_behind_too_many_gets_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(1, 1, "it", wait_s=0.01)
    await room.take(1, "a")
    with pytest.raises(BodiesWaitError):
        await room.take(1, "b")
    monkeypatch.setattr("exo_mesh.api.bodies.room.MOST_WAITING", 0)
    with pytest.raises(BodiesWaitError, match="too many"):
        await room.take(1, "b")
    room.give_back(1, "a")
    assert not room._taken.total()


def test_thousands_of_messages_of_one_role_are_joined_in_linear_time() -> None:
    turns = [Turn("system", "a" * 400, "") for _ in range(20_000)] + [Turn("user", "a" * 400, "")] * 20_000
    *_, last = with_late_system_as_user(turns)
    assert len(last.text) == 20_000 * 401 - 1
