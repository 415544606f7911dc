"""`python -m exo_mesh.api.webtools.pdf_child`: a process that reads the text of one PDF, and ends.

Standard input has the bytes of the PDF. Standard output gets a PdfAnswer. The system limits its memory and CPU time,
because a PDF may be written to exhaust a parser.
"""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from exo_mesh.base.process_limits import limit_cpu, limit_process

if TYPE_CHECKING:
    from pypdf import PdfReader

MAX_MEMORY_BYTES = 512 << 20
LIMIT_S = 10.0
MAX_CHARS = 1_000_000
"""Most characters of the text; the rest of the pages is not read."""
MAX_PAGES = 2_000
SOFT_LIMIT_S = 8.0
"""After so much CPU time the rest of the pages is left out, so that the text so far is not lost."""


class PdfAnswer(msgspec.Struct):
    """text: of the pages, with a blank line between two. is_cut: pages or characters were left out. error: why there is
    no text: "missing" if the library is not installed, "locked" if the PDF needs a password, else "broken"."""

    text: str = ""
    num_pages: int = 0
    is_cut: bool = False
    error: str = ""


def main() -> int:
    """Answer the question on standard input."""
    limit_process(MAX_MEMORY_BYTES)
    limit_cpu(LIMIT_S)
    sys.stdout.buffer.write(msgspec.json.encode(read_pdf(sys.stdin.buffer.read())))
    return 0


def read_pdf(body: bytes) -> PdfAnswer:
    """The text of a PDF."""
    try:
        from pypdf import PdfReader
    except ImportError:
        return PdfAnswer(error="missing")
    try:
        reader = PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            return PdfAnswer(error="locked")
        return _text_of(reader)
    except Exception:  # noqa: BLE001 - whatever the library makes of a hostile file
        return PdfAnswer(error="broken")


def _text_of(reader: PdfReader) -> PdfAnswer:
    parts: list[str] = []
    num_pages, num_chars = len(reader.pages), 0
    for number, page in enumerate(reader.pages):
        if number >= MAX_PAGES or num_chars > MAX_CHARS or time.process_time() > SOFT_LIMIT_S:
            return PdfAnswer(_clean(parts), num_pages, is_cut=True)
        parts.append((page.extract_text() or "").strip())
        num_chars += len(parts[-1])
    return PdfAnswer(_clean(parts), num_pages, is_cut=num_chars > MAX_CHARS)


def _clean(parts: list[str]) -> str:
    text = "\n\n".join(part for part in parts if part)[:MAX_CHARS]
    return text.encode("utf-8", "replace").decode().replace("\0", "")


if __name__ == "__main__":
    sys.exit(main())
