"""Quotes a client's values in error messages."""

from __future__ import annotations

import json

from exo_mesh.printable import escaped_json

MAX_QUOTED_CHARS = 80


def quoted(text: str) -> str:
    """A client's text as a JSON string: at most MAX_QUOTED_CHARS of it, with unprintable characters escaped."""
    shown = text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 1] + "…"
    return escaped_json(json.dumps(shown, ensure_ascii=False))
