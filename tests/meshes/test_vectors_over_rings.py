"""Vectors from real nodes: one, two and three stages give those of the whole model, also over a kill of a stage."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exo_mesh_numpy
import numpy as np
import pytest
from tokenizers import Tokenizer

from exo_mesh.domain.frame import Row
from exo_mesh.errors import MeshError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.peers import Peer, await_all, mesh
from tests.support.processes import eventually
from tests.support.ring import Ring

pytestmark = pytest.mark.extended

NAME = "embedder"
JUDGE, YES, NO = "judge", 100, 200
LAYERS = 6
TEXTS = ["a", "The quick brown fox", "a much longer text that goes on for some time " * 6, "Grüße, 🦎"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like Qwen3-Embedding: the state of the last token, with prompts."""
    root = tmp_path_factory.mktemp("models")
    directory = write_checkpoint(root / NAME, TinyModel("qwen3", layers=LAYERS, tied=True))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    judge = write_checkpoint(root / JUDGE, TinyModel("qwen3", layers=LAYERS, tied=True, seed=4))
    steps = [{"type": f"sentence_transformers.base.modules.{step}"} for step in ("Transformer", "LogitScore")]
    (judge / "modules.json").write_text(json.dumps(steps))
    (judge / "1_LogitScore").mkdir()
    (judge / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    template = "{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}query document:"
    (judge / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return root


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[list[Peer]]:
    flags = ["--models-dir", str(models)]
    with mesh(tmp_path_factory.mktemp("embeddings"), [flags] * 3, engine="numpy") as peers:
        yield peers


def oracle(model_dir: Path, text: str) -> np.ndarray:
    """The state of the last token, scaled to length 1, by one engine without a mesh."""
    ids = np.array(Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids)
    whole = Ring(exo_mesh_numpy.provider, model_dir, LAYERS, ())
    whole.insert(1, max_tokens=512)
    states = whole.final_states([Row(1, 0, len(ids), num_hidden=1)], ids)
    whole.close()
    return np.asarray(states[0] / np.linalg.norm(states[0]))


def embed(peer: Peer, texts: list[str], **fields: Any) -> list[np.ndarray]:
    reply = peer.api.post("/v1/embeddings", {"model": NAME, "input": texts, **fields}, 60)
    assert reply["usage"]["prompt_tokens"] > 0
    return [np.array(one["embedding"]) for one in reply["data"]]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_mesh_gives_the_vectors_of_the_whole_model(three: list[Peer], models: Path, stages: int) -> None:
    placed = three[0].place(model=NAME, min_peers=stages)
    assert len(placed["stages"]) == stages
    prefixed = ["Query: " + TEXTS[0]]
    for peer in (three[0], three[-1]):
        for found, text in zip(embed(peer, TEXTS), TEXTS, strict=True):
            np.testing.assert_allclose(found, oracle(models / NAME, text), rtol=0, atol=1e-5)
        (asked,) = embed(peer, TEXTS[:1], prompt_name="query")
        np.testing.assert_allclose(asked, oracle(models / NAME, prefixed[0]), rtol=0, atol=1e-5)
    with pytest.raises(MeshError, match="cannot generate text; it can make embeddings"):
        three[1].api.post("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]})
    await_all(three, Peer.idle)
    three[0].api.delete(f"/instance/{placed['id']}")


def test_a_language_model_gives_the_scores_of_its_logits(three: list[Peer], models: Path) -> None:
    three[0].place(model=JUDGE, min_peers=2)
    body = {"model": JUDGE, "query": "why", "documents": TEXTS, "raw_scores": True}
    results = three[2].api.post("/v1/rerank", body, 60)["results"]
    tokenizer = Tokenizer.from_file(str(models / JUDGE / "tokenizer.json"))
    whole = Ring(exo_mesh_numpy.provider, models / JUDGE, LAYERS, ())
    for result in results:
        prompt = f"query=why;document={TEXTS[result['index']]};query document:"
        ids = np.array(tokenizer.encode(prompt).ids)
        whole.insert(1, max_tokens=512)
        (logits,) = whole.forward([Row(1, 0, len(ids), 1)], ids)
        whole.remove(1)
        assert result["relevance_score"] == pytest.approx(float(logits[YES] - logits[NO]), abs=1e-4)
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == len(TEXTS)
    whole.close()


def test_a_call_survives_the_kill_of_a_stage(three: list[Peer], models: Path) -> None:
    for instance in three[0].state()["view"]["instances"]:
        if instance["model"] != NAME:
            three[0].api.delete(f"/instance/{instance['id']}", 15)
    three[0].place(model=NAME, min_peers=3)
    assert eventually(lambda: len(three[1].runners()) == 1, 20), "the runner that is killed is a stage of this model"
    texts = [f"{text} {number}" for number in range(60) for text in TEXTS]
    found: list[list[np.ndarray]] = []
    is_enough = threading.Event()

    def calls() -> None:  # again and again: one may be over before a heartbeat shows it
        while not is_enough.is_set():
            found.append(embed(three[0], texts))

    call = threading.Thread(target=calls)
    call.start()
    assert eventually(three[1].busy, 20), "a call runs"
    (runner,) = three[1].runners()[:1]
    before = len(found)
    os.kill(runner.pid, signal.SIGKILL)
    is_enough.set()
    call.join(90)
    assert len(found) > before, "the call has its vectors"
    whole = [oracle(models / NAME, text) for text in texts[:: len(texts) // 7]]
    np.testing.assert_allclose(found[-1][:: len(texts) // 7], whole, rtol=0, atol=1e-5)
    await_all(three, Peer.idle)
