"""Finds facts about a model in its settings, in each place where transformers looks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: what messages between peers can carry."""

MAX_STOP_IDS = 1000

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
    """The quantisation: `4bit` in MLX's format, else the `quant_method` of other formats, with its bits."""
    ours, others = config.get("quantization"), text_config(config).get("quantization_config")
    if isinstance(ours, dict) and (bits := _bits(ours)):
        return f"{bits}bit"
    method = others.get("quant_method") if isinstance(others, dict) else None
    if not isinstance(others, dict) or not isinstance(method, str) or not method.isprintable() or len(method) > 32:
        return None
    return f"{method}-{bits}bit" if (bits := _bits(others)) else method


def _bits(settings: Mapping[str, Any]) -> int | None:
    bits = settings.get("bits")
    return bits if type(bits) is int and 0 < bits <= 64 else None
