"""Lines that go to files and streams: bounds of size, number and age, and places that cannot be written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from exo_mesh.base.telemetry.line_writer import DAY_S, LineWriter, RotatingFile, StreamSink

LINE = b"x" * 99 + b"\n"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_bounded_and_so_are_the_older_ones(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", 1000, 3)
    for _ in range(100):
        file.write(LINE)
    assert names(tmp_path) == ["log", "log.1", "log.2", "log.3"]
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {1000}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    file.close()
    again = RotatingFile(tmp_path / "log", 1000, 1)
    again.write(LINE)
    assert names(tmp_path) == ["log", "log.1"], "the setting has changed"
    assert (tmp_path / "log").stat().st_size == 100
    RotatingFile(tmp_path / "alone", 100, 0).write(LINE)
    alone = RotatingFile(tmp_path / "alone", 100, 0)
    alone.write(LINE)
    assert (tmp_path / "alone").stat().st_size == 100


def test_a_file_has_one_day_and_goes_when_it_is_too_old(tmp_path: Path) -> None:
    now = [1_000_000_000.0]
    file = RotatingFile(tmp_path / "log", 10**6, 100, max_age_days=3, now=lambda: now[0])
    for day in range(6):
        file.write(b"line\n")
        os.utime(tmp_path / "log", (now[0], now[0]))
        now[0] += DAY_S
        assert len(names(tmp_path)) == min(day + 1, 4), names(tmp_path)
    now[0] += 10 * DAY_S
    file.tidy()
    assert names(tmp_path) == [], "also without a line, as an hourly look sees to"


def test_a_file_that_somebody_moved_away_is_begun_again(tmp_path: Path) -> None:
    now = [0.0]
    file = RotatingFile(tmp_path / "log", 10**6, 1, now=lambda: now[0])
    file.write(b"one\n")
    (tmp_path / "log").rename(tmp_path / "moved")
    now[0] += 2
    file.write(b"two\n")
    assert (tmp_path / "log").read_bytes() == b"two\n" and (tmp_path / "moved").read_bytes() == b"one\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_costs_lines_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    writer = LineWriter(RotatingFile(path, 10**6, 2), "the log file")
    for _ in range(5):
        writer.write("lost")
    writer.close(5.0)
    assert writer.lost == 5 and writer.is_failing
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write to the log file: No space left on device; lines are lost, requests continue"
    ]
    path.unlink()
    writer.write("kept")
    writer.close(5.0)
    assert path.read_text() == "\nkept\n" and not writer.is_failing, "a line that was cut off ends before the next one"
    assert "after the loss of 5 lines" in caplog.text


def test_a_reader_that_does_not_read_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    writer = LineWriter(StreamSink(writing), "standard output", max_queued=10)
    for _ in range(200):
        writer.write("x" * 4096)  # a pipe holds 16 of them
    assert writer.lost >= 200 - 10 - 18 and "the destination is too slow" in caplog.text
    os.close(reading)
    writer.close(5.0)
    os.close(writing)
    assert writer.lost > 0
