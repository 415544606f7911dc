"""Writes the request log: one line of JSON for each request that entered here, in a file of limited size.

No text, no token ids. If the file cannot be written, lines are lost, never a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exo_mesh.base.telemetry.line_writer import LineWriter, RotatingFile

MAX_BYTES = 10 * 2**20
"""Most bytes of one file: about 25,000 requests."""
OLD_FILES = 4
MAX_QUEUED = 1024
"""Lines that wait for a slow disk; more are lost, and counted."""
CLOSE_S = 1.0
NONE = "none"


def request_file(setting: str, home: Path) -> RequestFile | None:
    """The file that the setting names, below the home unless it is absolute; None for "none"."""
    return None if setting.strip().lower() == NONE else RequestFile(home / Path(setting).expanduser())


class RequestFile:
    """The request log, written by a thread of its own, because a disk may be slow. The first line starts the thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, old_files: int = OLD_FILES) -> None:
        self.file = RotatingFile(path, max_bytes, old_files)
        self._writer = LineWriter(self.file, f"the request log {path}", MAX_QUEUED)

    @property
    def lost(self) -> int:
        """Lines that could not be written so far."""
        return self._writer.lost

    def write(self, fields: Mapping[str, Any]) -> None:
        """Add a line; returns at once."""
        self._writer.write(json.dumps(fields))

    def close(self) -> None:
        """Write the queued lines, for at most twice CLOSE_S. A later line opens the file again."""
        self._writer.close(CLOSE_S)
