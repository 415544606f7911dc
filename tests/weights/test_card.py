"""A model card says exactly what is in the files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import layer_of, read_card
from tests.support.checkpoints import (
    TinyModel,
    config_json,
    tensor_shapes,
    write_checkpoint,
    write_json,
    write_safetensors,
)
from tests.support.partial import pack_layer


def edit_config(model_dir: Path, **changes: Any) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config.update(changes)
    write_json(model_dir / "config.json", {key: value for key, value in config.items() if value is not None})


def count(model: TinyModel, *needles: str) -> int:
    item_bytes = 4 if model.dtype == "float32" else 2
    shapes = tensor_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if any(n in name for n in needles)) * item_bytes


@pytest.mark.parametrize(
    "model", [TinyModel(), TinyModel("qwen2", tied=True, dtype="bfloat16"), TinyModel("qwen3", shards=2, layers=3)]
)
def test_bytes_are_exact(tmp_path: Path, model: TinyModel) -> None:
    card = read_card(write_checkpoint(tmp_path, model), "tiny")
    assert card.name == "tiny"
    assert card.architecture == model.arch
    assert card.num_layers == model.layers
    assert card.layer_bytes == tuple(count(model, f".layers.{i}.") for i in range(model.layers))
    assert card.embed_bytes == count(model, "embed_tokens")
    assert card.head_bytes == count(model, "model.norm", "embed_tokens" if model.tied else "lm_head")
    assert card.tied == model.tied
    assert card.total_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) - headers(tmp_path)
    assert card.kv_bytes_per_token == 2 * model.kv_heads * model.head_dim * (4 if model.dtype == "float32" else 2)
    assert card.dtype == model.dtype
    assert card.context_length == model.context
    assert card.vocab_size == model.vocab
    assert card.legal_cuts == tuple(range(1, model.layers))
    assert card.shard_bytes(0, model.layers) == card.total_bytes
    halves = card.shard_bytes(0, 2) + card.shard_bytes(2, model.layers)
    assert halves == card.total_bytes + (card.embed_bytes if model.tied else 0)


GPTQ, AWQ = ({"quant_method": method, "bits": 4, "group_size": 128} for method in ("gptq", "awq"))


@pytest.mark.parametrize(
    ("config", "suffixes", "complaint"),
    [
        (GPTQ, (), "says that the weights are quantised by gptq, but no tensor is packed"),
        (AWQ, (), "says that the weights are quantised by awq, but no tensor is packed"),
        (None, (".qweight", ".scales"), "up_proj.qweight is packed by GPTQ or AWQ, but config.json has no quantiz"),
        (AWQ, (".qweight", ".scales", ".g_idx"), "up_proj.g_idx belongs to GPTQ"),
        (AWQ, (".qweight", ".scales"), ""),
        (GPTQ, (".qweight", ".scales", ".g_idx"), ""),
    ],
)
def test_a_wrong_label_of_gptq_or_awq_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, suffixes: tuple[str, ...], complaint: str
) -> None:
    write_checkpoint(tmp_path, TinyModel(layers=1))
    edit_config(tmp_path, quantization_config=config)
    pack_layer(tmp_path / "model.safetensors", suffixes)
    if not complaint:
        assert read_card(tmp_path, "tiny").num_layers == 1
        return
    with pytest.raises(ModelError, match=complaint) as caught:
        read_card(tmp_path, "tiny")
    assert "another repository" in " ".join(str(caught.value).split())


def headers(model_dir: Path) -> int:
    files = model_dir.glob("*.safetensors")
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up_proj.weight", 12),
        ("model.language_model.layers.3.self_attn.q_proj.weight", 3),
        ("transformer.h.7.ln_1.weight", 7),
        ("h.0.attn.c_attn.bias", 0),
        ("model.blocks.31.att.key.weight", 31),
        ("vision_tower.encoder.layers.3.mlp.fc1.weight", None),
        ("model.embed_tokens.weight", None),
        ("model.layers_norm.weight", None),
    ],
)
def test_layers_are_recognised_by_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_the_settings_of_a_nested_text_config_win(tmp_path: Path) -> None:
    model = TinyModel()
    write_checkpoint(tmp_path, model)
    nested = config_json(model)
    outer = {"model_type": "vlm", "text_config": nested, "hidden_size": 9, "eos_token_id": 7}
    write_json(tmp_path / "config.json", outer)
    card = read_card(tmp_path, "vlm")
    assert (card.architecture, card.hidden_size, card.num_layers, card.eos_ids) == ("vlm", 64, 6, (7,))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 5, (5,)), ([1, 2], 5, (1, 2)), (3, None, (3,)), (None, None, ()), (0, 5, (0,))],
)
def test_eos_ids_come_from_generation_config_first(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    write_checkpoint(tmp_path, TinyModel())
    edit_config(tmp_path, eos_token_id=config)
    write_json(tmp_path / "generation_config.json", {} if generation is None else {"eos_token_id": generation})
    assert read_card(tmp_path, "tiny").eos_ids == expected


def test_the_digest_is_of_the_model_and_not_of_its_files(tmp_path: Path) -> None:
    cards = {
        name: read_card(write_checkpoint(tmp_path / name, model), name)
        for name, model in {
            "one": TinyModel(shards=1),
            "again": TinyModel(shards=1),
            "fine-tuned": TinyModel(seed=1),
            "longer": TinyModel(context=1024),
        }.items()
    }
    assert cards["one"].digest == cards["again"].digest
    assert len({card.digest for card in cards.values()}) == 3


def test_towers_for_pictures_count_nowhere_and_other_strangers_with_the_embedding(tmp_path: Path) -> None:
    model = TinyModel(layers=1)
    plain = read_card(write_checkpoint(tmp_path, model), "tiny")
    more = {"vision_tower.encoder.layers.0.w": (10,), "model.visual.merger.w": (10,), "model.odd_thing": (7,)}
    shapes = tensor_shapes(model) | more
    write_safetensors(tmp_path / "model.safetensors", shapes, "float32", lambda name: np.ones(shapes[name], np.float32))
    card = read_card(tmp_path, "tiny")
    assert card.layer_bytes == plain.layer_bytes
    assert card.head_bytes == plain.head_bytes
    assert card.embed_bytes == plain.embed_bytes + 7 * 4


def test_layers_past_the_last_are_not_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel(layers=3))
    edit_config(tmp_path, num_hidden_layers=2)
    card = read_card(tmp_path, "mtp")
    assert card.num_layers == len(card.layer_bytes) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 7}, "no tensors of layer 6"),
        ({"num_hidden_layers": None}, "no usable num_hidden_layers"),
        ({"hidden_size": "64"}, "no usable hidden_size"),
        ({"vocab_size": -1}, "no usable vocab_size"),
        ({"max_position_embeddings": None}, "no usable max_position_embeddings"),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, 'quantisation "bitsandbytes" is not supported'),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    write_checkpoint(tmp_path, TinyModel())
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=says) as caught:
        read_card(tmp_path, "tiny")
    assert str(caught.value).startswith(tmp_path.name) and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_checkpoint(tmp_path, TinyModel())
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        read_card(tmp_path, "tiny")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    write_checkpoint(tmp_path, TinyModel())
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_card(tmp_path, "tiny")


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.engram.embed.weight",
        "blk.1.engram_embd.weight",
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight",
    ],
)
def test_tables_of_ngrams_count_as_disk_and_not_as_memory(tmp_path: Path, name: str) -> None:
    plain = read_card(write_checkpoint(tmp_path, TinyModel()), "tiny")
    card = with_tensors(tmp_path, {name: (1000, 8), name.replace(".weight", ".scale"): (1000, 1)})
    assert card.table_bytes == tuple(36_000 if index == 1 else 0 for index in range(plain.num_layers))
    assert (card.layer_bytes, card.shard_bytes(0, 2)) == (plain.layer_bytes, plain.shard_bytes(0, 2))
    assert (card.total_bytes, card.disk_bytes, plain.table_bytes) == (plain.total_bytes + 36_000, 36_000, ())


def test_weights_beside_a_table_of_ngrams_are_loaded(tmp_path: Path) -> None:
    plain = read_card(write_checkpoint(tmp_path, TinyModel()), "tiny")
    card = with_tensors(tmp_path, {"layers.1.engram.wkv.weight": (10, 8)})
    assert (card.layer_bytes[1], card.table_bytes) == (plain.layer_bytes[1] + 320, ())


def with_tensors(model_dir: Path, more: dict[str, tuple[int, ...]]) -> ModelCard:
    shapes = tensor_shapes(TinyModel()) | more
    write_safetensors(
        model_dir / "model.safetensors", shapes, "float32", lambda name: np.ones(shapes[name], np.float32)
    )
    return read_card(model_dir, "tiny")
