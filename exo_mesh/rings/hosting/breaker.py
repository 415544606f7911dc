"""Stops restarting runners that crash in a loop: after a few crashes in a row this node refuses new ones for a while.
Pure."""

from __future__ import annotations

from collections import deque

import msgspec

CRASHES = 3
WINDOW_S = 60.0
"""CRASHES crashes within this time are a loop."""

OPEN_S = 60.0
MOST_OPEN_S = 600.0
"""The first refusal lasts OPEN_S; a crash at the first try after it doubles that, up to ten minutes."""

MAX_KEYS = 256

Key = tuple[str, str]
"""(model digest, engine). Each node has its own breaker."""


class _Record(msgspec.Struct):
    crashes: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=CRASHES))
    open_until: float = float("-inf")
    open_s: float = 0.0
    model: str = ""
    cause: str = ""


class Loop(msgspec.Struct, frozen=True):
    """A model and engine that are refused now. left_s: seconds until the refusal ends."""

    model: str
    engine: str
    cause: str
    left_s: float

    def __str__(self) -> str:
        return (
            f"the runner of {self.model} with {self.engine} crashed {CRASHES} times within {WINDOW_S:.0f} s; "
            f"it is tried again in {max(1.0, self.left_s):.0f} s; the last cause: {self.cause}"
        )


class Breaker:
    """A circuit breaker per model and engine. Closed: runners may start. Open, after CRASHES within WINDOW_S: none may.
    When the time has passed, one may try; if it crashes within WINDOW_S the breaker opens again, for twice as long."""

    def __init__(self) -> None:
        self._records: dict[Key, _Record] = {}

    def crashed(self, key: Key, model: str, cause: str, now: float) -> bool:
        """Count a crash; returns True if it opens the breaker."""
        record = self._records.setdefault(key, _Record())
        record.model, record.cause = model, cause
        record.crashes.append(now)
        while len(self._records) > MAX_KEYS:
            del self._records[next(iter(self._records))]
        on_trial = record.open_s > 0 and now - record.open_until <= WINDOW_S
        in_a_row = len(record.crashes) == CRASHES and now - record.crashes[0] <= WINDOW_S
        if now < record.open_until or not (in_a_row or on_trial):
            return False
        record.open_s = min(MOST_OPEN_S, 2 * record.open_s) if on_trial else OPEN_S
        record.open_until = now + record.open_s
        return True

    def loop(self, key: Key, now: float) -> Loop | None:
        """The loop that keeps a runner from starting now, or None."""
        record = self._records.get(key)
        if record is None or now >= record.open_until:
            return None
        return Loop(record.model, key[1], record.cause, record.open_until - now)

    def loops(self, now: float) -> list[Loop]:
        return [loop for key in self._records if (loop := self.loop(key, now)) is not None]

    def recent(self, now: float) -> int:
        """Crashes within the last WINDOW_S."""
        return sum(1 for record in self._records.values() for at in record.crashes if now - at <= WINDOW_S)
