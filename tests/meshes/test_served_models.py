"""Models of a model server beside a node: listed, chatted with, lost and found again, and asked through any peer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exo_mesh_dummy.text import words_for

from exo_mesh.errors import MeshError
from tests.support.peers import Peer, chat_body, mesh, text_of
from tests.support.processes import eventually

SERVED = "parrot"
WORDS = 24


def options(up: Path, **fields: object) -> list[str]:
    given = {"models": SERVED, "words": WORDS, "delay_ms": 2, "up_file": up, **fields}
    return [part for key, value in given.items() for part in ("--server-option", f"dummy-text.{key}={value}")]


def lists(peer: Peer, name: str = SERVED) -> bool:
    return any(one["id"] == name for one in peer.api.get("/v1/models")["data"])


def answer(question: str) -> str:
    return " ".join(words_for(question, WORDS))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file whose existence is the model server's being up."""
    file = tmp_path_factory.mktemp("server") / "up"
    file.touch()
    return file


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, up: Path) -> Iterator[list[Peer]]:
    """The first of two peers has a model server."""
    with mesh(tmp_path_factory.mktemp("served"), [options(up), []], engine="dummy") as peers:
        for peer in peers:
            assert eventually(partial(lists, peer), 15), peer.child.log_tail(20)
        yield peers


@pytest.mark.parametrize("index", [0, 1])
def test_any_peer_answers_with_the_words_of_the_server(two: list[Peer], index: int) -> None:
    reply = two[index].chat("where is it?", model=SERVED)
    assert text_of(reply) == answer("where is it?")
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == WORDS


def test_a_served_model_says_that_its_server_gets_text(two: list[Peer]) -> None:
    (one,) = [one for one in two[1].api.get("/v1/models")["data"] if one["id"] == SERVED]
    assert (one["num_bytes"], one["num_layers"]) == (0, 0), "nothing of it is in the mesh"
    assert one["served_by"] == [{"engine": "dummy-text", "server": "nowhere:0", "model": SERVED, "gets_text": True}]


def test_a_stop_string_and_a_limit_end_the_answer_as_on_a_ring(two: list[Peer]) -> None:
    words = words_for("stop there", WORDS)
    stopped = two[1].chat("stop there", model=SERVED, stop=[words[3]])
    assert text_of(stopped) == answer("stop there").split(words[3])[0]
    short = two[0].chat("stop there", model=SERVED, max_tokens=5)
    assert text_of(short) == " ".join(words[:5]) and short["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", [{"logprobs": True}, {"logit_bias": {"1": 5}}, {"min_tokens": 3}])
def test_a_wish_that_needs_token_ids_is_refused_by_its_name(two: list[Peer], field: dict[str, Any]) -> None:
    with pytest.raises(MeshError, match="model server"):
        two[0].chat("hi", model=SERVED, **field)


def test_a_message_of_anthropics_dialect_is_answered(two: list[Peer]) -> None:
    body = {"model": SERVED, "max_tokens": 200, "messages": [{"role": "user", "content": "where is it?"}]}
    reply = two[1].api.post("/v1/messages", body, 60)
    assert reply["content"] == [{"type": "text", "text": answer("where is it?")}]
    assert (reply["stop_reason"], reply["usage"]["input_tokens"]) == ("end_turn", 3)
    with pytest.raises(MeshError, match="model server"):
        two[1].api.post("/v1/messages/count_tokens", body, 60)


def test_a_prompt_is_completed_and_echoed(two: list[Peer]) -> None:
    body = {"model": SERVED, "prompt": "once upon", "echo": True, "max_tokens": 100}
    reply = two[1].api.post("/v1/completions", body, 30)
    assert reply["choices"][0]["text"] == "once upon" + answer("once upon")


def test_its_tokenizer_cannot_be_asked(two: list[Peer]) -> None:
    with pytest.raises(MeshError, match="is in its model server"):
        two[0].api.post("/tokenize", {"model": SERVED, "prompt": "hi"}, 10)


def test_a_killed_runner_does_not_lose_the_answer(two: list[Peer]) -> None:
    two[0].chat("warm up", model=SERVED)
    (runner,) = two[0].runners()
    killed = False
    text = ""
    body = {**chat_body("kill it", model=SERVED), "stream": True}
    for event in two[1].api.stream("/v1/chat/completions", body):
        text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        if len(text) > 20 and not killed:
            runner.kill()
            killed = True
    assert killed and text == answer("kill it")


@pytest.mark.extended
def test_a_server_that_is_down_is_named_and_comes_back_by_itself(two: list[Peer], up: Path) -> None:
    up.unlink()
    try:
        assert eventually(lambda: not any(lists(peer) for peer in two), 15)
        with pytest.raises(MeshError, match="is down") as refused:
            two[0].chat("hello?", model=SERVED)
        assert refused.value.code == "pending"
    finally:
        up.touch()
    assert eventually(lambda: all(lists(peer) for peer in two), 10)
    assert text_of(two[1].chat("hello again?", model=SERVED)) == answer("hello again?")
