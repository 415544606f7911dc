"""Moves lines that change with each request, which some coding agents put first, to the end of a system prompt. Pure.

A prefix cache reuses the longest beginning that two prompts share. Some agents begin their system prompt with a billing
line or with the date, so that two of their prompts share nothing. Such a line moves to the end of its message; no text
is lost. If the client marks cache positions itself, nothing is moved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from exo_mesh.api.core.request import Turn

MAX_LINES = 40
"""Only this many first lines of a system prompt are searched."""

MAX_START = 256
"""Only so many first characters of a line are searched. What takes no time in a line of an agent may take hours in a
line of a megabyte."""

_LINE = re.compile(
    r"\s*x-[a-z-]*billing-header\s*:|"
    r"[-*\s]*(?:today's date|the date today|(?:the )?current (?:date|time|date and time|datetime))\s*(?: is\b|:)",
    re.IGNORECASE,
)


def with_agent_lines_last(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same turns; if the first is a system prompt, with its changing lines moved to its end."""
    if not turns or turns[0].role not in ("system", "developer") or any(turn.has_cache_marks for turn in turns):
        return tuple(turns)
    lines = turns[0].text.split("\n", MAX_LINES)  # the last one is the rest of the text
    first = lines[:MAX_LINES]
    moved = [line for line in first if _LINE.match(line[:MAX_START])]
    if not moved:
        return tuple(turns)
    kept = [line for line in first if not _LINE.match(line[:MAX_START])]
    text = "\n".join([*kept, *lines[MAX_LINES:], *moved])
    return (replace(turns[0], text=text), *turns[1:])
