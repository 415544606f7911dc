"""The log of a node, whose format and level can change while it runs."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from exo_mesh.base.telemetry.line_writer import LineWriter, RotatingFile, StreamSink
from exo_mesh.base.telemetry.logs import ConsoleFormatter, JsonFormatter, Output, install, set_level

STDOUT, STDERR = 1, 2
"""File descriptors, used directly because `sys.stdout` and `sys.stderr` may be replaced, such as in tests."""

CONSOLE, JSON, BOTH = "console", "json", "both"
"""Formats of the log: text on standard error, JSON on standard output, or both."""

_log = logging.getLogger(__name__)


class LogDesk(Protocol):
    """Shows and changes the log of a node while it runs."""

    def describe(self) -> dict[str, Any]:
        """The state of the log; see NodeLogs.describe."""

    def set_own(self, level: str | None) -> None:
        """Sets a level until the process ends; see NodeLogs.set_own."""


class LoneLogs:
    """Stores a level without effect, for a process whose logging is not ours, and for tests."""

    def __init__(self) -> None:
        self._own: str | None = None

    def describe(self) -> dict[str, Any]:
        return {"level": self._own or "info", "own_level": self._own, "format": "", "file": "", "lost_lines": {}}

    def set_own(self, level: str | None) -> None:
        self._own = level


class _LineFile(io.StringIO):
    """A text file that passes each complete line to a function."""

    def __init__(self, write_line: Callable[[str], object]) -> None:
        super().__init__()
        self._write_line = write_line
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)


class NodeLogs:
    """Takes over the logging of this process. `follow` applies changed settings, `set_own` the wish of an operator.

    Each destination has its own thread, so a full disk or a stuck reader loses lines and has no other effect. file:
    also gets all lines, as JSON in every format.
    """

    def __init__(self, log_format: str, level: str, file: RotatingFile | None = None) -> None:
        self._format = log_format
        self._level = level
        self._own_level: str | None = None
        self._path: Path | None = None if file is None else file.path
        self._changing = threading.Lock()
        self._stderr = LineWriter(StreamSink(STDERR), "standard error")
        self._stdout = LineWriter(StreamSink(STDOUT), "standard output")
        self._file = None if file is None else LineWriter(file, f"the log file {file.path}")
        self._handler = install(self._outputs(), level, self.close)

    def follow(self, log_format: str, level: str) -> None:
        """Applies the values of the settings in force."""
        with self._changing:
            was = self._format, self.level
            self._format, self._level = log_format, level
            self._apply(was)

    def set_own(self, level: str | None) -> None:
        """Overrides the level of the settings until the process ends; None: use the settings again."""
        with self._changing:
            was = self._format, self.level
            self._own_level = level
            self._apply(was)

    @property
    def level(self) -> str:
        """The level in force."""
        return self._own_level or self._level

    def event(self, line: str) -> None:
        """Writes an event line to standard output, in order with the log lines."""
        self._stdout.write(line)

    def text_file(self) -> IO[str]:
        """A file whose lines go to standard error, in order with the log lines."""
        return _LineFile(self._stderr.write)

    def describe(self) -> dict[str, Any]:
        """The state of the log: level, format, file and lost lines."""
        writers = {"stdout": self._stdout, "stderr": self._stderr, "file": self._file}
        return {
            "level": self.level,
            "own_level": self._own_level,
            "format": self._format,
            "file": "" if self._path is None else str(self._path),
            "lost_lines": {name: writer.lost for name, writer in writers.items() if writer is not None},
        }

    def close(self) -> None:
        """Writes the queued lines within a time limit; see LineWriter.close."""
        for writer in (self._stderr, self._stdout, self._file):
            if writer is not None:
                writer.close()

    def _apply(self, was: tuple[str, str]) -> None:
        set_level(self.level)
        self._handler.outputs = self._outputs()
        if was != (self._format, self.level):
            _log.info("changed the log to level %s, format %s", self.level, self._format)

    def _outputs(self) -> tuple[Output, ...]:
        found = []
        if self._format != JSON:
            found.append(Output(ConsoleFormatter(), self._stderr.write))
        if self._format != CONSOLE:
            found.append(Output(JsonFormatter(), self._stdout.write))
        if self._file is not None:
            found.append(Output(JsonFormatter(), self._file.write))
        return tuple(found)
