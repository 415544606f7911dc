"""The secret of a running answer: with it a client without a key can read and stop the answer at any peer."""

from __future__ import annotations

import secrets

from aiohttp import web

SECRET_HEADER = "x-exo-mesh-stream-secret"

STREAM_SECRET = web.RequestKey("stream_secret", str)
"""The header of the reply; only for requests without a key."""


def new_secret(request: web.Request, secret: str = "") -> str:
    """Make a secret, unless one is given, and add it to the reply's headers."""
    request[STREAM_SECRET] = secret or secrets.token_urlsafe(24)
    return request[STREAM_SECRET]
