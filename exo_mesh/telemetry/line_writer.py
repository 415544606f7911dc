"""Writes lines in a thread of its own: a slow, stuck or full place costs lines, never the time of who writes them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

MAX_QUEUED = 4096
"""Lines that wait for a slow place; more are lost, and counted."""
CLOSE_S = 0.5
TIDY_S = 3600.0
DAY_S = 86_400.0

_log = logging.getLogger(__name__)


class LineSink(Protocol):
    """Where lines go. Used by one thread only."""

    def write(self, data: bytes) -> None:
        """Add a line, which has its line end. May block. Raises OSError."""

    def tidy(self) -> None:
        """Called about once an hour without lines. Raises OSError."""

    def close(self) -> None:
        """Free what is open; a later line opens it again."""


class LineWriter:
    """Hands lines to a sink in order. The first line starts the thread. what: the name of the place, for people."""

    def __init__(self, sink: LineSink, what: str, max_queued: int = MAX_QUEUED) -> None:
        self._sink = sink
        self._what = what
        self._queue: queue.Queue[bytes | None] = queue.Queue(max_queued)
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._is_failing = False
        self._is_cut = False

    @property
    def lost(self) -> int:
        """Lines that could not be written, so far."""
        return self._lost

    @property
    def is_failing(self) -> bool:
        """Whether the last line was lost."""
        return self._is_failing

    def write(self, line: str) -> None:
        """Add a line; answers at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._what, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(f"{line}\n".encode("utf-8", "backslashreplace"))
        except queue.Full:
            self._lose("it is too slow")

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what is queued, for at most twice within_s. A line that comes later starts it again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=within_s)
            thread.join(within_s)

    def _work(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._sink.write(b"\n" + data if self._is_cut else data)
            except OSError as exc:
                self._is_cut = True
                self._lose(exc.strerror or str(exc))
            else:
                self._is_cut = False
                if self._is_failing and not self._queue.full():
                    self._is_failing = False
                    _log.info("%s is written again; %d lines are missing", self._what, self._lost)
        self._sink.close()

    def _next(self) -> bytes | None:
        """The next line; None at the end."""
        while True:
            try:
                return self._queue.get(timeout=TIDY_S)
            except queue.Empty:
                with contextlib.suppress(OSError):
                    self._sink.tidy()

    def _lose(self, why: str) -> None:
        """A line is not written. The first one of several is told, in the other places that logs go to."""
        self._lost += 1
        if not self._is_failing:
            self._is_failing = True
            _log.warning("%s cannot be written: %s; requests go on", self._what, why)


class StreamSink:
    """Standard output or standard error, by its file descriptor: no lock of Python's own streams is held meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def tidy(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """The streams of a process stay open."""


class RotatingFile:
    """A file of at most max_bytes, and old_files older ones: `log`, `log.1`, `log.2`, …

    max_age_days: older files are deleted, and none has lines of more than about a day; 0: age does not count. A file
    that somebody moves away or deletes is begun again. now: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        old_files: int,
        max_age_days: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._old_files = old_files
        self._max_age_days = max_age_days
        self._now = now
        self._fd = -1
        self._size = 0
        self._began = 0.0
        self._looked = 0.0

    def write(self, data: bytes) -> None:
        self._look()
        if self._fd < 0:
            self._open()
        if self._is_old or (self._size and self._size + len(data) > self._max_bytes):
            self._rotate()
            self._open()
        try:
            rest = memoryview(data)
            while rest:
                num_written = os.write(self._fd, rest)
                self._size += num_written
                rest = rest[num_written:]
        except OSError:
            self.close()
            raise

    def tidy(self) -> None:
        if self._is_old:
            self._rotate()
        self._delete_old()

    @property
    def _is_old(self) -> bool:
        return bool(self._max_age_days and self._size and self._now() - self._began >= DAY_S)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        found = os.fstat(self._fd)
        self._size = found.st_size
        self._began = found.st_mtime if found.st_size else self._now()
        self._delete_old()

    def _look(self) -> None:
        """Let go of a file that is not at its path any more. Asked once a second at most."""
        now = self._now()
        if self._fd < 0 or 0 <= now - self._looked < 1.0:
            return
        self._looked = now
        try:
            there = self.path.stat()
            here = os.fstat(self._fd)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                self.close()
        except OSError:
            self.close()

    def _rotate(self) -> None:
        """Move the file and the older ones on; the next line begins a new one. Raises OSError."""
        self.close()
        for number in range(self._old_files, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self.path
            if newer.exists():
                newer.replace(older)
        if not self._old_files:
            self.path.unlink(missing_ok=True)
        self._size = 0

    def _delete_old(self) -> None:
        """Delete files that are too many (the setting may have changed) or too old."""
        oldest = self._now() - self._max_age_days * DAY_S
        for path in self.path.parent.glob(f"{self.path.name}.*"):
            number = path.name.removeprefix(f"{self.path.name}.")
            if not number.isdigit():
                continue
            with contextlib.suppress(OSError):
                if int(number) > self._old_files or (self._max_age_days and path.stat().st_mtime < oldest):
                    path.unlink()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
