"""Records the last phases of each runner on this node with their times, also after it has ended. No text, no tokens."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from exo_mesh.domain.runner.heartbeat import Heartbeat

MAX_ENTRIES = 128
"""Entries of one runner; the oldest are dropped first."""

MAX_RUNNERS = 32
"""Most remembered runners; the earliest ended ones are dropped first."""

MAX_DETAIL = 300
"""Characters: the last message of a library may be long."""

Value = str | int | float


class FlightEntry(msgspec.Struct):
    """One phase or event of a runner. at, until: Unix seconds; a phase that lasts is one entry. count: how often it was
    noted."""

    at: float
    phase: str
    detail: str = ""
    attrs: dict[str, Value] = msgspec.field(default_factory=dict)
    until: float = 0.0
    count: int = 1

    def describe(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 3),
            "until": round(max(self.at, self.until), 3),
            "phase": self.phase,
            "detail": self.detail,
            "count": self.count,
            "attrs": self.attrs,
        }


class FlightLog:
    """The log of one runner."""

    def __init__(self, label: str, now: Callable[[], float] = time.time) -> None:
        self.label = label
        self.pid = 0
        self.ended = False
        self._now = now
        self._entries: deque[FlightEntry] = deque(maxlen=MAX_ENTRIES)
        self._before = Heartbeat()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, phase: str, detail: str = "", **attrs: Value) -> None:
        """Record that a phase begins, or that something has happened."""
        self._entries.append(FlightEntry(self._now(), phase, detail[:MAX_DETAIL], attrs))

    def goes_on(self, phase: str, **attrs: Value) -> None:
        """Extend the last entry with newer figures if it is of the same phase; otherwise begin a new entry."""
        last = self._entries[-1] if self._entries else None
        if last is None or last.phase != phase:
            self._entries.append(FlightEntry(self._now(), phase, attrs=attrs))
        else:
            last.until, last.attrs = self._now(), attrs
            last.count += 1

    def beat(self, beat: Heartbeat) -> None:
        """Record the runner's work since the last heartbeat: prefill, decode or idle; a phase that lasts stays one
        entry."""
        prefill = beat.prefill_frames - self._before.prefill_frames
        decode = beat.decode_frames - self._before.decode_frames
        self._before = beat
        kinds = []
        if prefill or (beat.computing_tokens and beat.computing_prefill):
            kinds.append("prefill")
        if decode or (beat.computing_tokens and not beat.computing_prefill):
            kinds.append("decode")
        kind = " and ".join(kinds) or "idle"
        self.goes_on(
            kind,
            frames=beat.prefill_frames + beat.decode_frames,
            sequences=beat.sequences,
            memory_bytes=beat.memory_bytes,
        )

    def describe(self) -> list[dict[str, Any]]:
        """The entries, oldest first."""
        return [entry.describe() for entry in self._entries]


class FlightRecorder:
    """The logs of the runners on this node, and of the last ones that have ended."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._logs: OrderedDict[int, FlightLog] = OrderedDict()
        self._count = 0

    def open(self, label: str) -> FlightLog:
        """Begin the log of a runner that is about to start. The oldest ended runner makes room."""
        self._count += 1
        log = self._logs[self._count] = FlightLog(label, self._now)
        for number in [number for number, one in self._logs.items() if one.ended]:
            if len(self._logs) <= MAX_RUNNERS:
                break
            del self._logs[number]
        return log

    @property
    def logs(self) -> list[FlightLog]:
        """All logs, in the order of their starts."""
        return list(self._logs.values())
