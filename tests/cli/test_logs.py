"""Log lines for people and for programs."""

from __future__ import annotations

import io
import json
import logging

from exo_mesh.logs import setup_logging


def test_json_lines_carry_the_extra_fields_and_the_traceback() -> None:
    stream = io.StringIO()
    setup_logging("json", "info", stream)
    logger = logging.getLogger("exo_mesh.node")
    logger.info("placed %s", "m", extra={"request_id": "r1"})
    logger.debug("not wanted")
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "exo_mesh.node", "placed m")
    assert first["request_id"] == "r1"
    assert first["time"].endswith("+00:00")
    assert "ValueError: x" in second["traceback"]


def test_console_lines_are_short() -> None:
    stream = io.StringIO()
    setup_logging("console", "debug", stream)
    logger = logging.getLogger("exo_mesh.node")
    logger.info("placed", extra={"request_id": "r1"})
    logger.warning("late")
    logger.debug("detail")
    lines = [line[8:] for line in stream.getvalue().splitlines()]
    assert lines == [" placed request_id=r1", " warning: late", " debug node: detail"]


def test_libraries_are_kept_quiet() -> None:
    stream = io.StringIO()
    setup_logging("console", "info", stream)
    logging.getLogger("aiohttp.access").info("GET /")
    assert stream.getvalue() == ""
