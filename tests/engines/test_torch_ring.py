"""Two real nodes with the torch engine answer as mlx-lm does on the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from exo_mesh.engine.registry import load_registry
from tests.support.peers import MODEL, Peer, mesh, text_of
from tests.support.questions import shipped, user

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("torch" not in load_registry().providers, reason="the torch engine's entry point is not there"),
]

QUESTIONS = ("Count from 7 to 14.", "Spell robot.", "What is 23 + 45?", "Repeat: Grüße aus Köln 🚀")
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    flags = [["--min-peers", "2"]] * 2
    with mesh(tmp_path_factory.mktemp("torch"), flags, engine="torch") as peers:
        yield peers


def mlx_text(question: str) -> str:
    """What mlx-lm itself generates greedily."""
    model, tokenizer = load(str(shipped()))[:2]
    prompt = tokenizer.apply_chat_template(user(question), add_generation_prompt=True, enable_thinking=False)
    ids: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS):
        if int(token) in tokenizer.eos_token_ids:
            break
        ids.append(int(token))
    return str(tokenizer.decode(ids))


def test_the_demo_model_says_on_torch_what_it_says_on_mlx(pair: list[Peer]) -> None:
    instance = pair[0].place()
    assert [stage["engine"] for stage in instance["stages"]] == ["torch", "torch"]
    assert {stage["peer"] for stage in instance["stages"]} == {peer.id for peer in pair}
    for index, question in enumerate(QUESTIONS):
        reply = pair[index % 2].chat(question, max_tokens=MAX_TOKENS)
        assert text_of(reply) == mlx_text(question)
    assert reply["model"] == MODEL
