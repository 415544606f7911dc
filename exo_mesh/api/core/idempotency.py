"""The Idempotency-Key header: one key stands for one request, whose answer is kept for a while and gone on with.

It is valid only with the API key that it came with. The same text from two API keys stands for two requests, at every
peer; callers without an API key share one set of texts.

As https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header has it, with one difference: while the
first request still runs, a second one with its key is not refused but takes the answer over from the beginning, or from
where its Last-Event-ID says. A client whose peer died cannot know whether the mesh has noticed that yet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from exo_mesh.errors import InputError

KEY, LAST_EVENT = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Idempotency:
    """key_hash: what the mesh knows of the key and of the API key that came with it. fingerprint: of the request.
    received: events of the answer that the client already has."""

    key_hash: bytes
    fingerprint: bytes
    received: int = 0

    @property
    def reply_id(self) -> str:
        """The same at every peer: an answer that goes on elsewhere is the same answer."""
        return hashlib.sha256(b"id" + self.key_hash).hexdigest()[:24]

    def draw_seed(self, bits: int) -> int:
        """Likewise: drawing goes on as it would have."""
        drawn = int.from_bytes(hashlib.sha256(b"seed" + self.key_hash).digest())
        return drawn % (1 << bits)

    def of_prompt(self, index: int) -> Idempotency:
        """For another prompt of the same request than its first."""
        return replace(self, key_hash=hashlib.sha256(b"prompt %d" % index + self.key_hash).digest())


def idempotency_of(
    request: web.Request, asked: Mapping[str, Any], key_id: str, *, can_resume: bool
) -> Idempotency | None:
    """None without an idempotency key. Raises InputError if a header cannot be used.

    asked: what changes the answer, as JSON values. key_id: of the caller's API key; empty if it has none. can_resume:
    the answer is one stream, whose events can have ids.
    """
    key, last = request.headers.get(KEY), request.headers.get(LAST_EVENT)
    if key is None:
        if last is not None:
            raise InputError(f"{LAST_EVENT} is only allowed together with {KEY}", param=LAST_EVENT)
        return None
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}", key):
        raise InputError(f"{KEY} must be 1 to {MAX_KEY_CHARS} printable ASCII characters without blanks", param=KEY)
    if last is not None and not (can_resume and re.fullmatch(r"[0-9]{1,9}", last)):
        message = f"{LAST_EVENT} must be the id of an event of this answer, which must be one stream"
        raise InputError(message, param=LAST_EVENT)
    text = json.dumps([request.path.removeprefix("/v1"), asked], sort_keys=True)
    return Idempotency(
        hashlib.sha256(f"exo-mesh idempotency key\0{key_id}\0{key}".encode()).digest(),
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(),
        int(last or 0),
    )
