"""Finds stop strings in a stream of text, and holds back text that may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string in it.

    The first stop string is the one whose last character comes first; if several end there, the longest. So the result
    does not depend on how the text was cut into pieces. The longest suffix that could still become a stop string is
    held back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("an empty stop string")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        self.matched = ""
        """The stop string that was found; "" as long as there is none."""

    def push(self, text: str) -> str:
        """Take more text and return the text that is now safe to send; always "" once `stopped` is set."""
        if self.stopped:
            return ""
        pending = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if matches:
            _, at, self.matched = min(matches)
            self.stopped = True
            self._held = ""
            return pending[:at]
        safe = len(pending) - max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """End the stream and return the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
