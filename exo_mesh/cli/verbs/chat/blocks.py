"""Finds where a growing markdown text can be cut: later text does not change how the part before it looks. Pure."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def finished_length(text: str) -> int:
    """The number of characters of a growing text that are complete blocks: all before the last block that has begun.

    A block ends at a blank line if the next line is not indented, so that a list with paragraphs in its items stays in
    one piece; a fenced block ends with its closing fence.
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
