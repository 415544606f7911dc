"""Finds facts about a model in its settings, in each place where transformers looks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: what messages between peers can carry."""

MAX_STOP_IDS = 1000
MAX_BITS = 64
MAX_WORD = 32
"""Most characters of the name of a quantisation."""

_NAMED_FLOATS = ("nvfp4", "mxfp4", "mxfp8")
"""Floats with scales of their own that formats of compressed-tensors are called after."""

_AFFINE = "affine"
"""MLX's mode of scales and biases, which has no name of its own in front of its bits."""

_NESTED = ("text_config", "llm_config", "language_config")
"""Names under which the settings of a language model are nested in the settings of a model with other parts."""

_OFF_AT_ZERO = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping")
_OFF_BELOW_ZERO = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings that null turns off. Files also write -1, or 0 where 0 has no other meaning."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the language model: nested ones override those beside them."""
    nested: Mapping[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    return {**config, **nested}


def without_off(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of config.json with null wherever a number turns something off; changed in place."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            without_off(value)
        elif isinstance(value, int | float) and (
            (name in _OFF_AT_ZERO and value <= 0) or (name in _OFF_BELOW_ZERO and value < 0)
        ):
            config[name] = None
    return config


def token_ids(name: str, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of `name`, such as "eos_token_id": an id or a list of ids in generation_config.json, else in config.json,
    else nested in it. Negative ids mean that there is none. Raises ValueError for anything else than ids."""
    places = (generation.get(name), config.get(name), text_config(config).get(name))
    found: Any = next((value for value in places if value is not None), [])
    ids = found if isinstance(found, list) else [found]
    if len(ids) > MAX_STOP_IDS or not all(_is_id(value) for value in ids):
        raise ValueError(f"{name} is not a token id or a list of them")
    return tuple(int(value) for value in ids if value >= 0)


def _is_id(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_TOKEN_ID and value == int(value)


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """The quantisation as config.json says it: in MLX's format `4bit`, or its mode such as `mxfp4`; in other formats
    the `quant_method` with the type of the weights, such as `gptq-4bit`, `compressed-tensors-fp8`, `modelopt-nvfp4`."""
    text = text_config(config)
    ours, others = text.get("quantization"), text.get("quantization_config") or config.get("compression_config")
    if isinstance(ours, dict) and (word := _type_of(ours)):
        return word
    method = others.get("quant_method") if isinstance(others, dict) else None
    if not isinstance(others, dict) or not _is_word(method):
        return None
    nested = others.get("quantization")
    word = _type_of(others) or (_type_of(nested) if isinstance(nested, dict) else "") or _type_of_groups(others)
    return f"{method}-{word}" if word and word != method else str(method)


def _type_of(settings: Mapping[str, Any]) -> str:
    """The type of quantised weights by the key that each tool writes: MLX's mode, modelopt's algorithm, or bits."""
    for key in ("mode", "quant_algo"):
        value = settings.get(key)
        if _is_word(value) and value != _AFFINE:
            return str(value).lower()
    bits = next((settings[key] for key in ("bits", "num_bits") if key in settings), None)
    if type(bits) is not int or not 0 < bits <= MAX_BITS:
        return ""
    return f"fp{bits}" if settings.get("type") == "float" else f"{bits}bit"


def _type_of_groups(settings: Mapping[str, Any]) -> str:
    """The type of weights that all config groups of compressed-tensors have, by its name if it has one; "" if they
    differ."""
    layout = settings.get("format")
    if isinstance(layout, str) and (name := layout.partition("-")[0]) in _NAMED_FLOATS:
        return name
    groups = settings.get("config_groups")
    weights = (
        [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    )
    found = {_type_of(one) for one in weights if isinstance(one, dict)}
    return found.pop() if len(found) == 1 else ""


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_WORD and value.isprintable()
