"""Checks that mlx-lm can read the quantisation of a checkpoint, before anything is built, so that errors name the
key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_mesh.errors import ModelError

BITS = {"affine": (1, 2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
"""Group sizes of MLX's kernels, by mode."""

METHODS = ("awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")
"""`quant_method`s of other libraries that mlx-lm can load."""


def check_quantisation(config: Mapping[str, Any], config_file: Path) -> None:
    """Raises ModelError that names the file and the key of a setting that mlx-lm cannot load."""
    own = config.get("quantization")
    if own is not None:
        _check_own(own, f"{config_file}: quantization")
        return
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    other = config.get("quantization_config", inner)
    if not other:
        return
    method = other.get("quant_method") if isinstance(other, dict) else None
    if method == "gguf":
        raise ModelError(f"{config_file.parent}: the mlx engine does not read GGUF; llamacpp, torch and numpy do")
    if method not in METHODS:
        raise ModelError(
            f"{config_file}: quantization_config.quant_method is {json.dumps(method)}; known: {', '.join(METHODS)}"
        )


def _check_own(settings: Any, where: str) -> None:
    """Check MLX's own format: settings for all layers, and under the path of a module those for it, or false for
    none."""
    if not isinstance(settings, dict):
        raise ModelError(f"{where} is {json.dumps(settings)}, not an object")
    _check_settings(settings, where)
    for path, module in settings.items():
        if isinstance(module, dict):
            _check_settings(module, f"{where}.{path}", optional=True)


def _check_settings(settings: Mapping[str, Any], where: str, *, optional: bool = False) -> None:
    """optional: whether a missing setting has a default."""
    mode = settings.get("mode", "affine")
    if mode not in BITS:
        raise ModelError(f"{where}.mode is {json.dumps(mode)}; known: {', '.join(BITS)}")
    for key, known in (("bits", BITS[mode]), ("group_size", GROUP_SIZES[mode])):
        value = settings.get(key)
        if value not in known and not (optional and value is None):
            raise ModelError(f"{where}.{key} is {json.dumps(value)}; {mode} supports {', '.join(map(str, known))}")
