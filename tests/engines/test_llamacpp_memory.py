"""Stages of llama.cpp hold their share of a GGUF file and little else."""

from __future__ import annotations

from pathlib import Path

import pytest
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.plan import head_tensors, plain_tensors, stage_tensors
from exo_mesh_llamacpp.types import IQ1_S, Q4_0, Q8_0, GgmlType

from exo_mesh.weights.random_checkpoint import TinyModel
from tools.bench.llama_load import measured
from tools.bench.random_gguf import write_random_gguf

MOST = 1.1
"""Times the bytes of a part in the file: what a process may hold that computes with it."""

TINY = TinyModel(layers=3, hidden=256, heads=4, kv_heads=2, intermediate=256)


def source(directory: Path, kind: GgmlType) -> GgufModel:
    write_random_gguf(directory / "model.gguf", TINY, kind)
    return GgufModel(directory, "model.gguf")


@pytest.mark.parametrize(("kind", "unused"), [(Q4_0, IQ1_S), (Q8_0, None)], ids=["q4_0", "q8_0"])
def test_a_head_that_the_library_rearranges_is_loaded_once(
    tmp_path: Path, kind: GgmlType, unused: GgmlType | None
) -> None:
    model = source(tmp_path, kind)
    last = {tensor.name: tensor.kind for tensor in stage_tensors(model, 1, 3)}
    assert last["token_embd.weight"] == (unused or kind)
    assert last.get("output.weight") == (kind if unused else None)
    whole = {tensor.name: tensor.kind for tensor in plain_tensors(model)}
    assert whole["token_embd.weight"] == whole["output.weight"] == kind
    assert sum(tensor.num_bytes for tensor in head_tensors(model)) < 1.5 * kind.num_bytes((256, TINY.vocab)) + 2048


def test_the_parts_of_a_tensor_are_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh_llamacpp.gguf_source.CHUNK_BYTES", 1000)
    tensor = source(tmp_path, Q4_0).embedding()
    file = tmp_path / "whole"
    with file.open("wb") as stream:
        tensor.write(stream)
    assert tensor.part is not None
    parts, offset = [], 0
    while offset < tensor.num_bytes:
        parts.append(bytes(tensor.part(offset)))
        offset += len(parts[-1])
    assert len(parts) > 2 and b"".join(parts) == file.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")
def test_two_halves_of_a_4_bit_file_of_1_gb_take_their_share_of_memory() -> None:
    first, last, _ = measured("1780M", "q4_0")
    for half in (first, last):
        assert half.share_bytes > 500e6
        assert half.held_bytes <= MOST * half.share_bytes, half
