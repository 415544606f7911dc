"""The local token of a node: a caller that can read it from the node's home has local rights, from any address.

An address proves nothing: behind a proxy on the same machine, every stranger's call comes from the loopback. Commands
send the token only to an address on which a live node of the same home listens: see own_nodes.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

FILE_NAME = "local_token"
PREFIX = "exo-local-"
TOKEN_BYTES = 32

_TEXT = re.compile(PREFIX + "[A-Za-z0-9_-]{43}")


def take_token(home: Path) -> str:
    """The token in the home, created at the first start. A token that others could read is replaced. Raises OSError."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several nodes may start with one home at once
        token = file.read(len(PREFIX) + 64).strip()
        exposed = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
        if exposed or not _TEXT.fullmatch(token):
            token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
            os.fchmod(file.fileno(), 0o600)
            file.seek(0)
            file.truncate()
            file.write(token + "\n")
    return token


def read_token(home: Path) -> str:
    """The token in the home; "" if there is none that this user may read."""
    try:
        token = (home / FILE_NAME).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return token if _TEXT.fullmatch(token) else ""


def is_token(text: str, token: str) -> bool:
    """Whether a caller's text is the token. Takes constant time; no text equals an empty token."""
    return bool(token) and hmac.compare_digest(text.encode("utf-8", "surrogateescape"), token.encode())
