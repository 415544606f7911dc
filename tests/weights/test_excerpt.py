"""A model cut down for a self-test: the layers in question are the model's own, the rest takes no room."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.errors import ModelError
from exo_mesh.weights import excerpt
from exo_mesh.weights.excerpt import WINDOW, write_excerpt
from exo_mesh.weights.gguf_layout import make_texts
from exo_mesh.weights.safetensors import read_tensor_table
from tests.support.checkpoints import TinyModel, config_json, write_checkpoint, write_json


def floats(model_dir: Path, name: str) -> np.ndarray:
    info = read_tensor_table(model_dir)[name]
    raw = info.file.read_bytes()[info.start : info.stop]
    if info.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(info.shape)
    return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[info.dtype]).astype(np.float32).reshape(info.shape)


@pytest.mark.parametrize(("dtype", "shards"), [("bfloat16", 1), ("float16", 3), ("float32", 2)])
def test_wanted_layers_are_the_models_own_in_float32_and_others_are_holes(
    tmp_path: Path, dtype: str, shards: int
) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(dtype=dtype, shards=shards, layers=5))
    small = write_excerpt(whole, tmp_path / "small", {0, 3})
    table = read_tensor_table(small)
    assert table.keys() == read_tensor_table(whole).keys()
    assert {info.dtype for info in table.values()} == {"F32"}
    for name in table:
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if layer in (None, 0, 3):
            assert np.array_equal(floats(small, name), floats(whole, name)), name
        else:
            assert not floats(small, name).any(), name


def test_layers_that_are_not_wanted_take_no_room(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(layers=12, hidden=256, intermediate=1024), repeat=True)
    file = write_excerpt(whole, tmp_path / "small", {0}) / "model.safetensors"
    layer = 4 * (256 * 256 * 3 + 3 * 256 * 1024)
    assert file.stat().st_size > 12 * layer
    assert file.stat().st_blocks * 512 < 3 * layer


def test_the_vocabulary_is_cut_to_its_first_rows(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel(vocab=900))
    small = write_excerpt(whole, tmp_path / "small", {0})
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(floats(small, name), floats(whole, name)[:512])
    config = json.loads((small / "config.json").read_text())
    assert config["vocab_size"] == 512 and config["eos_token_id"] is None, "899 is past its end"


def test_windows_are_shrunk_also_those_of_a_nested_config(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel())
    inner = {"sliding_window": 4096, "attention_chunk_size": 8192, "vocab_size": 300, "dtype": "bfloat16"}
    write_json(whole / "config.json", {**config_json(TinyModel()), "sliding_window": None, "text_config": inner})
    config = json.loads((write_excerpt(whole, tmp_path / "small", {0}) / "config.json").read_text())
    assert config["sliding_window"] is None
    assert config["text_config"] == {
        "sliding_window": WINDOW,
        "attention_chunk_size": WINDOW,
        "vocab_size": 300,
        "dtype": "float32",
    }


def test_an_excerpt_of_a_gguf_model_has_its_floats(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_twin import write_gguf_twin

    whole = write_checkpoint(tmp_path / "whole", TinyModel(vocab=900))
    (tmp_path / "gguf").mkdir()
    write_gguf_twin(whole, tmp_path / "gguf" / "m.gguf")
    for name, text in make_texts(tmp_path / "gguf").items():
        (tmp_path / "gguf" / name).write_bytes(text)
    small, expected = (write_excerpt(one, tmp_path / f"small-{one.name}", {0, 2}) for one in (tmp_path / "gguf", whole))
    assert "quantization_config" not in json.loads((small / "config.json").read_text())
    for name in read_tensor_table(expected):
        if "layers.1." not in name:
            assert np.array_equal(floats(small, name), floats(expected, name)), name


def test_what_would_be_too_large_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_checkpoint(tmp_path / "whole", TinyModel())
    monkeypatch.setattr(excerpt, "MAX_BYTES", 100_000)
    with pytest.raises(ModelError, match=r"layers \[0, 1, 2\] would write \d+ bytes"):
        write_excerpt(whole, tmp_path / "small", {0, 1, 2})
    assert not (tmp_path / "small").exists()
