"""The secret of a running answer, with which a client that has no key can read and stop it elsewhere."""

from __future__ import annotations

import secrets

from aiohttp import web

SECRET_HEADER = "x-exo-mesh-stream-secret"

STREAM_SECRET = web.RequestKey("stream_secret", str)
"""What the reply's header says; only for requests that came without a key."""


def new_secret(request: web.Request) -> str:
    """A secret that the reply to this request carries."""
    request[STREAM_SECRET] = secrets.token_urlsafe(24)
    return request[STREAM_SECRET]
