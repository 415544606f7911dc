"""Decides which log lines are repetitions. Knows no clock: `now` is the time of the current record, in seconds."""

from __future__ import annotations

import msgspec

WINDOW_S = 60.0
"""A repeated message is shown once in this time."""
MAX_VARIANTS = 20
"""Most different messages that one place in the code shows per window: messages of a flood often differ a little."""
MAX_NEWS = 200
"""The same limit for info messages, such as peers that join and requests that end."""
MAX_SOURCES = 256
"""Most places in the code that are remembered; at the bound, the place seen first is dropped for a new one."""


class Folded(msgspec.Struct, frozen=True):
    """A summary of `count` messages that were not shown: equal to `message`, or if not `exact`, of the same kind."""

    message: str
    count: int
    exact: bool = True

    def __str__(self) -> str:
        what = "repeated" if self.exact else "and similar messages,"
        return f"{what} {self.count} times: {self.message}"


class _Source(msgspec.Struct):
    since: float
    shown: int = 0
    hidden: int = 0
    last: str = ""


class Folder:
    """Folds repetitions of log messages. Call `finished` for summaries of ended windows, and `shows` for each message.

    max_shown: most messages per source and window. folds_repeats: show only the first of equal messages.
    """

    def __init__(self, max_shown: int = MAX_VARIANTS, *, folds_repeats: bool = True) -> None:
        self._max_shown = max_shown
        self._folds_repeats = folds_repeats
        self._sources: dict[str, tuple[_Source, dict[str, int]]] = {}

    def finished(self, now: float) -> list[Folded]:
        """Summaries of the messages folded in windows that have ended; these windows start again."""
        over = [name for name, (source, _) in self._sources.items() if now - source.since >= WINDOW_S]
        found: list[Folded] = []
        for name in over:
            source, repeats = self._sources.pop(name)
            found += [Folded(message, count) for message, count in repeats.items() if count]
            if source.hidden:
                found.append(Folded(source.last, source.hidden, exact=False))
        return found

    def shows(self, source: str, message: str, now: float) -> bool:
        """Whether to show this message. source: the place in the code, independent of the values in the message."""
        if source not in self._sources:
            if len(self._sources) >= MAX_SOURCES:
                self._sources.pop(next(iter(self._sources)))
            self._sources[source] = (_Source(now), {})
        window, repeats = self._sources[source]
        if self._folds_repeats and message in repeats:
            repeats[message] += 1
            return False
        if window.shown >= self._max_shown:
            window.hidden += 1
            window.last = message
            return False
        window.shown += 1
        if self._folds_repeats:
            repeats[message] = 0
        return True
