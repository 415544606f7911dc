"""Reads text that arrives in pieces; the result does not depend on where the pieces were cut. Pure.

The readers of a format are generators: they `yield` when they need more text, and continue when it has arrived. Every
method here with the type `More` is such a generator, and returns only when its result is certain. So the code of a
format reads as if all of the text were there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
More = Generator[None, None, T]
"""A reader that returns T, and yields whenever it needs more text."""

_SPACE = re.compile(r"\s+")

MIN_CUT_MARKER = 3
"""An answer that ends with at least this many characters of a marker was cut inside the marker; fewer characters occur
at the end of ordinary text."""


class Malformed(Exception):
    """The text breaks its format. The parser catches this and treats the text as text of the answer."""


class Markers:
    """A set of marker strings to search for in a text."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._prefixes = {marker[:length] for marker in self._markers for length in range(1, len(marker))}
        self._first = "".join({marker[0] for marker in self._markers})
        self._longest = max(map(len, self._markers), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Find the first marker; of several that begin at the same place, the longest."""
        return self._pattern.search(text, start)

    def unfinished(self, text: str, start: int) -> int:
        """The start of the longest suffix that could still become a marker; the length of the text if there is none."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._prefixes:
                return at
        return len(text)


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """The `Markers` of these strings; cached, because every answer searches for the same ones."""
    return Markers(texts)


class Reader:
    """Reads the text of one answer. `position` counts the characters that were read."""

    def __init__(self) -> None:
        self.position = 0
        self.ended = False
        self._was_cut = False
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None

    @property
    def num_held(self) -> int:
        """Characters that have arrived and are not read yet."""
        return len(self._text) - self._at

    def push(self, text: str) -> None:
        """Add text that has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, was_cut: bool) -> None:
        """Mark the end of the text. was_cut: the answer was cut at its token limit, possibly inside a marker."""
        self.ended = True
        self._was_cut = was_cut

    def record(self) -> None:
        """Start to record the text that is read, so that it can still become text of the answer."""
        self._recorded = []

    def recorded(self) -> str | None:
        """Stop recording and return the text that was read since `record`; None if nothing is recorded."""
        text = None if self._recorded is None else "".join(self._recorded)
        self._recorded = None
        return text

    def peek(self) -> More[str]:
        """The next character, without reading it; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the pattern against the text that has arrived and is not read yet. Reads nothing and does not wait."""
        return pattern.match(self._text, self._at)

    def take(self, count: int) -> str:
        """Read up to `count` characters that have arrived."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self.position += len(text)
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def unread(self, text: str) -> None:
        """Put back text that was just read, while nothing is recorded."""
        self._text = text + self._text[self._at :]
        self._at = 0
        self.position -= len(text)

    def space(self) -> More[str]:
        """Read white space. Returns the next character, without reading it; "" at the end."""
        while True:
            following = yield from self.peek()
            found = self.match(_SPACE)
            if not following or found is None:
                return following
            self.take(found.end() - found.start())

    def accept(self, text: str) -> More[bool]:
        """Read this text if it comes next; else read nothing. Returns whether it was read."""
        while len(self._text) - self._at < len(text) and not self.ended:
            if not text.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(text, self._at):
            return False
        self.take(len(text))
        return True

    def expect(self, text: str) -> More[None]:
        """Read this text, which must come next. Raises Malformed."""
        if not (yield from self.accept(text)):
            raise Malformed

    def until(self, markers: Markers, sink: Callable[[str], None]) -> More[str]:
        """Read up to and including the first marker. The text before it goes to sink as it arrives.

        Returns the marker, or "" at the end of the text. A marker that is cut by the end is dropped.
        """
        while True:
            found = markers.find(self._text, self._at)
            unfinished = markers.unfinished(self._text, self._at)
            # a marker is certain only if no other one can still begin at or before its place
            if found is not None and (self.ended or found.start() < unfinished):
                if found.start() > self._at:
                    sink(self.take(found.start() - self._at))
                return self.take(found.end() - found.start())
            if self.ended:
                is_cut = self._was_cut or len(self._text) - unfinished >= MIN_CUT_MARKER
                if (stop := unfinished if is_cut else len(self._text)) > self._at:
                    sink(self.take(stop - self._at))
                self.take(len(self._text))
                return ""
            if unfinished > self._at:
                sink(self.take(unfinished - self._at))
            yield

    def text_until(self, markers: Markers) -> More[str]:
        """Read up to and including the first marker; return the text before it. Raises Malformed without a marker."""
        parts: list[str] = []
        if not (yield from self.until(markers, parts.append)):
            raise Malformed
        return "".join(parts)
