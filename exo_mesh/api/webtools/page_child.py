"""`python -m exo_mesh.api.webtools.page_child`: a process that reads one page, and ends.

Standard input has one line of JSON (PageQuestion), then the bytes of the page. Standard output gets a PageAnswer. The
system limits its memory and CPU time, because a page may be written to exhaust a parser.
"""

from __future__ import annotations

import codecs
import re
import sys

import msgspec

from exo_mesh.api.webtools.article import article_of
from exo_mesh.api.webtools.page_text import read_page, tidy_text
from exo_mesh.base.process_limits import limit_cpu, limit_process

MAX_MEMORY_BYTES = 256 << 20
LIMIT_S = 3.0
_META = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class PageQuestion(msgspec.Struct):
    """is_html: else the page is plain text. charset: of the headers, or "". max_chars: most characters of the text."""

    is_html: bool
    charset: str
    max_chars: int


class PageAnswer(msgspec.Struct):
    """is_cut: the text had more characters than asked for."""

    title: str
    text: str
    is_cut: bool


def main() -> int:
    """Answer the question on standard input."""
    limit_process(MAX_MEMORY_BYTES)
    limit_cpu(LIMIT_S)
    question = msgspec.json.decode(sys.stdin.buffer.readline(), type=PageQuestion)
    source = decoded(sys.stdin.buffer.read(), question.charset)
    title, text = read_page(source) if question.is_html else ("", tidy_text(source))
    text = (article_of(source) if question.is_html else "") or text
    is_cut = len(text) > question.max_chars
    answer = PageAnswer(_clean(title), _clean(text[: question.max_chars]), is_cut)
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


def decoded(body: bytes, charset: str) -> str:
    """The text of a page, by its byte order mark, the charset of its headers, its <meta> or UTF-8. Bytes that do not
    fit become replacement characters."""
    named = _META.search(body[:2048])
    marked = next((name for mark, name in _MARKS if body.startswith(mark)), "")
    for name in (marked, charset, named[1].decode() if named else "", "utf-8"):
        try:
            return body.decode(name, "replace") if name else str(body, "utf-8")
        except (LookupError, ValueError):
            continue
    return ""


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main())
