"""Model directories that are not whole: bytes that were not fetched are 0xFF, which makes every float a NaN."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np

from exo_mesh.domain.model_settings import text_config
from exo_mesh.domain.spans import Pieces, merged
from exo_mesh.weights.card import digest_samples
from exo_mesh.weights.fetched import FetchedFile, LayerPieces, Manifest, part_of, write_manifest
from exo_mesh.weights.model_files import read_json
from exo_mesh.weights.safetensors import read_tensor_table


def layer_pieces(model_dir: Path, start: int, stop: int, num_layers: int) -> Pieces:
    """What the stage `[start, stop)` fetches."""
    tied = text_config(read_json(model_dir / "config.json")).get("tie_word_embeddings")
    return LayerPieces(read_tensor_table(model_dir), num_layers, tied=tied).of(start, stop)


def copy_partly(model_dir: Path, target: Path, pieces: Pieces, name: str = "m") -> Path:
    """A directory as a fetcher leaves it when it has fetched these pieces; whole files have their own names."""
    target.mkdir(parents=True)
    samples = digest_samples(read_tensor_table(model_dir))
    manifest = Manifest(name)
    for file in sorted(model_dir.iterdir()):
        if file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
            continue
        content = file.read_bytes()
        header = (0, 8 + struct.unpack("<Q", content[:8])[0])
        present = merged((header, *samples.get(file.name, ()), *pieces.get(file.name, ())))
        partial = bytearray(b"\xff" * len(content))
        for start, stop in present:
            partial[start:stop] = content[start:stop]
        is_whole = present == ((0, len(content)),)
        (target / file.name if is_whole else part_of(target, file.name)).write_bytes(partial)
        manifest.files[file.name] = FetchedFile(len(content), "", list(present))
    write_manifest(target, manifest)
    return target


def pack_layer(file: Path, suffixes: tuple[str, ...] = (".qweight", ".scales")) -> None:
    """Replace one weight of a checkpoint file by tensors with these endings, as GPTQ and AWQ name them."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(file)
    if suffixes:
        module = "model.layers.0.mlp.up_proj"
        del tensors[f"{module}.weight"]
        tensors |= {f"{module}{suffix}": np.zeros((8, 8), np.int32) for suffix in suffixes}
    save_file(tensors, file)
