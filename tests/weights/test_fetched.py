"""A directory whose checkpoint files are there in parts: its card, its manifest, and what a stage needs of it."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.domain.spans import Span, covers, merged, num_bytes
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import (
    MANIFEST_FILE,
    FetchedFile,
    LayerPieces,
    Manifest,
    is_here,
    part_of,
    read_manifest,
    write_manifest,
)
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from exo_mesh.weights.safetensors import TensorInfo, read_tensor_table

MODEL = TinyModel(layers=6, shards=3)


def checkpoint(directory: Path, model: TinyModel = MODEL) -> Path:
    write_checkpoint(directory, model)
    return directory


def test_a_card_is_read_from_parts_as_from_whole_files(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "model")
    parts = Path(shutil.copytree(whole, tmp_path / "parts" / "model"))
    for file in parts.glob("*.safetensors"):
        file.rename(part_of(parts, file.name))
    assert read_card(parts, "m") == read_card(whole, "m")


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = Manifest("org/m", "org/m", "a" * 40, {"model.safetensors": FetchedFile(9, "b" * 64, [(0, 2), (4, 9)])})
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest and manifest.present_bytes == 7 and not manifest.is_whole
    assert is_here(manifest, {"model.safetensors": ((5, 9),)})
    assert not is_here(manifest, {"model.safetensors": ((1, 3),)}) and not is_here(manifest, {"other": ((0, 1),)})
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


@pytest.mark.parametrize("present", [[(0, 11)], [(-1, 2)], [(4, 5), (0, 1)], [(0, 4), (2, 6)]])
def test_a_manifest_with_impossible_spans_is_refused(tmp_path: Path, present: list[tuple[int, int]]) -> None:
    write_manifest(tmp_path, Manifest("m", files={"model.safetensors": FetchedFile(10, present=present)}))
    with pytest.raises(ModelError, match="impossible byte ranges"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_load_every_tensor_and_each_layer_once(tmp_path: Path, tied: bool) -> None:
    table = read_tensor_table(checkpoint(tmp_path / "model", TinyModel(layers=6, shards=3, tied=tied)))
    cuts = (0, 1, 4, 6)
    stages = [LayerPieces(table, 6, tied=tied).of(start, stop) for start, stop in pairwise(cuts)]
    for name, info in table.items():
        span = ((info.start, info.stop),)
        loaded = [covers(stage.get(info.file.name, ()), span) for stage in stages]
        whole_files = [stage.get(info.file.name, ((1, 1),))[0][0] == 0 for stage in stages]
        if "layers." in name:
            assert sum(loaded) == 1 or any(whole_files), name
        elif "embed_tokens" in name:
            assert loaded[0] and loaded[-1] >= tied, name
        else:
            assert loaded[-1], name


def test_a_file_that_is_needed_nearly_whole_is_fetched_whole(tmp_path: Path) -> None:
    table = read_tensor_table(checkpoint(tmp_path / "model", TinyModel(layers=2, shards=1)))
    size = max(info.stop for info in table.values())
    assert LayerPieces(table, 2, tied=False).of(0, 2) == {"model.safetensors": ((0, size),)}
    first = LayerPieces(table, 2, tied=False).of(0, 1)["model.safetensors"]
    assert 0 < num_bytes(first) < 0.95 * size and first == merged(first) and first[0][0] > 0


def six_layers(tied: bool) -> dict[str, TensorInfo]:
    """The tensors of two files, each after a header of 10 bytes; no layer's tensors are side by side."""
    layers = [f"model.layers.{layer}.{name}" for name in ("q", "k") for layer in range(6)]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight", *([] if tied else ["lm_head.weight"])]
    halves = (names[:7], names[7:])
    places = [(file, 10 + 100 * at, name) for file, half in enumerate(halves) for at, name in enumerate(half)]
    return {name: TensorInfo(Path(f"{file}.safetensors"), "U8", (100,), at, at + 100) for file, at, name in places}


@given(st.lists(st.integers(0, 14), max_size=4), st.booleans(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_the_ranges_that_are_here_are_those_whose_bytes_are(gaps: list[int], tied: bool, has_headers: bool) -> None:
    table = six_layers(tied)
    spans: dict[str, list[Span]] = {}
    for number, info in enumerate(table.values()):
        header = [(0, 10)] if has_headers else []
        spans.setdefault(info.file.name, header).extend([] if number in gaps else [(info.start, info.stop)])
    sizes = {name: max(info.stop for info in table.values() if info.file.name == name) for name in spans}
    manifest = Manifest("m", files={name: FetchedFile(sizes[name], "", list(merged(spans[name]))) for name in spans})
    pieces = LayerPieces(table, 6, tied=tied)
    found = pieces.ranges_here(manifest)
    assert all(is_here(manifest, pieces.of(one.start, one.stop)) for one in found)
    starts = [0, *(one.stop for one in found)]
    for start, one in zip(starts, [*found, range(6, 7)], strict=True):
        assert not any(is_here(manifest, pieces.of(layer, layer + 1)) for layer in range(start, min(6, one.start)))
        assert one.stop >= 6 or not is_here(manifest, pieces.of(one.start, one.stop + 1))


def test_without_a_word_on_tying_the_last_stage_gets_the_embedding_too(tmp_path: Path) -> None:
    table = read_tensor_table(checkpoint(tmp_path / "model", TinyModel(layers=4, tied=False)))
    embedding = next(info for name, info in table.items() if "embed_tokens" in name)
    span = ((embedding.start, embedding.stop),)
    last = {tied: LayerPieces(table, 4, tied=tied).of(3, 4)["model.safetensors"] for tied in (None, False)}
    assert covers(last[None], span) and not covers(last[False], span)
