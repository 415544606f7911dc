"""Shortens errors of foreign libraries for our messages."""

from __future__ import annotations

MAX_TEXT = 400


def one_line(exc: Exception) -> str:
    """The text of an error in one line of at most MAX_TEXT characters; its class if it has none."""
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
