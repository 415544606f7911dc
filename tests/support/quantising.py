"""Checkpoints with packed weights as `mlx_lm.convert -q` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from tests.support.checkpoints import write_json


def quantise(directory: Path, own: Callable[[str], Any] | None = None, **settings: Any) -> nn.Module:
    """Packs the weights of a checkpoint, and says so in its config; returns mlx-lm's model. own: for the name of a
    module whether it is packed, or settings of its own."""
    model, _ = load_model(directory)
    chosen: dict[str, Any] = {}

    def choose(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or own is None:
            return hasattr(module, "to_quantized")
        chosen[path] = own(path)
        return chosen[path]

    nn.quantize(model, **settings, class_predicate=choose)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    quantisation = settings | chosen
    edit_config(directory, quantization=quantisation, quantization_config=quantisation)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Changes settings; None removes one."""
    config = json.loads((directory / "config.json").read_text()) | changes
    write_json(directory / "config.json", {name: value for name, value in config.items() if value is not None})
