"""Ids of replies that end with a secret: whoever knows such an id may read the reply. Pure.

The request itself has the id without the secret, because lists, logs and traces show it.
"""

from __future__ import annotations

import re

SECRET_CHARS = 20
"""Hexadecimal digits of a secret: 80 bits."""

_WITH_SECRET = re.compile(rf"((?:resp|msg)_.+)_([0-9a-f]{{{SECRET_CHARS}}})")


def with_secret(request_id: str, secret: str) -> str:
    """The id of the reply to a request."""
    return f"{request_id}_{secret}"


def request_id_of(reply_id: str) -> str:
    """The id of the request of a reply: the id without its secret, if it has one."""
    found = _WITH_SECRET.fullmatch(reply_id)
    return found[1] if found else reply_id


def secret_of(reply_id: str) -> str:
    """The secret of an id; "" if it has none."""
    found = _WITH_SECRET.fullmatch(reply_id)
    return found[2] if found else ""
