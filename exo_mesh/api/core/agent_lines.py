"""Lines that change with each request of a coding agent and that agents put first: moved behind the rest. Pure.

A cache of prompts finds the longest beginning that two prompts share. Some agents begin their system prompt with a
billing line or with the date, so that two of their prompts share nothing. Such a line goes to the end of the message it
is in; not a word is lost. Where the client marks cache positions itself, every character stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from exo_mesh.api.core.request import Turn

MAX_LINES = 40
"""How far into a system prompt such lines are looked for."""

_LINE = re.compile(
    r"\s*(?:x-[a-z-]*billing-header\s*:.*|"
    r"[-*\s]*(?:today's date|the date today|(?:the )?current (?:date|time|date and time|datetime))\s*(?: is\b|:).*)",
    re.IGNORECASE,
)


def with_agent_lines_last(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same turns, with such lines of the first one at its end, if it is the system's."""
    if not turns or turns[0].role not in ("system", "developer") or any(turn.has_cache_marks for turn in turns):
        return tuple(turns)
    lines = turns[0].text.split("\n")
    moved = [line for line in lines[:MAX_LINES] if _LINE.fullmatch(line)]
    if not moved:
        return tuple(turns)
    kept = [line for line in lines[:MAX_LINES] if not _LINE.fullmatch(line)]
    text = "\n".join([*kept, *lines[MAX_LINES:], *moved])
    return (replace(turns[0], text=text), *turns[1:])
