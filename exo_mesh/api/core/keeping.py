"""What a request wants to be kept after its end: its tokens in the prefix cache, and for whom; the model, and how long.

Pure.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from exo_mesh.errors import InputError

CacheRule = Literal["auto", "no-store", "session"]

MAX_NAME_CHARS = 512
"""Longest name of a session, and longest salt."""

SCOPE_BYTES = 16


class CacheWish(msgspec.Struct, frozen=True):
    """A client's rules. is_kept: the prompt and the answer may be kept for later prompts. scope: which requests share
    the kept prompts: requests of the same API key with the same scope; "": all requests to the model."""

    is_kept: bool = True
    scope: str = ""

    def scope_for(self, key_id: str) -> bytes:
        """The scope as the mesh knows it; b"" for all requests. key_id: of the caller's API key, "" without one."""
        if not self.scope:
            return b""
        return hashlib.sha256(f"exo-mesh cache scope\0{key_id}\0{self.scope}".encode()).digest()[:SCOPE_BYTES]


ANYBODY = CacheWish()
"""Kept prompts may be used by all requests to the model."""


def cache_wish(rule: CacheRule | None, session: str | None, salt: str | None = None) -> CacheWish:
    """Read the fields cache, prompt_cache_key and cache_salt. Raises InputError for a session without a name, or a name
    that is too long."""
    for name, text in (("prompt_cache_key", session), ("cache_salt", salt)):
        if text is not None and len(text) > MAX_NAME_CHARS:
            raise InputError(f"{name} has {len(text)} characters, more than {MAX_NAME_CHARS}", param=name)
    if rule == "session" and not session:
        raise InputError('cache is "session": prompt_cache_key must name the session', param="prompt_cache_key")
    named = [f"session {session}"] if rule == "session" else []
    salted = [f"salt {salt}"] if salt else []
    return CacheWish(rule != "no-store", "\0".join(named + salted))


MAX_KEEP_S = 366 * 86400.0
FOR_EVER = -1.0

MAX_DURATION_CHARS = 100

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
    if len(text) > MAX_DURATION_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if (whole := _DURATION.fullmatch(text)) is None:
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(whole[2]))
    return -seconds if whole[1] else seconds
