"""Describes the subject of the suite: an engine, how to write a model for it, and how exact it claims to be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np

from exo_mesh.engine.contract import EngineProvider
from exo_mesh.weights.random_checkpoint import TinyModel, tensor_shapes, write_checkpoint, write_json, write_safetensors

TINY = TinyModel("llama", layers=4)
_VICTIM = "model.layers.2.mlp.up_proj.weight"


@dataclass(frozen=True)
class Damage:
    """A way to damage a model directory, and the parts that the message of the ModelError must contain."""

    name: str
    spoil: Callable[[Path], None]
    says: tuple[str, ...]


def write_tiny_llama(directory: Path) -> Path:
    """Write a random Llama of four layers in float32, with flat logits."""
    return write_checkpoint(directory, TINY)


def _rewrite(model_dir: Path, changes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Write the weights of TINY again with other shapes; None leaves the tensor out."""
    shapes = {**tensor_shapes(TINY), **{name: shape for name, shape in changes.items() if shape is not None}}
    kept = {name: shape for name, shape in shapes.items() if changes.get(name, shape) is not None}
    write_safetensors(model_dir / "model.safetensors", kept, TINY.dtype, lambda name: np.ones(kept[name], np.float32))


def _truncate(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def _rename_architecture(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_bytes())
    write_json(model_dir / "config.json", {**config, "model_type": "no_such_thing"})


CHECKPOINT_DAMAGES = (
    Damage("a tensor is missing", lambda path: _rewrite(path, {_VICTIM: None}), (_VICTIM,)),
    Damage("a tensor has another shape", lambda path: _rewrite(path, {_VICTIM: (3,)}), ("model.safetensors", _VICTIM)),
    Damage("the file is cut short", _truncate, ("model.safetensors", "lm_head.weight")),
    Damage("there is no config", lambda path: (path / "config.json").unlink(), ("config.json",)),
    Damage("the config is not JSON", lambda path: _write(path / "config.json", "{"), ("config.json",)),
    Damage("the architecture is unknown", _rename_architecture, ("no_such_thing",)),
)
"""Damages of a model of `write_tiny_llama`, for a load of all its layers."""


@dataclass(frozen=True)
class Subject:
    """The engine that the suite is run on.

    provider: "package:attribute", as in an entry point. options: engine options, as `--engine-option` gives them.
    write_model: writes a model for it into an empty directory: at least 3 layers, cards readable (see weights/card.py).
    reads_weights: False for an engine that computes without weights; checks of weights are then left out.
    slice_tolerance, tolerance: the largest |difference| of logits, relative to their rms, from cutting the model (0:
    equal bits) and from other batches or chunks (used only if the engine does not declare row_exact). damages: damages
    of the model that the engine must name.
    """

    provider: str
    options: Mapping[str, str] = field(default_factory=dict)
    write_model: Callable[[Path], Path] = write_tiny_llama
    reads_weights: bool = True
    slice_tolerance: float = 0.0
    tolerance: float = 1e-4
    damages: tuple[Damage, ...] = CHECKPOINT_DAMAGES

    def load_provider(self) -> EngineProvider:
        """The provider that `provider` names."""
        module, _, attribute = self.provider.partition(":")
        return cast(EngineProvider, getattr(import_module(module), attribute))


def _write(file: Path, text: str) -> None:
    file.write_text(text)
