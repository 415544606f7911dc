"""Boards with RKLLAMA beside their nodes: their models through any peer, lost and found again, and shared work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from exo_mesh.errors import MeshError
from tests.support.fake_rkllama import ABORTED, Board, board, tokens_of
from tests.support.peers import Peer, chat_body, mesh, text_of
from tests.support.processes import eventually

pytestmark = pytest.mark.extended

MODEL, BROKEN = "Qwen3-1.7B", "Broken"
QUESTION = "What is behind the hill?"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def beside(server: Board) -> list[str]:
    """The flags of a node with this server."""
    return ["--rkllm-server-host", "127.0.0.1", "--rkllm-server-port", str(server.port)]


def lists(peer: Peer, name: str = MODEL) -> bool:
    return any(one["id"] == name for one in peer.api.get("/v1/models")["data"])


@pytest.fixture(scope="module")
def server() -> Iterator[Board]:
    with board("--model", MODEL, "--token-s", "0.002") as made:
        yield made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, server: Board) -> Iterator[list[Peer]]:
    """The first of two peers has a board; the other has one that gives every answer up."""
    with board("--model", BROKEN, "--quirk", "abort_text") as broken:
        flags = [beside(server), beside(broken)]
        with mesh(tmp_path_factory.mktemp("boards"), flags, engine="dummy") as peers:
            for peer in peers:
                assert eventually(partial(lists, peer), 15), peer.child.log_tail(20)
            yield peers


@pytest.mark.parametrize("index", [0, 1])
def test_any_peer_answers_with_the_text_of_the_board(two: list[Peer], index: int) -> None:
    reply = two[index].chat(QUESTION, model=MODEL)
    assert text_of(reply) == "".join(tokens_of(QUESTION))
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == len(tokens_of(QUESTION))


def test_an_answer_is_streamed_token_by_token(two: list[Peer]) -> None:
    body = {**chat_body(QUESTION, model=MODEL), "stream": True}
    events = [event["choices"][0] for event in two[1].api.stream("/v1/chat/completions", body) if event["choices"]]
    texts = [text for event in events if (text := event["delta"].get("content"))]
    assert texts == tokens_of(QUESTION)
    assert events[-1]["finish_reason"] == "stop"


def test_stop_strings_and_limits_hold_though_the_board_ignores_them(two: list[Peer]) -> None:
    stopped = two[1].chat("say: one two three four", model=MODEL, stop=["o thr"])
    assert (text_of(stopped), stopped["choices"][0]["finish_reason"]) == ("one tw", "stop")
    short = two[0].chat("say: one two three four", model=MODEL, max_tokens=2)
    assert (text_of(short), short["choices"][0]["finish_reason"]) == ("one two", "length")
    assert text_of(two[0].chat("say: next", model=MODEL)) == "next"


def test_tool_calls_and_reasoning_are_passed_through(two: list[Peer]) -> None:
    reply = two[1].chat('call: look_up {"word": "hill"}', model=MODEL, tools=TOOLS)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("look_up", '{"word": "hill"}')
    assert call["id"] and reply["choices"][0]["finish_reason"] == "tool_calls"
    thought = two[1].chat("say: <think>a b</think> c", model=MODEL)["choices"][0]["message"]
    assert (thought["reasoning_content"], thought["content"]) == ("a b", "c")


def test_what_the_board_would_ignore_is_refused_by_name(two: list[Peer]) -> None:
    with pytest.raises(MeshError, match="min_p"):
        two[1].chat("hi", model=MODEL, min_p=0.2)
    with pytest.raises(MeshError, match="cannot force the format"):
        two[1].chat("hi", model=MODEL, response_format={"type": "json_object"})


def test_a_timeout_of_the_board_is_an_error_and_no_text(two: list[Peer]) -> None:
    with pytest.raises(MeshError, match="its own timeout") as caught:
        two[0].chat(QUESTION, model=BROKEN)
    assert ABORTED not in str(caught.value)


def test_a_model_that_no_board_has_is_not_found(two: list[Peer]) -> None:
    with pytest.raises(MeshError, match="Qwen9"):
        two[1].chat("hi", model="Qwen9")


def test_a_server_that_is_down_is_a_503_with_the_remedy_and_comes_back_by_itself(
    two: list[Peer], server: Board
) -> None:
    server.kill()
    try:
        assert eventually(lambda: not any(lists(peer) for peer in two), 15)
        with pytest.raises(MeshError, match="is down") as refused:
            two[1].chat("hello?", model=MODEL)
        assert refused.value.code == "pending"
    finally:
        server.start()
    assert eventually(lambda: all(lists(peer) for peer in two), 10)
    assert text_of(two[1].chat("say: back", model=MODEL)) == "back"


def test_three_boards_share_thirty_requests_and_the_loss_of_one_fails_none(tmp_path: Path) -> None:
    with ExitStack() as stack:
        boards = [stack.enter_context(board("--model", MODEL, "--token-s", "0.005")) for _ in range(3)]
        peers = stack.enter_context(mesh(tmp_path, [beside(one) for one in boards], engine="dummy"))
        assert eventually(lambda: all(lists(peer) for peer in peers), 15)
        peers[0].place(model=MODEL, replicas=3)
        pool = stack.enter_context(ThreadPoolExecutor(6))

        def ask(index: int) -> str:
            return text_of(peers[index % 2].chat(QUESTION, model=MODEL, max_tokens=20))

        expected = "".join(tokens_of(QUESTION)[:20])
        assert list(pool.map(ask, range(30))) == [expected] * 30
        served = [one.state()["served"] for one in boards]
        assert sum(served) == 30 and all(7 <= count <= 13 for count in served), served
        answers = [pool.submit(ask, index) for index in range(30)]
        assert eventually(lambda: boards[2].state()["running"] == 1, 10)
        boards[2].kill()
        assert [answer.result(60) for answer in answers] == [expected] * 30
