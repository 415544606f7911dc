"""Makes texts from other peers and users safe to print, and bounded. Such a text must not move the cursor, colour a
terminal, forge a line of the log or reverse the direction of writing."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from typing import Any

MAX_CHARS = 1024
"""Longest text of a peer, where no shorter limit is set. A refusal with its arithmetic has about 300 characters."""

ANSWER_CHARS = 65_536
"""Longest text in an answer of a node's API to the command line."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
UNPRINTABLE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
"""C0, DEL, C1, line and paragraph separators, marks and overrides of the writing direction, lone surrogates."""
_one_line = re.compile(f"[{UNPRINTABLE}]")
_several_lines = re.compile(f"(?!\n)[{UNPRINTABLE}]")


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    """Returns the first `max_chars` characters of a text, with U+FFFD for each unprintable character."""
    if len(text) > max_chars:
        text = text[:max_chars]
    return text if text.isprintable() else _one_line.sub(_REPLACEMENT, text)


def printable_values(value: Any, max_chars: int = MAX_CHARS) -> Any:
    """Returns a JSON value in which every text is made printable."""
    if isinstance(value, str):
        return printable(value, max_chars)
    if isinstance(value, list):
        return [printable_values(item, max_chars) for item in value]
    if isinstance(value, dict):
        return {printable(str(key)): printable_values(item, max_chars) for key, item in value.items()}
    return value


def cells(text: str) -> int:
    """Returns how many columns of a terminal a printable text takes: two for a wide character, none for a mark."""
    if text.isascii():
        return len(text)
    marks = sum(unicodedata.category(char) in ("Mn", "Me", "Cf") for char in text)
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text) - marks


def padded(text: str, width: int) -> str:
    """Returns a text with spaces behind it, so that it takes `width` columns of a terminal, or more if it is longer."""
    return text + " " * (width - cells(text))


def typed(text: str) -> str:
    """Returns a text from the command line or the environment as UTF-8 where the locale's encoding could not decode it.

    Python keeps such bytes as lone surrogates. Bytes that are not UTF-8 either stay as they are.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return text


def escaped(text: str, *, keep_newlines: bool = False) -> str:
    """Escapes each unprintable character of a text (`\\x1b` and the like); the text may have any length."""
    if text.isprintable():
        return text
    return (_several_lines if keep_newlines else _one_line).sub(_escape, text)


def escaped_json(text: str) -> str:
    """Escapes unprintable characters of a JSON document (`\\u202e` and the like) that JSON itself allows."""
    return text if text.isprintable() else _several_lines.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def reason_of(error: Exception) -> str:
    """Returns why something failed, for people: of an OSError the words of the system without its number, and the path
    before them if it names one."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"


def counted(number: object, noun: str) -> str:
    """Returns `1 layer`, `2 layers`: a number with its noun, for people. number: "?" stands for an unknown one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def quoted(text: str, max_chars: int = MAX_CHARS) -> str:
    """Returns the first `max_chars` characters of a text as a printable JSON string, for messages."""
    return escaped_json(json.dumps(text[:max_chars], ensure_ascii=False))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def random_digits() -> str:
    """20 random decimal digits: a mark that no text contains by chance, and that changes of case leave as it is."""
    return f"{int.from_bytes(os.urandom(9)) % 10**20:020d}"
