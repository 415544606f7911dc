"""Checks of values that requests of all dialects have: pure functions that raise InputError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import ValidationError, convert

from exo_mesh.api.core.neutral_fields import show_json, without_neutral
from exo_mesh.errors import InputError

MAX_STOPS = 64  # code completion in editors sends more than 16: markers of the model and words of the language
MAX_STOP_CHARACTERS = 1024  # our own bound, so that the search for stop strings stays cheap
MAX_TOOLS = 512


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raises InputError unless low <= value <= high; None is allowed."""
    if value is not None and not low <= value <= high:
        raise InputError(f"{name} is {show_json(value)}; it must be between {low} and {high}", param=name)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """A field with one or several stop strings, as a tuple. Empty strings stop nothing, so they are left out."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def check_stops(stops: Sequence[str], param: str) -> None:
    """Raises InputError if there are too many stop strings, or if one is too long. param: their field."""
    if len(stops) > MAX_STOPS:
        raise InputError(f"{param} has {len(stops)} strings; at most {MAX_STOPS} are allowed", param=param)
    for text in stops:
        if len(text) > MAX_STOP_CHARACTERS:
            message = f"{param} has a string of {len(text)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"
            raise InputError(message, param=param)


def token_ids_of(given: Any) -> tuple[int, ...] | None:
    """A list of token ids as a tuple, with 5.0 as 5; None for anything else."""
    try:
        ids = convert(without_neutral(given, list[int], {}), list[int])
    except ValidationError:
        return None
    return tuple(ids)


def repetition_of(penalty: float | None, last: int | None) -> tuple[float | None, int | None]:
    """The repetition penalty, and the number of last tokens that it looks at, from llama.cpp's `repeat_last_n`: 0 is no
    penalty, -1 are all tokens."""
    if last == 0:
        return 1.0, None
    return penalty, None if last == -1 else last


def check_num_tools(tools: Sequence[Any]) -> None:
    """Raises InputError if a request offers too many tools."""
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools has {len(tools)} tools; at most {MAX_TOOLS} are allowed", param="tools")


def first_given(*values: Any) -> Any:
    """The first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)
