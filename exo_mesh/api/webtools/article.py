"""Finds the text of a page with trafilatura, which the extra `web` installs. It runs in the child process only."""

from __future__ import annotations

from exo_mesh.api.webtools.page_text import tidy_text

LEAST_CHARS = 200
"""With less text than this, our own reader's counts: trafilatura looks for articles."""


def article_of(source: str) -> str:
    """The article of an HTML page, with headings (`#`), list items (`-`) and tables; "" if there is none, or if
    trafilatura is not installed or fails."""
    try:
        import trafilatura

        text = trafilatura.extract(source, output_format="markdown", include_comments=False, include_tables=True)
    except Exception:  # noqa: BLE001 - a library that parses whatever strangers write; our own reader is left
        return ""
    tidy = tidy_text(text or "")
    return tidy if len(tidy) >= LEAST_CHARS else ""
