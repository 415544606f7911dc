"""What a body may cost: its values are counted as it arrives, one that waits is not read, and large ones take turns."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import io
import json
import random
import socket
import tracemalloc
import zlib
from typing import Any

import pytest

from exo_mesh.api.bodies.room import FREE_BYTES, MOST_WAITING_OF_ONE, Room
from exo_mesh.api.connections import READ_BYTES
from exo_mesh.api.core.conversation import with_late_system_as_user
from exo_mesh.api.core.request import Turn
from exo_mesh.api.openai.schema import ChatBody
from exo_mesh.domain.bounded_json import MAX_VALUES, ValueCounter, count_values
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


def test_a_count_of_parts_is_that_of_the_whole() -> None:
    drawn = random.Random(8)
    text = json.dumps({"\\": ['a"', "\\\\", {"b": '\\"]['}, [], ""] * 200}).encode()
    counter, start = ValueCounter(), 0
    while start < len(text):
        end = start + drawn.randrange(1, 9)
        counter.add(text[start:end])
        start = end
    assert counter.count == count_values(text) == count_values(text.decode())


def test_texts_without_a_sign_between_them_are_counted_too() -> None:
    assert count_values(b'""' * 1000) >= 1000


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


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_body_of_too_many_values_is_refused_while_it_arrives(api: Served, encoding: str) -> None:
    body = b'{"messages":[' + b"[]," * (5 << 20)
    body = gzip.compress(body, 1) if encoding == "gzip" else body
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2]))) as client:
        client.setblocking(False)
        tracemalloc.start()
        async with asyncio.timeout(20):
            await asyncio.get_running_loop().sock_sendall(client, f"{head}\r\n\r\n".encode())
            await asyncio.get_running_loop().sock_sendall(client, body)
            answer = await asyncio.get_running_loop().sock_recv(client, 2000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert b" 400 " in answer and b"200000 values" in answer
    assert peak < 5 << 20, "a part of the 15 MB"


async def test_a_body_that_waits_for_its_room_stays_in_its_socket(api: Served) -> None:
    loop, port = asyncio.get_running_loop(), int(api.url.rpartition(":")[2])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"
    reader, first = await asyncio.open_connection("127.0.0.1", port)
    first.write(head % (16 << 20) + b"Expect: 100-continue\r\n\r\n")
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n"), "it has all the room of this client"
    others = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_WAITING_OF_ONE)]
    whole = head % (1 << 20) + b"\r\n" + bytes(1 << 20)
    tracemalloc.start()
    async with asyncio.timeout(20), asyncio.TaskGroup() as sending:
        for other in others:
            other.setblocking(False)
            sending.create_task(loop.sock_sendall(other, whole))
        for _ in range(500):
            await asyncio.sleep(0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        first.close()
        answers = [await loop.sock_recv(other, 100) for other in others]
    assert all(b" 400 " in answer for answer in answers)
    assert peak < MOST_WAITING_OF_ONE * 4 * READ_BYTES
    for other in others:
        other.close()


async def test_a_client_that_sends_all_before_it_reads_gets_the_refusal_and_may_ask_again(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    async with asyncio.timeout(20):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (20 << 20))
        for _ in range(20):
            writer.write(bytes(1 << 20))
            await writer.drain()
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}}")
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_a_refused_body_is_freed_without_the_garbage_collector(api: Served) -> None:
    word = "zq91" * 20_000
    hostile = {"messages": [{"role": "system", "content": word}, {"role": "tool", "content": word}]}
    gc.collect()
    gc.disable()
    try:
        async with api.http.post("/v1/chat/completions", data=sent(hostile)) as reply:
            assert reply.status == 400, await reply.text()
        left = [one for one in gc.get_objects() if isinstance(one, ChatBody | Turn)]
    finally:
        gc.enable()
    assert not left, "a refused body in memory"


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


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [USER], "a" * 100_000: 1}, "does not support this field"),
        ("/v1/chat/completions", {"messages": [{"role": "a" * 100_000, "content": "Hi"}]}, "messages[0].role"),
        ("/v1/responses", {"input": [{"role": "a" * 100_000, "content": "Hi"}]}, "input[0].role"),
        ("/v1/messages", {"messages": [{"role": "a" * 100_000, "content": "Hi"}], "max_tokens": 1}, "messages[0].role"),
        ("/api/chat", {"messages": [USER], "a" * 100_000: 1}, "does not support this field"),
        ("/tokenize", {"a" * 100_000: 1}, "does not support this field"),
    ],
)
async def test_an_error_quotes_only_the_beginning_of_a_long_value(
    api: Served, path: str, body: dict[str, Any], words: str
) -> None:
    async with api.http.post(path, json=body) as reply:
        text = await reply.text()
    assert reply.status == 400 and words in text and ("…" in text or "..." in text)
    assert len(text) < 2000
