"""The namespace, which separates meshes that share a network. It is not secret, but people may put names into it."""

from __future__ import annotations

import hashlib

DEFAULT_NAMESPACE = "default"


def fingerprint(namespace: str) -> str:
    """Eight hexadecimal digits that represent a namespace in logs, answers and on the screen."""
    return hashlib.sha256(namespace.encode("utf-8", "replace")).hexdigest()[:8]
