"""Saves the questions of earlier runs in a bounded file in the home that only its owner can read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

FILE_NAME = "chat_history"
MAX_ENTRIES = 1_000
MAX_BYTES = 512 * 1024
"""At this size the older half is dropped."""
MAX_ENTRY_CHARS = 16_384
"""A longer question, such as a pasted file, is not saved."""


class QuestionHistory:
    """A file with one question per line as a JSON string, the newest last. Several chats may write at once.

    Errors of reading or writing are ignored: a chat works without its history.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def entries(self) -> list[str]:
        """The last MAX_ENTRIES questions, the newest last."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES - MAX_ENTRY_CHARS))
                lines = file.read(MAX_BYTES + MAX_ENTRY_CHARS).splitlines()
        except OSError:
            return []
        return [entry for line in lines if (entry := _entry(line))][-MAX_ENTRIES:]

    def add(self, entry: str) -> None:
        """Saves a question, unless it begins with a space or is too long."""
        if not entry or entry[0].isspace() or len(entry) > MAX_ENTRY_CHARS:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                if file.tell() > MAX_BYTES:
                    file.seek(-MAX_BYTES // 2, os.SEEK_END)
                    kept = file.read().partition(b"\n")[2]
                    file.truncate(0)
                    file.write(kept)


def _entry(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return entry if isinstance(entry, str) else ""
