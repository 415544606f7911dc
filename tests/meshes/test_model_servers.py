"""Models of OpenAI-style servers beside two nodes: asked through any peer, and continued when a server dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from exo_mesh.cli.client.child_node import free_port
from exo_mesh.errors import MeshError
from tests.support.fake_openai import MODEL as SERVED
from tests.support.fake_openai import FakeProcess, text_after
from tests.support.peers import Peer, chat_body, mesh, text_of
from tests.support.processes import eventually

pytestmark = pytest.mark.extended

TOKENS = 60


def lists(peer: Peer) -> bool:
    return any(one["id"] == SERVED for one in peer.api.get("/v1/models")["data"])


def whole(question: str) -> str:
    return "".join(text_after(question, "", index) for index in range(TOKENS))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeProcess]]:
    """A llama-server for each node, which computes a token in 20 ms."""
    both = [FakeProcess("llama-server", free_port(), token_s=0.02) for _ in range(2)]
    for server in both:
        server.start()
    yield both
    for server in both:
        server.kill()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, servers: list[FakeProcess]) -> Iterator[list[Peer]]:
    flags = [["--openai-server", server.url] for server in servers]
    with mesh(tmp_path_factory.mktemp("servers"), flags, engine="dummy") as peers:
        for peer in peers:
            assert eventually(partial(lists, peer), 15), peer.child.log_tail(20)
        yield peers


@pytest.fixture(autouse=True)
def all_are_up(two: list[Peer], servers: list[FakeProcess]) -> None:
    for server in servers:
        server.start()
    assert eventually(lambda: all(lists(peer) for peer in two), 15)


def streamed(peer: Peer, question: str, on_text: Any) -> str:
    """The text of a streamed answer. on_text: called with the text so far."""
    text = ""
    body = {**chat_body(question, model=SERVED, max_tokens=TOKENS), "stream": True}
    for event in peer.api.stream("/v1/chat/completions", body):
        text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        on_text(text)
    return text


@pytest.mark.parametrize("index", [0, 1])
def test_any_peer_answers_with_the_text_of_the_server(two: list[Peer], index: int) -> None:
    reply = two[index].chat("where is it?", model=SERVED, max_tokens=TOKENS)
    assert text_of(reply) == whole("where is it?")
    assert reply["usage"]["completion_tokens"] == TOKENS


def test_reasoning_and_tool_calls_come_through(two: list[Peer]) -> None:
    thought = two[0].chat("think of a short answer", model=SERVED)
    assert thought["choices"][0]["message"]["reasoning_content"].startswith("t0 t1")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("look", "listen")
    ]
    called = two[1].chat("call both", model=SERVED, tools=tools)["choices"][0]
    found = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in called["message"]["tool_calls"]
    ]
    assert found == [("look", {"at": 0}), ("listen", {"at": 1})]
    assert called["finish_reason"] == "tool_calls"


def test_a_parameter_that_the_server_does_not_know_is_a_400(two: list[Peer]) -> None:
    with pytest.raises(MeshError, match="logit_bias"):
        two[0].chat("hello", model=SERVED, logit_bias={"7": 1})


def test_a_client_that_hangs_up_stops_the_server(two: list[Peer], servers: list[FakeProcess]) -> None:
    body = {**chat_body("long", model=SERVED, max_tokens=1500), "stream": True}
    events = two[0].api.stream("/v1/chat/completions", body)
    next(events)
    assert sum(server.num_running() or 0 for server in servers) == 1
    events.close()
    assert eventually(lambda: sum(server.num_running() or 0 for server in servers) == 0, 5)


def test_a_server_killed_in_mid_answer_does_not_lose_it(two: list[Peer], servers: list[FakeProcess]) -> None:
    killed: list[FakeProcess] = []

    def kill_the_busy_one(text: str) -> None:
        if len(text) > 20 and not killed:
            killed.extend(server for server in servers if server.num_running())
            killed[0].kill()

    assert streamed(two[1], "kill one", kill_the_busy_one) == whole("kill one")
    assert len(killed) == 1


def test_when_the_last_server_dies_the_answer_ends_with_one_typed_error(
    two: list[Peer], servers: list[FakeProcess]
) -> None:
    def kill_all(text: str) -> None:
        if len(text) > 20:
            for server in servers:
                server.kill()

    with pytest.raises(MeshError) as caught:
        streamed(two[0], "kill all", kill_all)
    assert caught.value.code != "internal_error"
