"""The JSON files of a model are read by one reader, which accepts what transformers accepts and names what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.errors import ModelError
from exo_mesh.text.template import find_template
from exo_mesh.text.text_files import check_text_files
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.weights.card import NO_LIMIT, read_card
from exo_mesh.weights.gguf import read_gguf
from exo_mesh.weights.model_files import read_json, read_steps, read_tokenizer_text
from exo_mesh.weights.safetensors import read_header, read_weight_map
from exo_mesh.weights.store import ModelStore
from tests.support.checkpoints import TinyModel, write_checkpoint, write_json

BOM = b"\xef\xbb\xbf"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", TinyModel(layers=2, shards=2))


def change(file: Path, **values: Any) -> None:
    write_json(file, {**(json.loads(file.read_bytes()) if file.exists() else {}), **values})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"x": [0.0, Infinity]}', [0.0, math.inf]),
        (b'{"x": -Infinity}', -math.inf),
        (b'{"x": {"__float__": "Infinity"}}', math.inf),
        (b'{"x": {"__float__": "odd"}}', {"__float__": "odd"}),
        (BOM + b'{"x": 1}\r\n', 1),
        ('{"x": "ü"}'.encode(), "ü"),
    ],
)
def test_what_transformers_accepts_is_accepted(tmp_path: Path, text: bytes, value: object) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert read_json(tmp_path / "config.json") == {"x": value}


def test_nan_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"x": NaN, "y": {"__float__": "NaN"}}')
    assert all(map(math.isnan, read_json(tmp_path / "config.json").values()))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (POINTER, "is a Git LFS pointer.*git lfs pull"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"a": 1, "b"', "cut short after 12 characters"),
        (b'{"a": "some te', "cut short after 14 characters"),
        (b"{", "cut short"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text.*UTF-16"),
        (b'{"a": "\xfc"}', "not UTF-8 text.*byte 7"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'{"a": "\\ud800"}', "a lone surrogate"),
        (b'{"a" 1}', "Expecting ':'"),
        (b"[1]", "not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_cause(tmp_path: Path, text: bytes, cause: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=rf"config\.json.*{cause}"):
        read_json(tmp_path / "config.json")


READERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": read_header,
    "m.gguf": read_gguf,
    "model.safetensors.index.json": read_weight_map,
    "tokenizer.json": read_tokenizer_text,
    "modules.json": lambda file: read_steps(file.parent),
    "chat_template.jinja": lambda file: find_template(file.parent, {}),
    "chat_template.json": lambda file: find_template(file.parent, {}),
}


@pytest.mark.parametrize("name", READERS)
def test_a_git_lfs_pointer_is_named_in_place_of_every_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer"):
        READERS[name](tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_any_file(model: Path) -> None:
    plain = read_card(model, "m"), TextModel.open(model).encode_text("Hello.")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    for file in (*model.glob("*.json"), model / "chat_template.jinja"):
        file.write_bytes(BOM + file.read_bytes())
    text = TextModel.open(model)
    assert text.template is not None and text.template.source == "{{ messages }}"
    assert (read_card(model, "m").layer_bytes, text.encode_text("Hello.")) == (plain[0].layer_bytes, plain[1])


@pytest.mark.parametrize("value", [-1, 0, -1.0, None])
@pytest.mark.parametrize("name", ["sliding_window", "attn_logit_softcapping", "attention_chunk_size"])
def test_a_number_that_turns_off_reads_as_null(model: Path, name: str, value: object) -> None:
    change(model / "config.json", **{name: value}, text_config={name: value})
    found = read_json(model / "config.json")
    assert (found[name], found["text_config"][name]) == (None, None)


def test_negative_ids_are_no_tokens_and_zero_is_one(model: Path) -> None:
    change(model / "config.json", eos_token_id=-1, pad_token_id=0)
    assert read_card(model, "m").eos_ids == ()
    change(model / "generation_config.json", eos_token_id=[-1, 7, 8.0])
    assert read_card(model, "m").eos_ids == (7, 8)
    assert read_json(model / "config.json")["pad_token_id"] == 0


@pytest.mark.parametrize("nested", ["text_config", "llm_config", "language_config"])
def test_settings_of_the_language_model_may_be_nested(model: Path, nested: str) -> None:
    config = json.loads((model / "config.json").read_bytes())
    plain = read_card(model, "m")
    write_json(model / "config.json", {"model_type": "llama", nested: config, "eos_token_id": None})
    found = read_card(model, "m")
    assert (found.num_layers, found.eos_ids) == (plain.num_layers, plain.eos_ids)


def test_the_context_length_may_stand_in_the_settings_of_the_tokenizer(model: Path) -> None:
    config = json.loads((model / "config.json").read_bytes())
    del config["max_position_embeddings"]
    write_json(model / "config.json", config)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        read_card(model, "m")
    change(model / "tokenizer_config.json", model_max_length=1234)
    assert read_card(model, "m").context_length == 1234
    change(model / "tokenizer_config.json", model_max_length=10**30)
    assert read_card(model, "m").context_length == NO_LIMIT


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("tokenizer.json", POINTER, "Git LFS pointer"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0', "cut short"),
        ("tokenizer.json", b"[]", "not a tokenizer"),
        ("tokenizer.json", "{}".encode("utf-16"), "UTF-16"),
        ("tokenizer_config.json", b"{", "cut short"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template is 7"),
        ("special_tokens_map.json", b"[]", "not a JSON object"),
        ("generation_config.json", b'{"temperature": "hot"}', "temperature"),
        ("generation_config.json", b'{"top_p": 1.5}', "top_p"),
        ("generation_config.json", b'{"bos_token_id": "x"}', "bos_token_id"),
        ("added_tokens.json", b"<html>", "web page"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
    ],
)
def test_a_model_whose_text_cannot_be_read_is_not_listed_as_usable(
    model: Path, name: str, text: bytes, cause: str
) -> None:
    store = ModelStore([model.parent], check=check_text_files)
    assert store.card("m").num_layers == 2
    (model / name).write_bytes(text)
    with pytest.raises(ModelError, match=rf"{name}.*{cause}"):
        store.card("m")
