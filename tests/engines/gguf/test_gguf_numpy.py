"""The NumPy engine holds the same weights from a GGUF file as from the checkpoint that the file was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_numpy.survey import open_model
from exo_mesh_numpy.weights import StageWeights, load_weights
from msgspec.structs import asdict

from exo_mesh.domain.shard import Shard
from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf_layout import make_texts
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.gguf_twin import write_gguf_twin

gguf = pytest.importorskip("gguf")


def lay_out(directory: Path) -> Path:
    """Write the text files beside a GGUF file."""
    for name, text in make_texts(directory).items():
        (directory / name).write_bytes(text)
    return directory


def twin(tmp_path: Path, model: TinyModel, quantisation: str = "F32", **more: Any) -> tuple[Path, Path]:
    """(the checkpoint, the directory of its GGUF file)."""
    origin = write_checkpoint(tmp_path / "origin", model)
    (tmp_path / "twin").mkdir()
    write_gguf_twin(origin, tmp_path / "twin" / "tiny.gguf", quantisation, **more)
    return origin, lay_out(tmp_path / "twin")


def loaded(directory: Path, start: int = 0, stop: int = 3) -> StageWeights:
    config, checkpoint = open_model(directory)
    return load_weights(checkpoint, config, Shard("tiny", start, stop, 3), lambda done, total: None)


def arrays(weights: StageWeights) -> dict[str, np.ndarray]:
    found = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        for name, value in asdict(layer).items():
            if isinstance(value, np.ndarray):
                found[f"{index}.{name}"] = value
            elif hasattr(value, "weight"):
                found |= {f"{index}.{name}": value.weight, f"{index}.{name}.bias": value.bias}
    return {name: value for name, value in found.items() if value is not None}


MODEL = {arch: TinyModel(arch=arch, layers=3, hidden=64, heads=4, kv_heads=2) for arch in ("llama", "qwen2", "qwen3")}


@pytest.mark.parametrize("arch", MODEL)
@pytest.mark.parametrize("span", [(0, 3), (0, 1), (1, 3)])
def test_a_float_file_holds_the_weights_of_the_checkpoint(tmp_path: Path, arch: str, span: tuple[int, int]) -> None:
    origin, directory = twin(tmp_path, MODEL[arch])
    expected, found = arrays(loaded(origin, *span)), arrays(loaded(directory, *span))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.array_equal(value, found[name]), name


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_a_quantised_file_holds_what_the_reference_makes_of_its_blocks(tmp_path: Path, quantisation: str) -> None:
    origin, directory = twin(tmp_path, MODEL["qwen3"], quantisation)
    expected, found = arrays(loaded(origin)), arrays(loaded(directory))
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, value in expected.items():
        if value.ndim == 2 and not name.endswith("qk_norm"):
            packed = value.astype(np.float16) if quantisation == "F16" else gguf.quantize(value, kind)
            value = gguf.dequantize(packed, kind).astype(np.float32)
        assert np.array_equal(value, found[name]), name


def test_a_file_in_shards_and_with_a_tied_head_is_read_whole(tmp_path: Path) -> None:
    origin, directory = twin(tmp_path, TinyModel(layers=3, tied=True), "Q8_0", shards=3)
    assert len(list(directory.glob("*.gguf"))) == 3
    assert arrays(loaded(directory)).keys() == arrays(loaded(origin)).keys()


def test_a_type_that_is_not_read_is_refused_by_its_name(tmp_path: Path) -> None:
    _, directory = twin(tmp_path, MODEL["qwen3"])
    file = directory / "tiny.gguf"
    raw = file.read_bytes()
    place = raw.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    # of the same size: I32 for F32
    file.write_bytes(raw[:place] + (26).to_bytes(4, "little") + raw[place + 4 :])
    with pytest.raises(ModelError, match=r"mlp\.down_proj\.weight is I32"):
        loaded(directory)
