"""Log lines for people and for programs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import traceback

import pytest

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.telemetry.log_folding import MAX_SOURCES, MAX_VARIANTS, Folder
from exo_mesh.base.telemetry.logs import current_request, setup_logging


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


def test_grpc_is_silent_about_streams_that_end_and_garbage_but_not_about_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    setup_logging("console", "info", stream)

    class DecodeError(Exception):
        """As protobuf calls it."""

    for error in (asyncio.CancelledError(), DecodeError("no protobuf"), ValueError("ours")):
        try:
            raise error
        except BaseException as exc:
            logging.getLogger("grpc._cython.cygrpc").exception("after %s", type(exc).__name__)
            traceback.print_exc()  # as gRPC does besides
    printed = capsys.readouterr().err
    assert "ValueError: ours" in printed and "CancelledError" not in printed and "no protobuf" not in printed
    said = [line[9:] for line in stream.getvalue().splitlines() if " after " in line]
    assert said == ["error: after ValueError"]


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


def test_lines_of_a_request_carry_its_id_and_the_callers_own_wins() -> None:
    stream = io.StringIO()
    setup_logging("json", "info", stream)
    logger = logging.getLogger("exo_mesh.node")
    token = current_request.set("req_1")
    logger.info("placed")
    logger.info("placed", extra={"request_id": "other"})
    current_request.reset(token)
    logger.info("idle")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("request_id") for line in lines] == ["req_1", "other", None]


async def test_a_task_carries_the_request_that_started_it_only_if_it_is_for_that() -> None:
    seen = []

    async def look() -> None:
        seen.append(current_request.get())

    tasks = TaskOwner()
    current_request.set("req_1")
    await tasks.start(look(), "watch the ring")
    await tasks.start(look(), "place the model", for_request=True)
    await tasks.close()
    assert seen == ["", "req_1"]


def test_the_same_warning_is_shown_once_a_minute_and_then_counted() -> None:
    folder = Folder()
    shown = [folder.shows("refused: %s", "refused: beta", now) for now in (0.0, 1.0, 59.0)]
    assert shown == [True, False, False]
    assert folder.finished(59.9) == []
    assert list(map(str, folder.finished(60.0))) == ["repeated 2 times: refused: beta"]
    assert folder.shows("refused: %s", "refused: beta", 60.0)
    assert folder.finished(200.0) == []


def test_a_flood_of_different_warnings_from_one_place_is_bounded() -> None:
    folder = Folder()
    shown = sum(folder.shows("refused: %s", f"refused: {port}", 1.0) for port in range(100_000))
    assert shown == MAX_VARIANTS
    assert folder.shows("something else", "something else", 1.0)
    ended = folder.finished(61.0)
    assert [(item.count, item.exact) for item in ended] == [(100_000 - MAX_VARIANTS, False)]
    for number in range(10 * MAX_SOURCES):
        folder.shows(f"source {number}", "m", 62.0)
    assert len(folder._sources) == MAX_SOURCES


def test_a_thousand_equal_warnings_are_two_lines_and_information_is_never_folded() -> None:
    stream = io.StringIO()
    setup_logging("console", "info", stream)
    logger = logging.getLogger("exo_mesh.node")
    for _ in range(1000):
        logger.warning("refused: %s", "beta")
    logger.info("placed")
    logger.info("placed")
    logging.getLogger().handlers[0].close()
    lines = [line[8:] for line in stream.getvalue().splitlines()]
    assert lines == [
        " warning: refused: beta",
        " placed",
        " placed",
        " warning: repeated 999 times: refused: beta",
    ]


def test_a_message_is_one_line_whatever_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the text of an exception, whose own lines are indented so that none looks like a record."""
    stream = io.StringIO()
    setup_logging("console", "info", stream)
    hostile = "\x1b[31mEVIL\n11:11:11 error: forged\x07\u202e"
    logging.getLogger("exo_mesh.test").warning("peer %s joined", hostile, extra={"request_id": hostile})
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("exo_mesh.test").exception("failed")
    lines = stream.getvalue().splitlines()
    assert "\\x1b[31mEVIL\\n11:11:11 error: forged\\x07\\u202e joined" in lines[0]
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("    ") for line in lines[2:])
    setup_logging("json", "info", stream := io.StringIO())
    logging.getLogger("exo_mesh.test").warning("peer %s joined", hostile)
    assert json.loads(stream.getvalue())["message"] == f"peer {hostile} joined"
    assert stream.getvalue().rstrip("\n").isprintable()
