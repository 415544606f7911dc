"""Encoders and cross-encoders on real nodes: /v1/embeddings and /v1/rerank give what transformers gives, also over a
kill."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from transformers import AutoModel, AutoModelForSequenceClassification

from exo_mesh.errors import MeshError
from tests.engines.test_torch_encoders import write_model
from tests.support.peers import Peer, await_all, mesh
from tests.support.processes import eventually

pytestmark = pytest.mark.slow

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
TEXTS = ["hello", "a second text", "the third one is a little longer than both of the others"]
QUERY = "which text"


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of BERT's kind, whose pieces are single letters."""
    tokenizer = Tokenizer(WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "encoder", "bert")
    (root / "encoder" / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    (root / "encoder" / "1_Pooling").mkdir()
    (root / "encoder" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    write_model(root / "ranker", "bert", AutoModelForSequenceClassification, num_labels=1)
    for name in ("encoder", "ranker"):
        write_tokenizer(root / name)
    return root


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[list[Peer]]:
    flags = ["--models-dir", str(models), "--engine-option", "threads=1"]
    with mesh(tmp_path_factory.mktemp("encoders"), [flags] * 3, engine="torch") as peers:
        yield peers


def encoded(model_dir: Path, *texts: str) -> Any:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(*texts)


def vector_of(model_dir: Path, text: str) -> np.ndarray:
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        first = model(torch.tensor([encoded(model_dir, text).ids])).last_hidden_state[0, 0].numpy()
    return np.asarray(first / np.linalg.norm(first))


def score_of(model_dir: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    pair = encoded(model_dir, QUERY, text)
    with torch.inference_mode():
        return float(model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0, 0])


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_vectors_and_scores_are_those_of_transformers(three: list[Peer], models: Path, stages: int) -> None:
    placed = [three[0].place(model=name, min_peers=stages) for name in ("encoder", "ranker")]
    assert [len(one["stages"]) for one in placed] == [stages, stages]
    reply = three[1].api.post("/v1/embeddings", {"model": "encoder", "input": TEXTS}, 60)
    for one, text in zip(reply["data"], TEXTS, strict=True):
        np.testing.assert_allclose(one["embedding"], vector_of(models / "encoder", text), rtol=0, atol=1e-4)
    ranked = three[2].api.post(
        "/v1/rerank", {"model": "ranker", "query": QUERY, "documents": TEXTS, "raw_scores": True}, 60
    )
    scores = [score_of(models / "ranker", text) for text in TEXTS]
    assert [one["index"] for one in ranked["results"]] == sorted(range(3), key=lambda index: -scores[index])
    for one in ranked["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-4)
    await_all(three, Peer.idle)
    for one in placed:
        three[0].api.delete(f"/instance/{one['id']}")


def test_a_text_beyond_the_positions_of_an_encoder_is_refused(three: list[Peer]) -> None:
    with pytest.raises(MeshError, match="takes texts of at most 128 tokens; shorten it by 74 tokens"):
        three[0].api.post("/v1/embeddings", {"model": "encoder", "input": "a " * 200}, 60)
    cut = three[0].api.post("/v1/embeddings", {"model": "encoder", "input": "a " * 200, "truncate": True}, 60)
    assert cut["usage"]["total_tokens"] == 128


def test_a_call_for_an_encoder_survives_the_kill_of_a_stage(three: list[Peer], models: Path) -> None:
    three[0].place(model="encoder", min_peers=3)
    texts = [f"{text} {'x' * (number % 40)}" for number in range(200) for text in TEXTS]
    found: list[dict[str, Any]] = []
    body = {"model": "encoder", "input": texts}
    call = threading.Thread(target=lambda: found.append(three[0].api.post("/v1/embeddings", body, 90)))
    call.start()
    assert eventually(three[1].busy, 20), "the call runs"
    (runner,) = three[1].runners()[:1]
    os.kill(runner.pid, signal.SIGKILL)
    call.join(95)
    assert found, "the call has its vectors"
    for index in range(0, len(texts), 97):
        want = vector_of(models / "encoder", texts[index])
        np.testing.assert_allclose(found[0]["data"][index]["embedding"], want, rtol=0, atol=1e-4)
    await_all(three, Peer.idle)
