"""Makes texts that others wrote safe to print and bounded. A peer's text must not move the cursor, colour a terminal,
forge a line of the log or reverse the direction of writing."""

from __future__ import annotations

import re
from typing import Any

MAX_CHARS = 1024
"""Longest text that a peer may give for which nothing shorter is said. A refusal with its arithmetic has about 300."""

ANSWER_CHARS = 65_536
"""Longest text in an answer of a node's API to the command line."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
UNPRINTABLE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
"""C0, DEL, C1, line and paragraph separators, marks and overrides of the writing direction, lone surrogates."""
_one_line = re.compile(f"[{UNPRINTABLE}]")
_several_lines = re.compile(f"(?!\n)[{UNPRINTABLE}]")


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    """The first `max_chars` characters of a text, with U+FFFD for each that is not to be printed."""
    if len(text) > max_chars:
        text = text[:max_chars]
    return text if text.isprintable() else _one_line.sub(_REPLACEMENT, text)


def printable_values(value: Any, max_chars: int = MAX_CHARS) -> Any:
    """A value of JSON with every text in it made printable."""
    if isinstance(value, str):
        return printable(value, max_chars)
    if isinstance(value, list):
        return [printable_values(item, max_chars) for item in value]
    if isinstance(value, dict):
        return {printable(str(key)): printable_values(item, max_chars) for key, item in value.items()}
    return value


def escaped(text: str, *, keep_newlines: bool = False) -> str:
    """A text of any length with `\\x1b` and the like for each character that is not to be printed."""
    if text.isprintable():
        return text
    return (_several_lines if keep_newlines else _one_line).sub(_escape, text)


def escaped_json(text: str) -> str:
    """A JSON document with `\\u202e` and the like for what JSON does not escape by itself."""
    return text if text.isprintable() else _several_lines.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
