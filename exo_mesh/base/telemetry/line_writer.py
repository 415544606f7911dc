"""Writes lines in a separate thread, so that a slow, stuck or full destination loses lines but never blocks callers."""

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

from exo_mesh.base.printable import counted

MAX_QUEUED = 4096
"""Most lines that wait for a slow destination; further ones are dropped and counted."""
CLOSE_S = 0.5
TIDY_S = 3600.0
DAY_S = 86_400.0

_log = logging.getLogger(__name__)


class LineSink(Protocol):
    """The destination of lines. Used by one thread only."""

    def write(self, data: bytes) -> None:
        """Writes a line that includes its line end. May block. Raises OSError."""

    def tidy(self) -> None:
        """Called about once an hour without lines. Raises OSError."""

    def close(self) -> None:
        """Closes the destination; a later line opens it again."""


class LineWriter:
    """Passes lines to a sink in order. The first line starts the thread. what: the sink's name, for people."""

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
        """The number of lines lost so far."""
        return self._lost

    @property
    def is_failing(self) -> bool:
        """Whether the last line was lost."""
        return self._is_failing

    def write(self, line: str) -> None:
        """Queues a line and returns at once; drops it if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._what, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(f"{line}\n".encode("utf-8", "backslashreplace"))
        except queue.Full:
            self._lose("the destination is too slow")

    def close(self, within_s: float = CLOSE_S) -> None:
        """Writes the queued lines, for at most twice within_s. A later line starts the thread again."""
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
                    _log.info("writing to %s works again after the loss of %s", self._what, counted(self._lost, "line"))
        self._sink.close()

    def _next(self) -> bytes | None:
        """Waits for the next line; None at the end."""
        while True:
            try:
                return self._queue.get(timeout=TIDY_S)
            except queue.Empty:
                with contextlib.suppress(OSError):
                    self._sink.tidy()

    def _lose(self, why: str) -> None:
        """Counts a lost line. Logs the first of a series, which the other destinations of the log show."""
        self._lost += 1
        if not self._is_failing:
            self._is_failing = True
            _log.warning("cannot write to %s: %s; lines are lost, requests continue", self._what, why)


class StreamSink:
    """Writes to the file descriptor of standard output or error, without holding a lock of Python's own streams."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def tidy(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Does nothing: the streams of a process stay open."""


class RotatingFile:
    """A log file of at most max_bytes, and up to old_files older ones: `log`, `log.1`, `log.2`, …

    max_age_days: older files are deleted, and a new file is begun about once a day; 0: no limit. If the file is moved
    away or deleted, a new one is begun. now: Unix seconds.
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
        """Closes the file if it is no longer at its path. Checks at most once a second."""
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
        """Renames the file and the older ones to the next number; the next line begins a new file. Raises OSError."""
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
        """Deletes surplus files (the setting may have changed) and files that are too old."""
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
