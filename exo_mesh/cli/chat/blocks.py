"""Where a markdown text that still grows can be cut: what stands before the cut does not change any more. Pure."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def finished_length(text: str) -> int:
    """How many characters of a growing text are whole blocks: everything before the last block that has begun.

    A block ends at a blank line when a line follows that is not indented, so that a list with paragraphs in its items
    stays in one piece; a fenced block ends with its fence.
    """
    finished = position = 0
    fence = ""
    after_blank = False
    for line in text.splitlines(keepends=True):
        is_whole = line.endswith("\n")
        if fence:
            if is_whole and _closes(line, fence):
                fence, finished = "", position + len(line)
        elif not line.strip():
            after_blank = True
        else:
            if after_blank and not line[0].isspace():
                finished = position
            after_blank = False
            if opened := _FENCE.match(line):
                fence = opened[1]
                finished = max(finished, position) if not line[0].isspace() else finished
        position += len(line)
    return finished


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}
