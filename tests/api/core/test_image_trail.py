"""The trail of images is a line in the log and a bounded number of files; a full disk stops nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_mesh.api.core import image_trail
from exo_mesh.api.core.image_trail import ImageTrail
from exo_mesh.text.image_wire import ImageDecoded

IMAGE = ImageDecoded(1, 2, bytes(6))


def test_an_image_is_a_line_in_the_log_and_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ImageTrail(True, tmp_path / "seen").note("messages[0]", 70, IMAGE)
    assert "image messages[0]: 70 bytes, decoded to 2 x 1 pixels" in caplog.text
    (file,) = (tmp_path / "seen").iterdir()
    assert file.read_bytes() == b"P6 2 1 255\n" + bytes(6)


def test_the_oldest_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_trail, "MAX_FILES", 3)
    for number in range(6):
        ImageTrail(directory=tmp_path).note("x", 1, ImageDecoded(1, 2, bytes([number] * 6)))
    kept = {file.read_bytes()[-1] for file in tmp_path.iterdir()}
    assert len(kept) == 3 and 5 in kept


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    ImageTrail(directory=tmp_path / "file" / "inside").note("x", 1, IMAGE)
    assert "cannot be written" in caplog.text
