"""The last log records of this process, kept in memory, so that people can read them without a shell on the machine."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

MAX_RECORDS = 500
MAX_CHARS = 1000
"""Of one record; a traceback is not kept."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """time: Unix time."""

    time: float
    level: str
    logger: str
    message: str

    def describe(self) -> dict[str, Any]:
        return {"time": round(self.time, 3), "level": self.level, "logger": self.logger, "message": self.message}


class LogRing:
    """Holds at most `most` records; the oldest make room. Threads may add records while others read."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self._lines: deque[LogLine] = deque(maxlen=most)

    def add(self, record: logging.LogRecord, fields: str = "") -> None:
        """Keep a record. fields: what its caller added with `extra=`."""
        text = f"{record.getMessage()}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__})"
        self._lines.append(LogLine(record.created, record.levelname.lower(), record.name, text[:MAX_CHARS]))

    def last(self, most: int) -> list[LogLine]:
        """The newest records, oldest first."""
        lines = list(self._lines)
        return lines[-most:] if most > 0 else []


RECENT: Final = LogRing()
"""What this process has logged. Logging is set up once for a process, and so is this."""
