"""Headers of safetensors files are read exactly, and every defect is named."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.errors import ModelError
from exo_mesh.weights.safetensors import MAX_HEADER_BYTES, read_header, read_tensor_table
from tests.support.checkpoints import TinyModel, tensor_shapes, write_checkpoint, write_json


def write(file: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)
    return file


def entry(shape: list[Any], start: Any, stop: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_offsets_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry([1], 8, 12), "a": entry([2, 1], 0, 8)}
    file = write(tmp_path / "x.safetensors", header, b"A" * 8 + b"B" * 4)
    table = read_header(file)
    assert set(table) == {"a", "b"}
    assert table["a"].shape == (2, 1)
    assert file.read_bytes()[table["b"].start : table["b"].stop] == b"BBBB"


def test_the_table_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    write_checkpoint(tmp_path, TinyModel(dtype="bfloat16"))
    table = read_tensor_table(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "numpy") as reader:
        assert set(table) == set(reader.keys())
        for name, info in table.items():
            assert tuple(reader.get_slice(name).get_shape()) == info.shape
            assert reader.get_slice(name).get_dtype() == info.dtype == "BF16"


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"t": entry([2], 0, 8)}, b"1234", "t ends at byte .* cut short"),
        ({"t": entry([2], 0, 8)}, b"123456789", "its header describes"),
        ({"t": entry([3], 0, 8)}, b"12345678", "t of F32.* needs 12 bytes, it has 8"),
        ({"t": entry([2], 4, 12)}, b"x" * 12, "t starts at byte"),
        ({"t": entry([1], 0, 4), "u": entry([1], 0, 4)}, b"1234", "u starts at byte"),
        ({"t": entry([1], 0, 4, "Q7")}, b"1234", 't has unknown dtype "Q7"'),
        ({"t": entry([-1], 0, 4)}, b"1234", "t has bad shape"),
        ({"t": entry([True], 0, 4)}, b"1234", "t has bad shape"),
        ({"t": entry([1], 4, 0)}, b"1234", "t has bad shape"),
        ({"t": {"dtype": "F32"}}, b"", "t has bad shape"),
        ({"t": None}, b"", "t has a header entry that is not an object"),
        ({"t": 3}, b"", "t has a header entry that is not an object"),
        ([], b"", "not a JSON object"),
        (b"{nonsense", b"", "not JSON"),
        (b"\xff\xfe\xfd", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
    ],
)
def test_a_defect_is_named(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    file = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ModelError, match=says) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{tmp_path.name}: bad.safetensors") and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {}, {"dtype": 3, "shape": "x"}, [], "x", 3])
def test_metadata_may_be_anything(tmp_path: Path, metadata: Any) -> None:
    """mlx writes null there."""
    file = write(tmp_path / "x.safetensors", {"__metadata__": metadata, "t": entry([1], 0, 4)}, b"1234")
    assert read_header(file).keys() == {"t"}


@pytest.mark.parametrize("header_bytes", [3, 2**63, MAX_HEADER_BYTES + 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, header_bytes: int) -> None:
    with pytest.raises(ModelError, match=r"cut short or not safetensors|not JSON"):
        read_header(write(tmp_path / "x.safetensors", b"{", b"", header_bytes))


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="only"):
        read_header(tmp_path / "x.safetensors")


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_model_error(tmp_path_factory: Any, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "random.safetensors"
    file.write_bytes(content)
    try:
        read_header(file)
    except ModelError as error:
        assert file.name in str(error)


def test_a_checkpoint_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel(layers=1))
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    for cut in (size - 1, size // 2, 900, 9, 8, 0):
        os.truncate(file, cut)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_tensor_table(tmp_path)


def test_shards_give_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    one = read_tensor_table(write_checkpoint(tmp_path / "one", TinyModel()))
    three = read_tensor_table(write_checkpoint(tmp_path / "three", TinyModel(shards=3)))
    assert {name: info.shape for name, info in one.items()} == {name: info.shape for name, info in three.items()}
    assert {name: info.shape for name, info in one.items()} == tensor_shapes(TinyModel())
    assert len({info.file for info in three.values()}) == 3


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    write_checkpoint(tmp_path, TinyModel(layers=2, shards=2))
    index: dict[str, dict[str, str]] = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    return tmp_path, index["weight_map"]


def test_a_missing_shard_is_named_with_a_tensor_that_it_holds(sharded: tuple[Path, dict[str, str]]) -> None:
    model_dir, weight_map = sharded
    (model_dir / weight_map["model.norm.weight"]).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors is missing.*lm_head"):
        read_tensor_table(model_dir)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.norm.weight": None}, "holds model.norm.weight, but"),
        ({"ghost": "model-00001-of-00002.safetensors"}, "does not hold ghost"),
        ({"model.norm.weight": "model-00001-of-00002.safetensors"}, "holds model.norm.weight, but"),
        ({"ghost": "../secret.safetensors"}, "not a safetensors file name"),
        ({"ghost": "/etc/passwd"}, "not a safetensors file name"),
        ({"ghost": 3}, "not a safetensors file name"),
    ],
)
def test_an_index_that_lies_is_refused(sharded: tuple[Path, dict[str, str]], change: dict[str, Any], says: str) -> None:
    model_dir, weight_map = sharded
    changed = {name: file for name, file in {**weight_map, **change}.items() if file is not None}
    write_json(model_dir / "model.safetensors.index.json", {"weight_map": changed})
    with pytest.raises(ModelError, match=says):
        read_tensor_table(model_dir)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        read_tensor_table(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        read_tensor_table(tmp_path)
