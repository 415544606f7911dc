"""The tensors of a model directory, in whichever format its weights are."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.weights import safetensors
from exo_mesh.weights.gguf_families import ROPE_FACTORS
from exo_mesh.weights.gguf_table import file_table, find_first_file, read_gguf_table, read_headers
from exo_mesh.weights.model_files import exists
from exo_mesh.weights.safetensors import INDEX_FILE, SINGLE_FILE, TensorTable, on_disk


def gguf_file_of(model_dir: Path) -> str | None:
    """The name of the GGUF file, or of its first shard, that has a directory's weights; None if it has safetensors,
    which count first, or no weights. Raises ModelError if there are several GGUF models."""
    if exists(on_disk(model_dir / SINGLE_FILE)) or exists(model_dir / INDEX_FILE):
        return None
    return find_first_file(model_dir)


def read_tensor_table(model_dir: Path) -> TensorTable:
    """Every tensor of a model by its name in checkpoints of transformers, from the headers of its files. Tensors of
    GGUF files may be GgufTensors.

    Raises ModelError naming the file, and the tensor if there is one, for any defect that headers can show.
    """
    first = gguf_file_of(model_dir)
    return safetensors.read_tensor_table(model_dir) if first is None else read_gguf_table(model_dir, first)


def read_stage_tensors(model_dir: Path) -> TensorTable:
    """As read_tensor_table, with the tensors of GGUF files that are part of the config in checkpoints: every stage of
    an engine that runs the file itself loads them. Raises ModelError."""
    table = read_tensor_table(model_dir)
    first = gguf_file_of(model_dir)
    if first is None:
        return table
    own = file_table(read_headers(model_dir, first))
    return table | {name: own[name] for name in ROPE_FACTORS if name in own}
