"""Encoders and cross-encoders, cut into torch stages: states and scores are those of transformers' own models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import provider
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import InputError
from tests.engines.test_vectors import IDS
from tests.support.ring import Ring

LAYERS = 6
SLACK = 1e-4
CUTS = [(), (3,), (1, 4)]
BERT = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {**BERT, "pad_token_id": 1},
    "distilbert": {"dim": 64, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 96, "vocab_size": 300,
                   "max_position_embeddings": 128},
    "modernbert": {**BERT, "global_attn_every_n_layers": 3, "local_attention": 16},
    "nomic_bert": BERT,
}  # fmt: skip
ROWS = [Row(number, 0, n, num_hidden=n) for number, n in enumerate((23, 41, 23, 1), 1)]
"""Two of one length, which share a forward, one beyond the window, and one token."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing by threads, and wait for them on a busy machine."""
    torch.set_num_threads(1)
    yield


def write_model(directory: Path, family: str, kind: Any = AutoModel, **changes: Any) -> Path:
    """A random checkpoint with noise on every parameter, so that no two layers are alike."""
    torch.manual_seed(3)
    model = kind.from_config(CONFIG_MAPPING[family](**FAMILIES[family], **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def ids_of(rows: Sequence[Row]) -> list[np.ndarray]:
    starts = np.cumsum([0, *(row.n for row in rows)])
    return [IDS[start : start + row.n] for start, row in zip(starts, rows, strict=False)]


def states_of(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0])


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_gives_the_states_of_transformers(tmp_path: Path, family: str, cuts: Sequence[int]) -> None:
    write_model(tmp_path, family)
    ring = Ring(provider, tmp_path, LAYERS, cuts, threads="1")
    ring.insert(1, 2, 3, 4)
    texts = ids_of(ROWS)
    found = ring.final_states(ROWS, np.concatenate(texts))
    want = np.concatenate([states_of(tmp_path, text) for text in texts])
    assert np.ptp(want) > 0.1, "the states are all alike: this proves little"
    np.testing.assert_allclose(found, want, rtol=0, atol=SLACK)
    last = ring.final_states([Row(2, 0, 41, num_hidden=1)], texts[1])
    np.testing.assert_allclose(last, states_of(tmp_path, texts[1])[-1:], rtol=0, atol=SLACK)
    ring.close()


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "nomic_bert"])
def test_a_cross_encoder_gives_the_scores_of_transformers(tmp_path: Path, family: str, cuts: Sequence[int]) -> None:
    """The pairs are marked where the family marks them."""
    write_model(tmp_path, family, AutoModelForSequenceClassification, num_labels=1)
    second = 9 if FAMILIES[family].get("type_vocab_size", 2) > 1 and family in ("bert", "camembert") else 0
    rows = [Row(1, 0, 23, num_hidden=1, second=second), Row(2, 0, 41, num_hidden=1)]
    texts = ids_of(rows)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    want = []
    with torch.inference_mode():
        for row, text in zip(rows, texts, strict=True):
            given = {"input_ids": torch.from_numpy(text[None].astype(np.int64))}
            if row.second:
                given["token_type_ids"] = (torch.arange(row.n)[None] >= row.second).long()
            want.append(np.asarray(model(**given).logits[0]))
    ring = Ring(provider, tmp_path, LAYERS, cuts, threads="1")
    ring.insert(1, 2)
    np.testing.assert_allclose(ring.final_states(rows, np.concatenate(texts)), np.stack(want), rtol=0, atol=SLACK)
    ring.close()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_a_checkpoint_with_other_heads_gives_the_same_states(tmp_path: Path, family: str) -> None:
    """Names in it begin with that of the family."""
    write_model(tmp_path, family, AutoModelForMaskedLM)
    ring = Ring(provider, tmp_path, LAYERS, (2,), threads="1")
    ring.insert(1)
    found = ring.final_states([Row(1, 0, 30, num_hidden=30)], IDS[:30])
    np.testing.assert_allclose(found, states_of(tmp_path, IDS[:30]), rtol=0, atol=SLACK)
    ring.close()


def test_an_encoder_draws_no_tokens_and_takes_no_part_of_a_text(tmp_path: Path) -> None:
    write_model(tmp_path, "bert")
    stage = provider.create()
    stage.load(LoadRequest(Shard("tiny", 0, LAYERS, LAYERS), tmp_path, 128, {"threads": "1"}), lambda *_: None)
    for sequence in (1, 2, 3, 4):
        stage.insert(sequence, 8)
    rows = (Row(1, 0, 4, 1), Row(2, 4, 4), Row(3, 0, 9), Row(4, 0, 4, num_hidden=1))
    output = stage.forward(StageInput(rows, tuple(range(21)), {}))
    assert [fault.sequence for fault in output.faults] == [1, 2, 3]
    assert output.hidden is not None and output.hidden.shape == (1, 64) and output.hidden.any()
    assert list(stage.sequences()) == [1, 2, 3, 4] and stage.memory_bytes() > 0
    stage.remove(1)
    assert list(stage.sequences()) == [2, 3, 4]
    stage.close()


def test_a_survey_of_an_encoder_counts_every_byte_once(tmp_path: Path) -> None:
    write_model(tmp_path, "modernbert")
    found = provider.survey(tmp_path, {"dtype": "float32"})
    total = sum(parameter.numel() for parameter in AutoModel.from_pretrained(tmp_path).parameters()) * 4
    assert found.legal_cuts == tuple(range(1, LAYERS))
    assert sum(found.layer_bytes) + found.embed_bytes + found.head_bytes == total
    assert set(found.kv_bytes_per_token) == {0}
    assert len(set(found.layer_kinds)) > 1, "layers with a window are others than those without"


@pytest.mark.parametrize("option", ["packed", "quantised", "device"])
def test_an_encoder_refuses_a_value_that_an_option_does_not_have(tmp_path: Path, option: str) -> None:
    write_model(tmp_path, "bert")
    request = LoadRequest(Shard("tiny", 0, LAYERS, LAYERS), tmp_path, 128, {option: "maybe"})
    with pytest.raises(InputError) as refused:
        provider.create().load(request, lambda *_: None)
    assert refused.value.param == option
