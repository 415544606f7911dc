"""Reads how long a model must stay loaded after a request, in the forms of Ollama and LM Studio. Pure."""

from __future__ import annotations

import re

from exo_mesh.errors import InputError

MAX_KEEP_S = 366 * 86400.0
FOR_EVER = -1.0

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_PART.pattern})+)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def keep_alive_s(given: float | str | None, param: str) -> float | None:
    """Read a duration such as "5m", "1h30m", "300" or a number, in seconds; FOR_EVER if negative, None if absent or "".

    Raises InputError for anything else, and for more than a year.
    """
    if given is None or given == "":
        return None
    seconds = _seconds_of(given) if isinstance(given, str) else float(given)
    if seconds is None or seconds != seconds or seconds > MAX_KEEP_S:
        message = (
            f'{param} must be a number of seconds or a time such as "5m" or "1h30m", at most one year; '
            "a negative number means for ever"
        )
        raise InputError(message, param=param)
    return FOR_EVER if seconds < 0 else seconds


def _seconds_of(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    if (whole := _DURATION.fullmatch(text)) is None:
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(whole[2]))
    return -seconds if whole[1] else seconds
