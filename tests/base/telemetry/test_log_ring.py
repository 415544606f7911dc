"""The last log records, kept in memory."""

from __future__ import annotations

import logging
import sys

from exo_mesh.base.telemetry.log_ring import MAX_CHARS, LogRing
from exo_mesh.base.telemetry.logs import FoldingHandler, Output


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("exo_mesh.a", level, __file__, 1, message, (), None)


def test_only_the_newest_records_are_kept_and_none_is_long() -> None:
    ring = LogRing(3)
    for number in range(1000):
        ring.add(record(f"{number} " + "x" * 5000))
    kept = ring.last(10)
    assert [line.message.split()[0] for line in kept] == ["997", "998", "999"]
    assert {len(line.message) for line in kept} == {MAX_CHARS}
    assert [line.message.split()[0] for line in ring.last(1)] == ["999"] and ring.last(0) == []


def test_an_error_is_named_without_its_traceback() -> None:
    ring = LogRing()
    try:
        raise ValueError("of a request")
    except ValueError:
        ring.add(logging.LogRecord("a", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info()), " request_id=r")
    assert ring.last(1)[0].describe() | {"time": 0} == {
        "time": 0, "level": "error", "logger": "a", "message": "it failed request_id=r (ValueError)",
    }  # fmt: skip


def test_what_is_written_to_the_log_is_kept_and_what_is_folded_is_not() -> None:
    ring, out = LogRing(), list[str]()
    handler = FoldingHandler([Output(logging.Formatter(), out.append)], ring)
    for _ in range(5):
        handler.handle(record("the same warning", logging.WARNING))
    assert [line.message for line in ring.last(10)] == ["the same warning"]
    assert out == ["the same warning"]
