"""Stages of llama.cpp hold their share of a model and little else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.gguf_source import GgufModel
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.plan import Planned, head_tensors, plain_tensors, stage_tensors
from exo_mesh_llamacpp.safetensors_source import SafetensorsSource
from exo_mesh_llamacpp.types import IQ1_S, Q4_0, Q8_0, GgmlType

from exo_mesh.weights.random_checkpoint import (
    TinyModel,
    config_json,
    tensor_shapes,
    write_checkpoint,
    write_json,
    write_safetensors,
)
from tools.bench.llama_load import measured
from tools.bench.random_gguf import write_random_gguf

MOST = 1.1
"""Times the bytes of a part in the file: what a process may hold that computes with it."""

MOST_VALUES = 2048
"""Values of a chunk: at least one head of the small models here."""

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
    parts = parts_of(tensor)
    assert len(parts) > 2 and b"".join(parts) == file.read_bytes()


def parts_of(tensor: Planned) -> list[bytes]:
    """The bytes of a tensor as its parts come, each asked for at the end of the one before."""
    assert tensor.part is not None
    parts: list[bytes] = []
    while (offset := sum(map(len, parts))) < tensor.num_bytes:
        parts.append(bytes(tensor.part(offset)))
    return parts


@pytest.mark.parametrize(("arch", "quant"), [("llama", ""), ("qwen2", "f32"), ("mixtral", "bf16"), ("mixtral", "")])
def test_no_part_of_a_converted_tensor_is_larger_than_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, quant: str
) -> None:
    model = SafetensorsSource(converted_model(tmp_path, arch), quant, no_library)
    tensors = [tensor for tensor in stage_tensors(model, 1, 2) if tensor.part is not None]
    at_once = {tensor.name: b"".join(parts_of(tensor)) for tensor in tensors}
    monkeypatch.setattr("exo_mesh_llamacpp.safetensors_source.CHUNK_VALUES", MOST_VALUES)
    assert len(tensors) == len(model.layer(1)) + 2
    for tensor in tensors:
        parts = parts_of(tensor)
        assert max(map(len, parts)) <= 4 * MOST_VALUES
        assert b"".join(parts) == at_once[tensor.name]
        middle = len(parts[0]) // 2 + 1
        assert tensor.part is not None and bytes(tensor.part(middle)) == parts[0][middle:]


def converted_model(directory: Path, arch: str) -> Path:
    """A checkpoint of two layers in bfloat16. Mixtral is the one whose experts are tensors of their own."""
    if arch != "mixtral":
        return write_checkpoint(directory, TinyModel(arch, layers=2, dtype="bfloat16"))
    like = TinyModel(layers=2, dtype="bfloat16")
    config = config_json(like) | {"model_type": arch, "num_local_experts": 3, "num_experts_per_tok": 2}
    write_json(directory / "config.json", config | {"sliding_window": None})
    shapes = {name: shape for name, shape in tensor_shapes(like).items() if ".mlp." not in name}
    for layer in range(like.layers):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        shapes[f"{prefix}gate.weight"] = (3, like.hidden)
        for expert in range(3):
            shapes[f"{prefix}experts.{expert}.w1.weight"] = (like.intermediate, like.hidden)
            shapes[f"{prefix}experts.{expert}.w2.weight"] = (like.hidden, like.intermediate)
            shapes[f"{prefix}experts.{expert}.w3.weight"] = (like.intermediate, like.hidden)
    rng = np.random.default_rng(0)
    write_safetensors(
        directory / "model.safetensors",
        shapes,
        like.dtype,
        lambda name: rng.standard_normal(shapes[name], dtype=np.float32),
    )
    return directory


def no_library() -> Library:
    raise AssertionError("nothing is quantised here")


@pytest.mark.slow
@pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")
def test_two_halves_of_a_4_bit_file_of_1_gb_take_their_share_of_memory() -> None:
    first, last, _ = measured("1780M", "q4_0")
    for half in (first, last):
        assert half.share_bytes > 500e6
        assert half.held_bytes <= MOST * half.share_bytes, half
