"""Sets up logging. Log records never contain prompts or output, as text or as token ids."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

import msgspec

from exo_mesh.base.printable import escaped, escaped_json
from exo_mesh.base.telemetry.log_folding import MAX_NEWS, Folder
from exo_mesh.base.telemetry.log_ring import RECENT, LogRing

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""The x-request-id of the HTTP request in progress; "" outside of requests."""

current_trace: ContextVar[str] = ContextVar("current_trace", default="")
"""The trace id of that request; "" if it is not traced."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_EXPECTED = ("DecodeError", "ExecuteBatchError")
"""Names of exceptions; their classes are private to gRPC, or in a library that is not imported here."""

_CHATTY = ("asyncio", "aiohttp.access", "grpc", "zeroconf")


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """The fields that the caller passed with `extra=`, such as request_id."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line: time, level, logger, message, extra fields, and the traceback if there is one.

    JSON escapes the control characters below U+0020, and `escaped_json` escapes the others.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escaped_json(json.dumps(line, default=str, ensure_ascii=False))


class ConsoleFormatter(logging.Formatter):
    """Formats a record for people: `12:00:01 message key=value`, with the level if not info, the logger if debug.

    Each record is one line, whatever its message contains; the lines of a traceback follow, indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        source = f" {record.name.removeprefix('exo_mesh.')}" if record.levelno <= logging.DEBUG else ""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}{source}:"
        fields = "".join(f" {key}={value}" for key, value in extra_fields(record).items())
        line = escaped(f"{when}{level} {record.getMessage()}{fields}")
        if not record.exc_info:
            return line
        traceback_lines = escaped(self.formatException(record.exc_info), keep_newlines=True)
        return f"{line}\n{textwrap.indent(traceback_lines, '    ')}"


def add_request_id(record: logging.LogRecord) -> bool:
    """A logging filter that adds the ids of the current request and trace to a record, unless its caller set them."""
    if (trace_id := current_trace.get()) and not hasattr(record, "trace_id"):
        record.trace_id = trace_id
    if (request_id := current_request.get()) and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


class Output(msgspec.Struct, frozen=True):
    """A destination of log lines. write: takes a line without its line end."""

    formatter: logging.Formatter
    write: Callable[[str], object]


class FoldingHandler(logging.Handler):
    """Writes log lines, and folds repetitions.

    An equal warning or error is written once a minute, followed by the number of repetitions. Info lines may repeat up
    to MAX_NEWS times a minute per place in the code. A count is written together with the next line of any kind, and at
    the end. `ring` keeps all written records. outputs: may be replaced at any time. on_close: called after the last
    line.
    """

    def __init__(
        self, outputs: Sequence[Output], ring: LogRing = RECENT, on_close: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        self._on_close = on_close
        self._ring = ring
        self._folder = Folder()
        self._news_folder = Folder(MAX_NEWS, folds_repeats=False)

    def emit(self, record: logging.LogRecord) -> None:
        self._report_folded(record.created)
        source = f"{record.name}:{record.msg}"
        folder = self._news_folder if record.levelno == logging.INFO else self._folder
        if record.levelno < logging.INFO or folder.shows(source, record.getMessage(), record.created):
            self._show(record)

    def close(self) -> None:
        self._report_folded(float("inf"))
        self._on_close()
        super().close()

    def _report_folded(self, now: float) -> None:
        for level, folder in ((logging.WARNING, self._folder), (logging.INFO, self._news_folder)):
            for folded in folder.finished(now):
                self._show(logging.LogRecord(__name__, level, __file__, 0, "%s", (folded,), None))

    def _show(self, record: logging.LogRecord) -> None:
        for output in self.outputs:
            try:
                output.write(output.formatter.format(record))
            except Exception:  # noqa: BLE001 - like the standard handlers: a failure to log must not disturb the caller
                self.handleError(record)
        self._ring.add(record, "".join(f" {key}={value}" for key, value in extra_fields(record).items()))


def quiet_libraries() -> None:
    """Keeps gRPC from writing to the screen and from logging invalid messages. Call before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # "ERROR" still logs a taken port, for which we try another
    for name in ("grpc._cython.cygrpc", "grpc._common"):
        logging.getLogger(name).addFilter(_is_worth_logging)
    traceback.print_exc = _print_exc  # gRPC prints some tracebacks directly
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


_really_print_exc = traceback.print_exc


def _print_exc(*args: Any, **kwargs: Any) -> None:
    """traceback.print_exc without the errors that `_is_worth_logging` leaves out."""
    if not _is_expected(sys.exception()):
        _really_print_exc(*args, **kwargs)


def _is_expected(error: BaseException | None) -> bool:
    return isinstance(error, asyncio.CancelledError) or type(error).__name__ in _EXPECTED


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drops records that gRPC logs with a traceback although nothing is wrong here.

    These are: a message that is not valid protobuf (its sender gets an error); a stream that is cancelled before its
    handler starts, such as at a server's stop (the caller sees the stream end); a message whose reader has gone.
    """
    return not (record.exc_info and _is_expected(record.exc_info[1]))


def setup_logging(log_format: str = "console", level: str = "info", stream: TextIO | None = None) -> None:
    """Logs all records of `level` and above to `stream` (standard error), as "console" or "json". May be repeated."""
    stream = stream or sys.stderr

    def write(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a missing reader, a closed stream
            stream.write(f"{line}\n")
            stream.flush()

    install([Output(JsonFormatter() if log_format == "json" else ConsoleFormatter(), write)], level)


def install(outputs: Sequence[Output], level: str, on_close: Callable[[], object] = lambda: None) -> FoldingHandler:
    """Sends all records of `level` and above to these outputs, and to no others. on_close: see FoldingHandler."""
    quiet_libraries()
    handler = FoldingHandler(outputs, on_close=on_close)
    handler.addFilter(add_request_id)
    logging.getLogger().handlers[:] = [handler]
    set_level(level)
    logging.captureWarnings(True)
    return handler


def set_level(level: str) -> None:
    """Sets the lowest level that is logged: "debug", "info", "warning" or "error"."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
