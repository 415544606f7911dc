"""Ids of replies that end with a secret: whoever knows such an id may read the reply. Pure.

The request itself has the id without the secret, because lists, logs and traces show it.
"""

from __future__ import annotations

import re

SECRET_CHARS = 20
"""Hexadecimal digits of a secret: 80 bits."""

MAX_ID_CHARS = 1000
"""No reply has a longer id; a client may send any text as one."""

_WITH_SECRET = re.compile(rf"((?:resp|msg)_.+)_([0-9a-f]{{{SECRET_CHARS}}})")


def with_secret(request_id: str, secret: str) -> str:
    """The id of the reply to a request."""
    return f"{request_id}_{secret}"


def request_id_of(reply_id: str) -> str:
    """The id of the request of a reply: the id without its secret, if it has one."""
    found = _parts(reply_id)
    return found[1] if found else reply_id


def secret_of(reply_id: str) -> str:
    """The secret of an id; "" if it has none."""
    found = _parts(reply_id)
    return found[2] if found else ""


def _parts(reply_id: str) -> re.Match[str] | None:
    return _WITH_SECRET.fullmatch(reply_id) if len(reply_id) <= MAX_ID_CHARS else None
