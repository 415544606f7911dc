"""The file with a line for each request: what is in it, how large it gets, and what happens if it cannot be written."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.rings.serving import request_file as module
from exo_mesh.rings.serving.request_file import RequestFile, request_file


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_lines_are_there_once_it_is_closed(tmp_path: Path) -> None:
    file = RequestFile(tmp_path / "new" / "requests.jsonl")
    for number in range(100):
        file.write({"request_id": f"r{number}"})
    file.close()
    assert [line["request_id"] for line in lines(tmp_path / "new" / "requests.jsonl")] == [f"r{n}" for n in range(100)]
    assert file.lost == 0


def test_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    file = RequestFile(tmp_path / "requests.jsonl", max_bytes=1000, old_files=2)
    for number in range(500):
        file.write({"request_id": f"r{number}", "model": "m" * 40})
    file.close()
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found] == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    assert max(path.stat().st_size for path in found) <= 1000
    assert lines(found[0])[-1]["request_id"] == "r499"


def test_what_cannot_be_written_is_told_once_and_when_it_can_again_told_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    blocked = tmp_path / "logs"
    blocked.write_text("not a directory")
    file = RequestFile(blocked / "requests.jsonl")
    for number in range(3):
        file.write({"request_id": f"lost{number}"})
    file.close()
    assert file.lost == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    blocked.unlink()
    file.write({"request_id": "kept"})
    file.close()
    assert [line["request_id"] for line in lines(blocked / "requests.jsonl")] == ["kept"]
    assert "after the loss of 3 lines" in caplog.text


def test_a_disk_that_is_too_slow_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 10)
    free = threading.Event()
    file = RequestFile(tmp_path / "requests.jsonl")
    monkeypatch.setattr(file.file, "write", writes_late(file.file.write, free))
    for number in range(50):
        file.write({"request_id": f"r{number}"})
    assert 50 - 12 <= file.lost <= 50 - 10, "ten wait, and one is being written"
    free.set()
    file.close()
    assert len(lines(tmp_path / "requests.jsonl")) == 50 - file.lost


def writes_late(really: Any, free: threading.Event) -> Any:
    def write(data: bytes) -> None:
        assert free.wait(10)
        really(data)

    return write


def test_where_it_is(tmp_path: Path) -> None:
    assert request_file("None", tmp_path) is None
    for setting, path in (("logs/r.jsonl", tmp_path / "logs" / "r.jsonl"), (str(tmp_path / "x"), tmp_path / "x")):
        file = request_file(setting, tmp_path / "." if setting.startswith("logs") else Path("/nowhere"))
        assert file is not None
        file.write({})
        file.close()
        assert path.is_file()
