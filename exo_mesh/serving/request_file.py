"""The request log: one line of JSON for each request that entered here, in a file that is bounded. No text, no ids of
tokens. A file that cannot be written costs lines, never a request."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MAX_BYTES = 10 * 2**20
"""Of one file: about 25,000 requests."""
OLD_FILES = 4
MAX_QUEUED = 1024
"""Lines that wait for a slow disk; more are lost, and counted."""
CLOSE_S = 1.0
NONE = "none"

_log = logging.getLogger(__name__)


def request_file(setting: str, home: Path) -> RequestFile | None:
    """The file that the setting names, below the home unless it is absolute; None for "none"."""
    return None if setting.strip().lower() == NONE else RequestFile(home / Path(setting).expanduser())


class RequestFile:
    """Written by a thread of its own, which the first line starts: a disk may take its time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, old_files: int = OLD_FILES) -> None:
        self._lines = _Lines(path, max_bytes, old_files)
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Lines that could not be written, so far."""
        return self._lines.lost

    def write(self, fields: Mapping[str, Any]) -> None:
        """Add a line; answers at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="request log", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(json.dumps(fields))
        except queue.Full:
            self._lines.lose("the disk is too slow")

    def close(self) -> None:
        """Write what is queued, for at most twice CLOSE_S. A line that comes later opens the file again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_S)
            thread.join(CLOSE_S)

    def _work(self) -> None:
        while (line := self._queue.get()) is not None:
            self._lines.emit(logging.LogRecord("", logging.INFO, "", 0, line, None, None))
        self._lines.close()


class _Lines(RotatingFileHandler):
    """Tells of the first line that is lost and of the first that is written again, not of each."""

    def __init__(self, path: Path, max_bytes: int, old_files: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=old_files, encoding="utf-8", delay=True)
        self.lost = 0
        self._failing = False

    def emit(self, record: logging.LogRecord) -> None:
        was_failing, lost = self._failing, self.lost
        if was_failing:
            record.msg = "\n" + record.msg  # the last one may have been cut off
        super().emit(record)
        if was_failing and self.lost == lost:
            self._failing = False
            _log.info("the request log is written again; %d lines are missing", self.lost)

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        self.lose(getattr(error, "strerror", None) or str(error))
        stream, self.stream = self.stream, None
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()

    def lose(self, why: str) -> None:
        """A line is not written."""
        self.lost += 1
        if not self._failing:
            _log.warning("the request log %s cannot be written: %s; requests go on", self.baseFilename, why)
        self._failing = True
