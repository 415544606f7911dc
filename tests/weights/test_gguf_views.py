"""GGUF files below a directory of models are models by names with their quantisation, with all that a model has."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.gguf_table import find_first_file, read_headers, shard_names
from exo_mesh.weights.gguf_views import quantisation_of
from exo_mesh.weights.model_files import VIEW_FILE, open_model_file
from exo_mesh.weights.names import suffix_of
from exo_mesh.weights.store import ModelStore, model_dir_of
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.gguf_bytes import ARRAY, TEXT, U32, RawTensor, gguf_bytes, value

pytest.importorskip("gguf")

from tests.support.gguf_twin import write_gguf_twin


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("origin") / "tiny", TinyModel(layers=2))


def gguf_file(origin: Path, file: Path, quantisation: str = "Q8_0", shards: int = 1) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf_twin(origin, file, quantisation, shards=shards)


def store_of(tmp_path: Path) -> ModelStore:
    return ModelStore([tmp_path / "models"], views_dir=tmp_path / "home" / "gguf")


def test_files_are_found_by_the_names_of_their_directories_and_quantisations(tmp_path: Path, origin: Path) -> None:
    models = tmp_path / "models"
    gguf_file(origin, models / "Loose-Q8_0.gguf")
    gguf_file(origin, models / "Tiny-GGUF" / "tiny-q8_0.gguf")
    gguf_file(origin, models / "Tiny-GGUF" / "tiny-F16.gguf", "F16")
    gguf_file(origin, models / "org" / "plain" / "weights.gguf")
    gguf_file(origin, models / "org" / "split" / "split-Q8_0.gguf", shards=2)
    gguf_file(origin, models / "models--org--hub" / "snapshots" / "abc" / "hub.Q8_0.gguf")
    (models / "org" / "plain" / "mmproj-F16.gguf").write_bytes(b"GGUF")
    names = set(store_of(tmp_path).names()) - {"exo-mesh-demo"}
    assert names == {"Loose-Q8_0", "Tiny-GGUF-Q8_0", "Tiny-GGUF-F16", "org/plain", "org/split-Q8_0", "org/hub-Q8_0"}
    assert ModelStore([models]).names() == ["exo-mesh-demo"], "without a place for what is made from them"


def test_a_card_has_the_exact_bytes_of_the_file(tmp_path: Path, origin: Path) -> None:
    file = gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf")
    store = store_of(tmp_path)
    card, plain = store.card("tiny-Q8_0"), read_card(origin, "tiny")
    assert (card.num_layers, card.hidden_size, card.vocab_size) == (2, 64, plain.vocab_size)
    matrices = plain.layer_bytes[0] - 2 * 64 * 4
    assert card.layer_bytes[0] == matrices // 4 * 34 // 32 + 2 * 64 * 4
    assert sum(card.layer_bytes) + card.embed_bytes + card.head_bytes < file.stat().st_size
    view = store.find("tiny-Q8_0")
    assert view.is_relative_to(tmp_path / "home") and (view / "tiny-Q8_0.gguf").resolve() == file.resolve()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["tiny-Q8_0.gguf"], (
        "nothing is written there"
    )


def test_what_is_made_is_made_once_and_again_when_the_file_changes(tmp_path: Path, origin: Path) -> None:
    file = gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf")
    store = store_of(tmp_path)
    made = (store.find("tiny-Q8_0") / "config.json").stat().st_ino
    digest = store.card("tiny-Q8_0").digest
    assert store.card("tiny-Q8_0").quantization == "Q8_0"
    assert (store.find("tiny-Q8_0") / "config.json").stat().st_ino == made
    file.unlink()
    gguf_file(origin, file, "F16")
    assert store.card("tiny-Q8_0").digest != digest
    assert store.card("tiny-Q8_0").quantization == "F16", "whatever the file is called"
    assert (store.find("tiny-Q8_0") / "config.json").stat().st_ino != made


def test_what_was_made_of_a_deleted_file_is_deleted(tmp_path: Path, origin: Path) -> None:
    file = gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf")
    store = store_of(tmp_path)
    view = store.find("tiny-Q8_0")
    store.forget(store.found())
    assert view.is_dir()
    file.unlink()
    store.forget(store.found())
    assert not view.exists()
    with pytest.raises(UnknownModelError):
        store.find("tiny-Q8_0")


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path, origin: Path) -> None:
    gguf_file(origin, tmp_path / "models" / "tiny" / "tiny-Q8_0.gguf")
    shutil.copy(origin / "tokenizer.json", tmp_path / "models" / "tiny")
    view = store_of(tmp_path).find("tiny-Q8_0")
    assert (view / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    assert json.loads((view / "config.json").read_text())["quantization_config"] == {"quant_method": "gguf"}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"GGUF", "cut short"),
        (gguf_bytes({"general.architecture": value(TEXT, "a/b")}), 'general.architecture is "a/b"'),
        (gguf_bytes({"general.architecture": value(TEXT, "llama")}), "llama.embedding_length"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=says) as caught:
        store_of(tmp_path).card("bad")
    assert str(tmp_path) not in str(caught.value)
    assert not list((tmp_path / "home" / "gguf").iterdir())


def test_a_model_that_only_llama_cpp_runs_has_a_card(tmp_path: Path) -> None:
    sizes = {"embedding_length": 4, "block_count": 2, "attention.head_count": 2, "context_length": 64}
    entries = {"general.architecture": value(TEXT, "warp")} | {f"warp.{k}": value(U32, v) for k, v in sizes.items()}
    entries |= {
        "tokenizer.ggml.model": value(TEXT, "gpt2"),
        "tokenizer.ggml.pre": value(TEXT, "gpt-2"),
        "tokenizer.ggml.tokens": value(ARRAY, (TEXT, ["a", "b", "ab"])),
        "tokenizer.ggml.merges": value(ARRAY, (TEXT, ["a b"])),
    }
    shapes = {"token_embd": (4, 3), "output": (4, 3), "output_norm": (4,), "blk.0.odd": (4, 4), "blk.1.odd": (4, 2)}
    tensors = [RawTensor(f"{name}.weight", shape, 0, bytes(4 * math.prod(shape))) for name, shape in shapes.items()]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "other.gguf").write_bytes(gguf_bytes(entries, tensors))
    card = store_of(tmp_path).card("other")
    assert card.architecture == "warp" and card.layer_bytes == (64, 32)
    assert (card.embed_bytes, card.head_bytes, card.tied) == (48, 64, False)


def test_a_file_is_found_by_its_path(tmp_path: Path, origin: Path) -> None:
    file = gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf", shards=2)
    (tmp_path / "link").symlink_to(tmp_path / "models")
    assert store_of(tmp_path).name_at(tmp_path / "link" / file.name) == "tiny-Q8_0"
    with pytest.raises(UnknownModelError, match="is not below a models directory"):
        store_of(tmp_path).name_at(tmp_path / "models" / "tiny-Q8_0-00002-of-00002.gguf")
    view = model_dir_of(str(file), tmp_path / "made")
    assert read_card(view, "tiny").num_layers == 2 and view.is_relative_to(tmp_path / "made")


@pytest.mark.parametrize(
    ("given", "file", "name"),
    [
        ("Downloads/tiny (1).gguf", "tiny-1.gguf", "Downloads"),
        ("Ma\u0308del gro\u00dfer.gguf", "M\u00e4del-gro\u00dfer.gguf", "M\u00e4del-gro\u00dfer"),
        ("Meine Modelle/a+b.Q8_0.gguf", "a-b.Q8_0.gguf", "Meine-Modelle-Q8_0"),
    ],
)
def test_a_file_of_any_name_is_a_model_whose_files_peers_can_copy(
    tmp_path: Path, origin: Path, given: str, file: str, name: str
) -> None:
    gguf = gguf_file(origin, tmp_path / "models" / given, shards=2)
    store = store_of(tmp_path)
    assert store.name_at(gguf) == name and store.card(name).num_layers == 2
    first = find_first_file(store.find(name))
    assert first == file.replace(".gguf", "-00001-of-00002.gguf")
    for one in shard_names(first):
        assert suffix_of(one) == "gguf" and read_headers(store.find(name), first)


def test_a_path_that_the_node_does_not_look_at_says_what_to_start_it_with(tmp_path: Path) -> None:
    for path, flag in (
        (tmp_path / "my models" / "a.gguf", f"--models-dir '{tmp_path}/my models'"),
        (tmp_path / "folder", f"--models-dir {tmp_path}/folder"),
    ):
        with pytest.raises(UnknownModelError) as caught:
            store_of(tmp_path).name_at(path)
        assert f"restart that node with {flag};" in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path, origin: Path) -> None:
    gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf", shards=2)
    (tmp_path / "models" / "tiny-Q8_0-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"tiny-Q8_0-00002-of-00002\.gguf cannot be read"):
        store_of(tmp_path).card("tiny-Q8_0")


def test_only_links_that_a_node_made_may_lead_out_of_a_model(tmp_path: Path, origin: Path) -> None:
    file = gguf_file(origin, tmp_path / "models" / "tiny-Q8_0.gguf")
    view = store_of(tmp_path).find("tiny-Q8_0")
    open_model_file(view / "tiny-Q8_0.gguf").close()
    (view / "other.gguf").symlink_to(file)
    (view / "other.json").symlink_to(file)
    for name in ("other.gguf", "other.json"):
        with pytest.raises(ModelError, match="leads out of the model's directory"):
            open_model_file(view / name)
    (view / VIEW_FILE).unlink()
    os.mkfifo(view / VIEW_FILE)
    with pytest.raises(ModelError, match="leads out of the model's directory"):
        open_model_file(view / "tiny-Q8_0.gguf")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("llama-3.2-1b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Foo.UD-IQ2_XXS-00001-of-00002.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-f16.gguf", "F16"),
        ("Qwen3-8B.gguf", ""),
        ("Q.gguf", ""),
    ],
)
def test_the_quantisation_is_in_the_name(name: str, found: str) -> None:
    assert quantisation_of(name) == found
