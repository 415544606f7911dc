"""A checkpoint on disk whose config and headers have been checked; files of other stages' layers may be absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from exo_mesh.domain.model_settings import text_config
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import layer_of
from exo_mesh.weights.model_files import exists, read_json
from exo_mesh.weights.safetensors import (
    INDEX_FILE,
    PART,
    SINGLE_FILE,
    TensorTable,
    on_disk,
    read_header,
    read_tensor_table,
    read_weight_map,
)
from exo_mesh_mlx.quantisation import check_quantisation

CONFIG_FILE = "config.json"
LIBRARY_FILES = (CONFIG_FILE, "generation_config.json", "hf_quant_config.json")
"""The JSON files that mlx-lm's `load_model` reads."""


class MlxCheckpoint(msgspec.Struct, frozen=True):
    """A checked checkpoint. table: tensors that are here. absent: {tensor: file} for files that the index names but
    that are not here."""

    model_dir: Path
    config: dict[str, Any]
    table: TensorTable
    absent: Mapping[str, Path] = msgspec.field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        return self.model_dir / CONFIG_FILE

    @property
    def weights_file(self) -> Path:
        """The file to name for a defect of no file in particular."""
        index = self.model_dir / INDEX_FILE
        return index if index.is_file() else self.model_dir / SINGLE_FILE

    @property
    def vocab_size(self) -> int:
        """Number of token ids, 0 if the config does not have it."""
        settings = text_config(self.config)
        return int(settings.get("vocab_size") or settings.get("num_vocab") or 0)

    def require_layers(self, start: int, stop: int) -> None:
        """Raises ModelError if a tensor of layers `[start, stop)` is in a file that is not here."""
        for name, file in self.absent.items():
            layer = layer_of(name)
            if layer is not None and start <= layer < stop:
                raise ModelError(f"{file} is missing; {INDEX_FILE} says that it holds {name}")


def open_checkpoint(model_dir: Path) -> MlxCheckpoint:
    """Check config and safetensors headers. Raises ModelError naming file and tensor or key."""
    config_file = model_dir / CONFIG_FILE
    config = read_json(config_file)
    check_quantisation(config, config_file)
    absent = _absent_tensors(model_dir)
    return MlxCheckpoint(model_dir, config, _table(model_dir, absent), absent)


@contextmanager
def as_library_reads(checkpoint: MlxCheckpoint) -> Iterator[Path]:
    """A directory for mlx-lm, with the settings as `read_json` has read them and links to the weights: mlx-lm refuses
    files with a byte-order mark, and looks for `model*.safetensors`, so files that are not whole (`*.part`) are linked
    under their whole names. Files opened there can be read after it is gone."""
    with TemporaryDirectory(prefix="exo-mesh-") as directory:
        for file in checkpoint.model_dir.iterdir():
            link = Path(directory, file.name.removesuffix(PART))
            if file.suffix != ".json" and file.is_file() and not link.is_symlink():
                link.symlink_to(on_disk(file).absolute() if file.name.endswith(PART) else file.absolute())
        for name in LIBRARY_FILES:
            if exists(checkpoint.model_dir / name):
                Path(directory, name).write_text(json.dumps(read_json(checkpoint.model_dir / name)))
        yield Path(directory)


def _absent_tensors(model_dir: Path) -> dict[str, Path]:
    """{tensor: file} of the index's files that are not here; empty if none of them is here, which is another defect."""
    index = model_dir / INDEX_FILE
    if on_disk(model_dir / SINGLE_FILE).is_file() or not index.is_file():
        return {}
    files = read_weight_map(index)
    here = {file for file in set(files.values()) if on_disk(model_dir / file).is_file()}
    return {name: model_dir / file for name, file in files.items() if file not in here} if here else {}


def _table(model_dir: Path, absent: Mapping[str, Path]) -> TensorTable:
    """Headers of all files, or of the files that are here."""
    if not absent:
        return read_tensor_table(model_dir)
    weight_map = read_weight_map(model_dir / INDEX_FILE)
    table: TensorTable = {}
    for file_name in sorted({file for name, file in weight_map.items() if name not in absent}):
        table.update(read_header(model_dir / file_name))
    lost = next((name for name in weight_map if name not in absent and name not in table), None)
    if lost is not None:
        raise ModelError(f"{model_dir / weight_map[lost]} does not hold {lost}, though {INDEX_FILE} says so")
    return table
