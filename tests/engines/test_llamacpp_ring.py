"""Real nodes with the llama.cpp engine, alone and beside NumPy, give the greedy text of mlx-lm on the whole model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_llamacpp import provider

from exo_mesh.engine.registry import GROUP
from tests.support.peers import ANSWER_S, Peer, chat_body, mesh, text_of
from tests.support.processes import eventually
from tests.support.questions import MAX_TOKENS, QUESTIONS, SHORT, Reference, ask, shipped

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        "llamacpp" not in {point.name for point in metadata.entry_points(group=GROUP)},
        reason="the installed metadata does not name the llamacpp engine: install exo-mesh again",
    ),
    pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed"),
]

FLAGS = ["--min-peers", "2"]
LONG_ANSWER = 1500
"""Tokens of an answer that a stage dies in."""
ONE_THREAD = ["--engine-option", "threads=1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    flags = [*FLAGS, *ONE_THREAD, "--engine-option", "kv=f32"]
    with mesh(tmp_path_factory.mktemp("llamacpp"), [flags] * 2, engine="llamacpp") as peers:
        yield peers


def test_two_nodes_answer_as_mlx_lm_does(pair: list[Peer], whole: Reference) -> None:
    instance = pair[0].place()
    assert [stage["engine"] for stage in instance["stages"]] == ["llamacpp"] * 2
    assert {stage["peer"] for stage in instance["stages"]} == {peer.id for peer in pair}
    for index, name in enumerate(SHORT):
        messages, right = QUESTIONS[name]
        answer = ask(pair[index % 2], messages)
        assert (name, answer.tokens) == (name, whole[name].tokens)
        assert answer.logprobs == pytest.approx(whole[name].logprobs, abs=1e-4)
        assert right is None or answer.text == right


def test_requests_at_once_get_the_answers_they_get_alone(pair: list[Peer], whole: Reference) -> None:
    bodies = [chat_body(QUESTIONS[name][0], max_tokens=MAX_TOKENS) for name in SHORT] * 2
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(pair[0].api.post, "/v1/chat/completions", body, ANSWER_S) for body in bodies]
        texts = [text_of(future.result()) for future in asked]
    assert texts == [whole[name].text for name in SHORT] * 2


def test_a_ring_of_llamacpp_and_numpy_answers_as_mlx_lm_does(tmp_path: Path, whole: Reference) -> None:
    """The self-test of mixed rings lets the pair pass, and keys and values are float32 without being asked for."""
    with mesh(tmp_path, [[*FLAGS, *ONE_THREAD], [*FLAGS, "--engine", "numpy"]], engine="llamacpp") as peers:
        instance = peers[0].place()
        assert {stage["engine"] for stage in instance["stages"]} == {"llamacpp", "numpy"}
        for name in SHORT[:3]:
            assert ask(peers[0], QUESTIONS[name][0]).tokens == whole[name].tokens


def test_a_gguf_file_is_answered_by_two_nodes_of_which_one_copies_its_layers(tmp_path: Path, whole: Reference) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_twin import write_gguf_twin

    models = tmp_path / "models"
    (models / "twin").mkdir(parents=True)
    write_gguf_twin(shipped(), models / "twin" / "twin-F32.gguf")
    shutil.copy(shipped() / "tokenizer.json", models / "twin")  # it cuts words by rules of its own
    holder, other = [*FLAGS, *ONE_THREAD, "--models-dir", str(models)], [*FLAGS, *ONE_THREAD]
    with mesh(tmp_path, [holder, other], engine="llamacpp") as peers:
        assert eventually(lambda: "twin-F32" in [one["id"] for one in peers[1].api.get("/v1/models")["data"]], 30)
        instance = peers[1].place(model="twin-F32")
        assert [stage["engine"] for stage in instance["stages"]] == ["llamacpp"] * 2
        assert {stage["peer"] for stage in instance["stages"]} == {peer.id for peer in peers}
        for name in SHORT[:4]:
            reply = peers[0].chat(QUESTIONS[name][0], model="twin-F32", max_tokens=MAX_TOKENS)
            assert text_of(reply) == QUESTIONS[name][1]


@pytest.mark.slow
def test_an_answer_goes_on_when_a_runner_of_llamacpp_is_killed(pair: list[Peer], whole: Reference) -> None:
    """A stage that dies, as by a failed assertion of the library, takes no answer with it."""
    pair[0].place()
    body = chat_body(QUESTIONS["count up"][0], max_tokens=LONG_ANSWER, ignore_eos=True)
    want = text_of(pair[0].api.post("/v1/chat/completions", body, ANSWER_S))
    for victim in pair:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(pair[0].api.post, "/v1/chat/completions", body, ANSWER_S)
            assert eventually(lambda: all(peer.busy() for peer in pair), 20)
            (runner,) = victim.runners()
            runner.kill()
            assert text_of(asked.result()) == want
