"""Creates the secret that all peers of a closed mesh share, reads it from a file, and refuses weak ones.

The namespace, which separates meshes that share a network, is not secret, but people may put names into it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import stat
from pathlib import Path

from exo_mesh.base.small_files import read_small

MIN_BITS = 128
NEW_SECRET_BYTES = 32
MAX_FILE_BYTES = 4096
MIN_DISTINCT = 8
"""Random text of 128 bits has more different characters than this in all but one of 10^9 cases, even in hex."""

_ALPHABETS = ((r"[0-9]+", 10), (r"[0-9a-f]+|[0-9A-F]+", 16), (r"[a-z]+|[A-Z]+", 26), (r"[0-9a-z]+|[0-9A-Z]+", 36))
_NOT_ASCII = "the secret may contain only printable ASCII characters; create one with `exo-mesh secret new`"
_ANY_TEXT = 64
"""Alphabet size of a text that fits no smaller alphabet: base64 is assumed."""


def new_secret() -> str:
    """256 random bits as 43 printable characters."""
    return secrets.token_urlsafe(NEW_SECRET_BYTES)


def estimated_bits(text: str) -> float:
    """Entropy of a text, assuming it was drawn at random from the smallest usual alphabet that contains it."""
    if len(set(text)) < MIN_DISTINCT:
        return 0.0
    size = next((size for pattern, size in _ALPHABETS if re.fullmatch(pattern, text)), _ANY_TEXT)
    return len(text) * math.log2(size)


def parse_secret(text: str) -> str:
    """The secret in a text, without surrounding white space. Raises ValueError, which never quotes the text."""
    secret = text.strip()
    if not secret:
        raise ValueError("the secret is empty; create one with `exo-mesh secret new`")
    if not secret.isprintable() or not secret.isascii():
        raise ValueError(_NOT_ASCII)
    if estimated_bits(secret) < MIN_BITS:
        raise ValueError(
            f"the secret is too short: {len(secret)} characters like these have less than {MIN_BITS} bits; "
            "create one with `exo-mesh secret new`"
        )
    return secret


def read_secret_file(path: Path) -> str:
    """The secret in a file. Raises ValueError if the file has no usable secret."""
    try:
        content = read_small(path, MAX_FILE_BYTES)
    except OSError as exc:
        raise ValueError(f"the secret file cannot be read: {exc.strerror or exc}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the secret file has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse_secret(content.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise ValueError(_NOT_ASCII) from exc


def exposure(path: Path, what: str = "the secret file") -> str:
    """A sentence about other users who can read a secret file, with the remedy; "" if no one else can."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name != "posix" or not mode & (stat.S_IRGRP | stat.S_IROTH):
        return ""
    others = "everybody on this machine" if mode & stat.S_IROTH else "its group"
    return f"{what} {path} can be read by {others}: chmod 600 {path}"


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner may read. Raises OSError, also if the file exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")


DEFAULT_NAMESPACE = "default"


def fingerprint(namespace: str) -> str:
    """Eight hexadecimal digits that represent a namespace in logs, answers and on the screen."""
    return hashlib.sha256(namespace.encode("utf-8", "replace")).hexdigest()[:8]
