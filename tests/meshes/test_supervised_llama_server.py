"""A node that starts llama-server for a GGUF file: its model answers, and comes back when the program dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.fake_openai import text_after
from tests.support.peers import Peer, chat_body, mesh, text_of
from tests.support.processes import eventually, gone
from tests.support.stub_llama_server import write_stub

pytestmark = pytest.mark.extended

SERVED = "ok"
TOKENS = 120


def whole(question: str) -> str:
    return "".join(text_after(question, "", index) for index in range(TOKENS))


def programs(peer: Peer) -> list[psutil.Process]:
    """The llama-servers of a node's runners."""
    return [child for runner in peer.runners() for child in runner.children() if "--jinja" in child.cmdline()]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    root = tmp_path_factory.mktemp("supervised")
    models = root / "models"
    models.mkdir()
    (models / f"{SERVED}.gguf").write_text("ok")
    flags = ["--llama-server", str(write_stub(root / "llama-server")), "--models-dir", str(models)]
    with mesh(root, [flags], engine="dummy") as (one,):
        assert eventually(lambda: any(model["id"] == SERVED for model in one.api.get("/v1/models")["data"]), 15)
        yield one


def test_a_gguf_file_is_a_model_that_answers(peer: Peer) -> None:
    assert text_of(peer.chat("hello", model=SERVED, max_tokens=TOKENS)) == whole("hello")
    assert len(programs(peer)) == 1


def test_an_answer_survives_the_end_of_the_program(peer: Peer) -> None:
    killed: list[psutil.Process] = []
    text = ""
    body = {**chat_body("kill it", model=SERVED, max_tokens=TOKENS), "stream": True}
    for event in peer.api.stream("/v1/chat/completions", body):
        text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        if len(text) > 20 and not killed:
            killed = programs(peer)
            killed[0].kill()
    assert killed and text == whole("kill it")
    assert eventually(partial(gone, killed), 3)


def test_the_program_ends_with_its_node(tmp_path: Path) -> None:
    (tmp_path / f"{SERVED}.gguf").write_text("ok")
    flags = ["--llama-server", str(write_stub(tmp_path / "llama-server")), "--models-dir", str(tmp_path)]
    with mesh(tmp_path / "mesh", [flags], engine="dummy") as (one,):
        assert eventually(lambda: any(model["id"] == SERVED for model in one.api.get("/v1/models")["data"]), 15)
        one.chat("hello", model=SERVED, max_tokens=4)
        (program,) = programs(one)
    assert eventually(partial(gone, [program]), 2)
