"""Writes a random checkpoint for a tiny config: real safetensors in mlx-lm's own format, noise on every parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

NOISE = 0.1
"""Standard deviation of the noise on every floating-point parameter, so that no two layers are alike."""


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """Writes config.json and model.safetensors; returns `directory`."""
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model_class, args_class = _get_classes(config)
    # ModelArgs may keep and change nested config values, so it gets a copy
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    parameters = {name: _with_noise(array) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), parameters, metadata={"format": "mlx"})
    return directory


def _with_noise(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array + (NOISE * mx.random.normal(array.shape)).astype(array.dtype)
