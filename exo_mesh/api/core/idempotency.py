"""The Idempotency-Key header: one key identifies one request, whose answer is kept for a while and can be resumed.

A key is valid only together with the API key of its first request. The same text from two API keys identifies two
requests, at every peer; all callers without an API key share one set of keys.

This follows https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header, with one difference: while the
first request still runs, a second one with its key is not refused. It takes over the answer, from the beginning or
after its Last-Event-ID. A client whose peer died cannot know whether the mesh has already noticed that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from exo_mesh.api.core.reply_ids import SECRET_CHARS
from exo_mesh.base.long_texts import json_parts
from exo_mesh.errors import InputError

KEY, LAST_EVENT = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_CHARS = 255


class Idempotency(msgspec.Struct, frozen=True):
    """An idempotency key as the mesh sees it. key_hash: a hash of the key and of the API key. fingerprint: a hash of
    the request. received: events of the answer that the client already has."""

    key_hash: bytes
    fingerprint: bytes
    received: int = 0

    @property
    def reply_id(self) -> str:
        """The id of the reply; the same at every peer, because a resumed answer is the same answer."""
        return hashlib.sha256(b"id" + self.key_hash).hexdigest()[:24]

    @property
    def secret(self) -> str:
        """A secret that only callers with the key know; the same at every peer."""
        return hashlib.sha256(b"secret" + self.key_hash).hexdigest()[:SECRET_CHARS]

    def draw_seed(self, bits: int) -> int:
        """The seed for sampling; the same at every peer, so that a resumed answer continues as it would have."""
        drawn = int.from_bytes(hashlib.sha256(b"seed" + self.key_hash).digest())
        return drawn % (1 << bits)

    def of_prompt(self, index: int) -> Idempotency:
        """The key for a further prompt of the same request."""
        return replace(self, key_hash=hashlib.sha256(b"prompt %d" % index + self.key_hash).digest())


def idempotency_of(
    request: web.Request, asked: Callable[[], Mapping[str, Any]], key_id: str, *, can_resume: bool
) -> Idempotency | None:
    """Read the header; None without one. Raises InputError if a header is invalid.

    asked: returns the fields that change the answer, as JSON values. key_id: the id of the caller's API key; "" without
    a key. can_resume: the answer is one stream, so its events can have ids.
    """
    key, last = request.headers.get(KEY), request.headers.get(LAST_EVENT)
    if key is None:
        if last is not None:
            raise InputError(f"{LAST_EVENT} is only allowed together with {KEY}", param=LAST_EVENT)
        return None
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}", key):
        raise InputError(f"{KEY} must be 1 to {MAX_KEY_CHARS} printable ASCII characters without spaces", param=KEY)
    if last is not None and not (can_resume and re.fullmatch(r"[0-9]{1,9}", last)):
        message = f"{LAST_EVENT} must be the id of an event of this answer, and the answer must be a single stream"
        raise InputError(message, param=LAST_EVENT)
    # the alias of a route without /v1 gives the same fingerprint
    fingerprint = hashlib.sha256()
    for part in json_parts([request.path.removeprefix("/v1"), asked()], sort_keys=True):
        fingerprint.update(part.encode("utf-8", "surrogatepass"))
    return Idempotency(
        hashlib.sha256(f"exo-mesh idempotency key\0{key_id}\0{key}".encode()).digest(),
        fingerprint.digest(),
        int(last or 0),
    )
