"""Quotes a client's values in error messages."""

from __future__ import annotations

from exo_mesh.base import printable

MAX_QUOTED_CHARS = 80


def quoted(text: str) -> str:
    """A client's text as a JSON string: at most MAX_QUOTED_CHARS of it, with unprintable characters escaped."""
    is_short = len(text) <= MAX_QUOTED_CHARS
    return printable.quoted(text if is_short else text[: MAX_QUOTED_CHARS - 1] + "…")
