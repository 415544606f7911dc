"""Adapts configs as transformers 5 writes them to mlx-lm's ModelArgs, which use the older names."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import MISSING, fields
from typing import Any

from mlx_lm.utils import _get_classes


def model_classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's (Model, ModelArgs) for a config, which is normalised in place."""
    model_class, args_class = _get_classes(config)
    rename_settings(config)
    fill_required(config, args_class)
    return model_class, args_class


def rename_settings(config: MutableMapping[str, Any]) -> None:
    """Add the older name of each newer setting, also inside text_config. Existing values stay.

    ModelArgs ignore unknown settings, so a rope_theta left inside rope_parameters would silently become the default.
    """
    nested = config.get("text_config")
    if isinstance(nested, dict):
        rename_settings(nested)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        # per layer type if a model has two kinds of attention
        sliding, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
        _add(config, "rope_theta", rope.get("rope_theta"))
        _add(config, "partial_rotary_factor", rope.get("partial_rotary_factor"))
        _add(config, "rope_local_base_freq", sliding and sliding.get("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            _add(config, "rope_scaling", rope)
    _add(config, "num_experts", config.get("num_local_experts"))
    _add(config, "torch_dtype", config.get("dtype"))


def fill_required(config: MutableMapping[str, Any], args_class: type) -> None:
    """Set ModelArgs fields without a default if only one value is possible."""
    required = {f.name for f in fields(args_class) if f.default is MISSING and f.default_factory is MISSING}
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    if "head_dim" in required and isinstance(heads, int) and isinstance(hidden_size, int):
        _add(config, "head_dim", hidden_size // heads)
    if "num_key_value_heads" in required:
        _add(config, "num_key_value_heads", heads)
    if "num_local_experts" in required:
        _add(config, "num_local_experts", config.get("num_experts"))


def _add(config: MutableMapping[str, Any], name: str, value: Any) -> None:
    if config.get(name) is None and value is not None:
        config[name] = value
