"""Keeps the last log records of this process in memory, so that they can be read without a shell on the machine."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

import msgspec

MAX_RECORDS = 500
MAX_CHARS = 1000
"""Longest text of a record; tracebacks are not kept."""


class LogLine(msgspec.Struct, frozen=True):
    """A log record. time: Unix seconds."""

    time: float
    level: str
    logger: str
    message: str

    def describe(self) -> dict[str, Any]:
        return {"time": round(self.time, 3), "level": self.level, "logger": self.logger, "message": self.message}


class LogRing:
    """Keeps the newest `most` records. Thread-safe."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self._lines: deque[LogLine] = deque(maxlen=most)

    def add(self, record: logging.LogRecord, fields: str = "") -> None:
        """Adds a record. fields: text of the fields that its caller passed with `extra=`."""
        text = f"{record.getMessage()}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__})"
        self._lines.append(LogLine(record.created, record.levelname.lower(), record.name, text[:MAX_CHARS]))

    def last(self, most: int) -> list[LogLine]:
        """The newest records, oldest first."""
        lines = list(self._lines)
        return lines[-most:] if most > 0 else []


RECENT: Final = LogRing()
"""The records of this process. It is global, as logging is."""
