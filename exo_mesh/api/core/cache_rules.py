"""Rules of a request for the prefix cache: whether its tokens are kept after its end, and who may use them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from exo_mesh.errors import InputError

CacheRule = Literal["auto", "no-store", "session"]

MAX_NAME_CHARS = 512
"""Longest name of a session, and longest salt."""

SCOPE_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheWish:
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
