"""Load one stage of a checkpoint: open everything lazily, read only what the stage's layers need.

mlx-lm builds the model and maps the checkpoint's names and quantisation onto it, as it does for a whole model; arrays
stay unread until they are evaluated. So ghosts cost nothing, and a layer that looks at a neighbour's weight gets it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo_mesh.engine.contract import LoadProgress
from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_json, text_config
from exo_mesh.weights.safetensors import INDEX_FILE, SINGLE_FILE, TensorTable, read_tensor_table
from exo_mesh_mlx.model_config import model_classes
from exo_mesh_mlx.trace import Trace, trace_model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers have been checked."""

    model_dir: Path
    config: dict[str, Any]
    table: TensorTable

    @property
    def vocab_size(self) -> int:
        """Number of token ids, 0 if the config does not say."""
        return int(text_config(self.config).get("vocab_size") or 0)


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Check config and safetensors headers. Raises ModelError naming file and tensor."""
    return Checkpoint(model_dir, read_json(model_dir / "config.json"), read_tensor_table(model_dir))


def build_model(checkpoint: Checkpoint) -> nn.Module:
    """The whole model with every parameter a lazy array from a file; reads headers only.

    Raises ModelError naming file and tensor if a parameter is missing, surplus or of another shape.
    """
    try:
        model, _ = load_model(checkpoint.model_dir, lazy=True, strict=True, get_model_classes=model_classes)
    except Exception as exc:  # mlx-lm and the model files raise anything for a checkpoint that does not fit
        raise ModelError(_explain(checkpoint, exc)) from exc
    return model


def trace_checkpoint(checkpoint: Checkpoint) -> Trace:
    """How the model uses its layers. Works on a model of its own, which is gone when this returns."""
    model = build_model(checkpoint)
    try:
        return trace_model(model, make_prompt_cache(model))
    except ModelError as exc:
        raise ModelError(f"{checkpoint.model_dir} cannot be split: {exc}") from exc
    except Exception as exc:  # foreign model code
        raise ModelError(f"{checkpoint.model_dir} cannot be split: its forward pass raises {exc!r}") from exc


def read_layers(model: nn.Module, start: int, stop: int, progress: LoadProgress) -> None:
    """Evaluate the parameters of layers `[start, stop)`, one layer at a time; progress is in bytes.

    Raises ModelError if a file cannot be read.
    """
    parameters = [[array for _, array in tree_flatten(layer.parameters())] for layer in model.layers[start:stop]]
    total = sum(array.nbytes for layer in parameters for array in layer)
    done = 0
    progress(0, total)
    for index, layer in enumerate(parameters, start):
        try:
            mx.eval(layer)
        except RuntimeError as exc:
            raise ModelError(f"layer {index} cannot be read: {exc}") from exc
        done += sum(array.nbytes for array in layer)
        progress(done, total)
    mx.clear_cache()


def _explain(checkpoint: Checkpoint, exc: Exception) -> str:
    """One sentence that names the tensor and the file, from what mlx or mlx-lm raised."""
    text = " ".join(str(exc).split())
    text = text if len(text) <= 400 else text[:400] + "…"
    named = [name for name in re.findall(r"[\w\-]+(?:\.[\w\-]+)+", text) if name in checkpoint.table]
    if named:
        return f"{checkpoint.table[named[0]].file}: {text}"
    index = checkpoint.model_dir / INDEX_FILE
    where = checkpoint.model_dir / SINGLE_FILE if not index.is_file() else index
    return f"{where}: {text or type(exc).__name__}"
