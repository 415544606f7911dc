"""`python -m exo_mesh.api.webtools.search_child`: a process that asks search engines by ddgs, and ends.

Standard input has a SearchQuestion as JSON, standard output gets a SearchAnswer. ddgs reads the engines' pages, which
are untrusted, so the system limits the memory and CPU time of this process.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from exo_mesh.base.process_limits import limit_cpu, limit_process

MAX_MEMORY_BYTES = 1 << 30
"""Of address space: each of the library's threads reserves some."""
LIMIT_S = 5.0
CALL_S = 8


class SearchQuestion(msgspec.Struct):
    """A search. top_k: most results."""

    query: str
    top_k: int


class SearchAnswer(msgspec.Struct):
    """rows: as ddgs gives them, with title, href and body. error: the class of the library's error, or "missing" if it
    is not installed."""

    rows: list[dict[str, str]] = []
    error: str = ""


def main() -> int:
    """Answer the question on standard input."""
    limit_process(MAX_MEMORY_BYTES, allows_threads=True)
    limit_cpu(LIMIT_S)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(searched(question)))
    return 0


def searched(question: SearchQuestion) -> SearchAnswer:
    """What ddgs finds. The message of an error may contain the query, so only its class is passed on."""
    try:
        from ddgs import DDGS
    except ImportError:
        return SearchAnswer(error="missing")
    try:
        found: list[dict[str, Any]] = DDGS(timeout=CALL_S).text(question.query, max_results=question.top_k)
    except Exception as exc:  # noqa: BLE001 - whatever a search engine answers
        return SearchAnswer(error=type(exc).__name__)
    return SearchAnswer([{name: str(value) for name, value in row.items()} for row in found])


if __name__ == "__main__":
    sys.exit(main())
