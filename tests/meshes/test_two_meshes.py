"""A mesh whose model server is another mesh with the same model: an answer goes on when the other one dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.peers import MODEL, Peer, chat_body, mesh, text_of
from tests.support.processes import eventually

pytestmark = pytest.mark.extended

SERVED = "demo-elsewhere"
QUESTION = "Count from 7 to 60."
NUMPY = ["--engine-option", "mode=deterministic"]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Peer]:
    """The other mesh, of one node."""
    with mesh(tmp_path / "other", [[*NUMPY, "--namespace", "other"]], engine="numpy") as peers:
        yield peers[0]


@pytest.fixture
def own(tmp_path: Path, other: Peer) -> Iterator[list[Peer]]:
    """Two nodes; the other mesh is a model server of the first."""
    served = ["--openai-server", other.url, "--server-option", f'openai.names={{"{MODEL}":"{SERVED}"}}']
    served += ["--stands-for", f"{SERVED}={MODEL}"]
    with mesh(tmp_path / "own", [[*NUMPY, *served], NUMPY], engine="numpy") as peers:
        for peer in peers:
            assert eventually(partial(lists, peer), 15), peer.child.log_tail(20)
        yield peers


def lists(peer: Peer) -> bool:
    return any(one["id"] == SERVED for one in peer.api.get("/v1/models")["data"])


def engines(peer: Peer) -> set[str]:
    return {stage["engine"] for one in peer.state()["view"]["instances"] for stage in one["stages"]}


def test_an_answer_of_a_model_server_continues_on_a_ring_of_the_same_model(own: list[Peer], other: Peer) -> None:
    alone = text_of(other.chat(QUESTION, max_tokens=200))
    own[1].place(model=SERVED)
    assert engines(own[1]) == {"openai"}
    text, killed = "", False
    body = {**chat_body(QUESTION, max_tokens=200), "stream": True}
    for event in own[1].api.stream("/v1/chat/completions", body):
        text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        if len(text) > 20 and not killed:
            psutil.Process(other.child.pid).kill()
            killed = True
    assert killed and text == alone
    assert eventually(lambda: "numpy" in engines(own[1]), 10)


def test_requests_for_the_model_and_for_the_served_one_get_the_same_answer(own: list[Peer], other: Peer) -> None:
    alone = text_of(other.chat(QUESTION, max_tokens=60))
    assert [text_of(peer.chat(QUESTION, max_tokens=60, model=name)) for peer in own for name in (MODEL, SERVED)] == [
        alone
    ] * 4
    (listed,) = [one for one in own[1].api.get("/v1/models")["data"] if one["id"] == MODEL]
    assert [by["engine"] for by in listed["served_by"]] == ["openai"]
