"""Decides which log lines are repetition. Knows no clock: `now` is the time of the record in hand, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 60.0
"""A message that comes again and again is shown once in this time."""
MAX_VARIANTS = 20
"""One place in the code shows at most so many different messages per window: a flood rarely repeats itself exactly."""
MAX_NEWS = 200
"""The same for what is no warning: peers that join, requests that end."""
MAX_SOURCES = 256
"""Places in the code that are remembered; when there are more, the one seen first is forgotten."""


@dataclass(frozen=True, slots=True)
class Folded:
    """`count` messages that were not shown: all equal to `message`, or, if not `exact`, others of the same kind."""

    message: str
    count: int
    exact: bool = True

    def __str__(self) -> str:
        what = "repeated" if self.exact else "and others of its kind"
        return f"{what} {self.count} times: {self.message}"


@dataclass(slots=True)
class _Source:
    since: float
    shown: int = 0
    hidden: int = 0
    last: str = ""


class Folder:
    """Per message: `finished` tells what was folded in windows that have ended, `shows` whether to show this one.

    max_shown: messages of one source and window. folds_repeats: of equal messages only the first is shown.
    """

    def __init__(self, max_shown: int = MAX_VARIANTS, *, folds_repeats: bool = True) -> None:
        self._max_shown = max_shown
        self._folds_repeats = folds_repeats
        self._sources: dict[str, tuple[_Source, dict[str, int]]] = {}

    def finished(self, now: float) -> list[Folded]:
        """What was folded in the windows that have ended by now; they begin anew."""
        over = [name for name, (source, _) in self._sources.items() if now - source.since >= WINDOW_S]
        found: list[Folded] = []
        for name in over:
            source, repeats = self._sources.pop(name)
            found += [Folded(message, count) for message, count in repeats.items() if count]
            if source.hidden:
                found.append(Folded(source.last, source.hidden, exact=False))
        return found

    def shows(self, source: str, message: str, now: float) -> bool:
        """Is this to be shown? `source` names the place in the code, whatever the values in the message."""
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
