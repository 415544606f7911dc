"""What `/set` can change of a request: names, ranges, and how a value is read. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exo_mesh.errors import InputError

_INT32 = 2**31 - 1
_INT64 = 2**63
DEFAULT = "default"
"""As a value of any knob: leave it out of the request, so that the node decides."""


@dataclass(frozen=True, slots=True)
class Knob:
    """field: of a chat request. read: makes its value from what the user typed; raises ValueError."""

    field: str
    read: Callable[[str], Any]
    values: str
    help: str


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
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
    """One text, or a JSON list of texts."""
    stops = json.loads(text) if text.startswith("[") else [text]
    if not stops or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError
    return stops


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

KNOBS = {
    "temperature": Knob("temperature", _number(0, 2), "0 to 2", "0 = always the likeliest token"),
    "top_p": Knob("top_p", _number(0, 1), "0 to 1", "draw from the likeliest tokens with this probability in all"),
    "top_k": Knob("top_k", _whole(-1, _INT32), "a whole number", "draw from this many tokens; -1 = all"),
    "min_p": Knob("min_p", _number(0, 1), "0 to 1", "least probability, as a share of that of the likeliest token"),
    "max_tokens": Knob("max_tokens", _whole(1, _INT32), "1 or more", "most tokens of an answer"),
    "seed": Knob("seed", _whole(-_INT64, _INT64 - 1), "a whole number", "same seed, same text"),
    "repetition_penalty": Knob("repetition_penalty", _number(0.01, 10), "0.01 to 10", "above 1: repeat less"),
    "presence_penalty": Knob("presence_penalty", _number(-2, 2), "-2 to 2", "above 0: new subjects"),
    "frequency_penalty": Knob("frequency_penalty", _number(-2, 2), "-2 to 2", "above 0: repeat frequent tokens less"),
    "stop": Knob("stop", _stops, 'a text, or a list such as ["a", "b"]', "end the answer before this text"),
    "think": Knob("enable_thinking", _switch, "on or off", "whether the model thinks before it answers"),
    "effort": Knob("reasoning_effort", _one_of(*_EFFORTS), ", ".join(_EFFORTS), "how long the model thinks"),
}
OTHER_NAMES = {
    "num_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "reasoning_effort": "effort",
    "enable_thinking": "think",
}
"""Names of Ollama and of the API."""

_NOT_HERE = {"num_ctx": "the context is set when a model is placed: exo-mesh preview MODEL --context-limit N"}


def read_knob(name: str, text: str) -> tuple[str, Any]:
    """(field of the request, value); the value is None for `default`. Raises InputError that says what is allowed."""
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
        raise InputError(f"{name} must be {knob.values}, or {DEFAULT}; {text!r} is not", param=name) from exc


def shown_knobs(parameters: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of those that are set."""
    names = {knob.field: name for name, knob in KNOBS.items()}
    return [(names.get(field, field), _shown(value)) for field, value in parameters.items()]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
