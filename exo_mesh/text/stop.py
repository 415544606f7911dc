"""Stop strings in a stream of text: what may be sent on, and where the text ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream before the first stop string that completes in it.

    "First" is by the character that completes it; of those that complete together, the longest. So the result does
    not depend on how the text was cut into pieces. The longest suffix that could still become a stop string is held.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("an empty stop string")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is now safe to send. After `stopped` is set there is none any more."""
        if self.stopped:
            return ""
        pending = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return pending[: min(matches)[1]]
        safe = len(pending) - max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """The stream is over: what was held is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
