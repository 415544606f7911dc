"""Standard input and output of a verb, whatever the encoding of the terminal is."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import IO

from exo_mesh.base.printable import cells
from exo_mesh.errors import InputError

SIMILAR = "exo-mesh-similar"
"""The error handler that prepare_streams gives to standard output."""

_ASCII = dict(zip("█▇▆▅▄▃▂▁▒░·─→←↔…–—×", "##==--__=..-><-.--x", strict=True))
"""What stands for the characters of our bars, lines and arrows."""


BOLD, DIM, YELLOW = "1", "2", "33"
"""Styles of texts, as terminals number them (ECMA-48, SGR)."""


def shows_styles(stream: IO[str]) -> bool:
    """Whether texts on a stream may have styles: on a terminal, unless its user wants none (https://no-color.org)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """The text with a style that ends with it."""
    return f"\x1b[{style}m{text}\x1b[0m"


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, "?" * cells(char)) for char in missing), error.end


codecs.register_error(SIMILAR, _similar)


def prepare_streams() -> None:
    """Lets every verb print any text: a character that the output's encoding does not have becomes a similar one or
    `?`, and takes as many columns as before, so that tables stay aligned.

    Input that its encoding cannot decode becomes U+FFFD; input that was announced as ASCII is read as UTF-8.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=SIMILAR)
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")


def piped_text() -> str:
    """Reads standard input to its end, as UTF-8 whatever the locale is, without a byte-order mark.

    Raises InputError if it is not UTF-8.
    """
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return str(sys.stdin.read())
    try:
        data: bytes = sys.stdin.buffer.read()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        message = f"standard input is not UTF-8 text: byte {exc.start} is invalid; convert it, for example with iconv"
        raise InputError(message, param="prompt") from exc
