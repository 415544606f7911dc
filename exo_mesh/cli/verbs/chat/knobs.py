"""Settings of a request that `/set` can change: names, ranges and parsers. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from exo_mesh.base.printable import quoted
from exo_mesh.errors import InputError

_INT32 = 2**31 - 1
_INT64 = 2**63
DEFAULT = "default"
"""A value for any setting: leave the field out of the request, so that the node's default applies."""


class Knob(msgspec.Struct, frozen=True):
    """A setting of a request. field: its name in the chat request. read: parses the user's text; raises ValueError."""

    field: str
    read: Callable[[str], Any]
    values: str
    help: str


def _between(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def _switch(text: str) -> bool:
    return {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}[text.lower()]


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _stops(text: str) -> list[str]:
    """Parses one text, or a JSON list of texts. Raises ValueError."""
    stops = json.loads(text) if text.startswith("[") else [text]
    if not stops or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError
    return stops


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

KNOBS = {
    "temperature": Knob("temperature", _between(float, 0, 2), "0 to 2", "0 = always the most likely token"),
    "top_p": Knob(
        "top_p", _between(float, 0, 1), "0 to 1", "sample from the likeliest tokens with this total probability"
    ),
    "top_k": Knob(
        "top_k", _between(int, -1, _INT32), "a whole number", "sample from this many likeliest tokens; -1 = all"
    ),
    "min_p": Knob("min_p", _between(float, 0, 1), "0 to 1", "lowest probability, as a share of the likeliest token's"),
    "max_tokens": Knob("max_tokens", _between(int, 1, _INT32), "1 or more", "longest answer in tokens"),
    "seed": Knob("seed", _between(int, -_INT64, _INT64 - 1), "a whole number", "the same seed gives the same text"),
    "repetition_penalty": Knob(
        "repetition_penalty", _between(float, 0.01, 10), "0.01 to 10", "above 1: less repetition"
    ),
    "presence_penalty": Knob("presence_penalty", _between(float, -2, 2), "-2 to 2", "above 0: more new subjects"),
    "frequency_penalty": Knob("frequency_penalty", _between(float, -2, 2), "-2 to 2", "above 0: fewer frequent tokens"),
    "stop": Knob("stop", _stops, 'a text, or a list such as ["a", "b"]', "stop the answer before this text"),
    "think": Knob("enable_thinking", _switch, "on or off", "let the model think before it answers"),
    "effort": Knob("reasoning_effort", _one_of(*_EFFORTS), ", ".join(_EFFORTS), "how long the model thinks"),
}
OTHER_NAMES = {
    "num_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "reasoning_effort": "effort",
    "enable_thinking": "think",
}
"""Other names of settings, in Ollama and in the API."""

_NOT_HERE = {"num_ctx": "the context is set when a model is placed: exo-mesh preview MODEL --context-limit N"}


def read_knob(name: str, text: str) -> tuple[str, Any]:
    """(field of the request, parsed value or None for `default`). Raises InputError with the allowed values."""
    if hint := _NOT_HERE.get(name):
        raise InputError(f"{name} cannot be set here: {hint}", param=name)
    knob = KNOBS.get(OTHER_NAMES.get(name, name))
    if knob is None:
        raise InputError(f"there is no setting {name}; /set lists them", param=name)
    if text == DEFAULT:
        return knob.field, None
    try:
        return knob.field, knob.read(text)
    except (ValueError, KeyError) as exc:
        raise InputError(f"{name} must be {knob.values}, or {DEFAULT}; {quoted(text)} is not", param=name) from exc


def shown_knobs(parameters: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value as text) of the settings in the parameters."""
    names = {knob.field: name for name, knob in KNOBS.items()}
    return [(names.get(field, field), _shown(value)) for field, value in parameters.items()]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
