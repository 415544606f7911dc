"""A conversation as a value: messages, model and settings. It is saved as one JSON file."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exo_mesh.base.printable import quoted, reason_of
from exo_mesh.errors import InputError

FOLDER = "chats"
"""The directory of saved conversations, in the home of the node."""
MAX_FILE_BYTES = 16_000_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_VERSION = 1


@dataclass
class Dialogue:
    """A conversation. messages: of the user and the assistant in turns, without the system message."""

    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages of the request that asks the question."""
        return [*system_message(self.system), *self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Appends a finished turn."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def system_message(text: str) -> list[dict[str, str]]:
    """A list with the system message; empty without a text."""
    return [{"role": "system", "content": text}] if text else []


class SavedChats:
    """Saves conversations in a directory, each as a file of mode 0600."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def names(self) -> list[str]:
        """The names that `load` accepts, sorted."""
        with contextlib.suppress(OSError):
            return sorted(path.stem for path in self._folder.glob("*.json") if _NAME.fullmatch(path.stem))
        return []

    def save(self, name: str, conversation: Dialogue) -> Path:
        """Saves atomically, replaces a conversation of that name, and returns the file. Raises InputError."""
        import msgspec

        path = self._path(name)
        text = msgspec.json.format(msgspec.json.encode({"version": _VERSION, **vars(conversation)}), indent=1)
        if len(text) > MAX_FILE_BYTES:
            raise InputError(f"the conversation has {len(text)} bytes, but at most {MAX_FILE_BYTES} can be saved")
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            scratch.replace(path)
        except OSError as exc:
            scratch.unlink(missing_ok=True)
            raise InputError(f"{path} cannot be written: {exc.strerror}") from exc
        return path

    def load(self, name: str) -> Dialogue:
        """Loads a conversation. Raises InputError if there is none of that name, or its file cannot be read."""
        import msgspec

        path = self._path(name)
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            fields = msgspec.json.decode(text)
            version = fields.pop("version", None) if isinstance(fields, dict) else None
            if len(text) > MAX_FILE_BYTES or version != _VERSION:
                raise InputError(f"{path} is not a conversation that this version can read")
            return msgspec.convert(fields, Dialogue)
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none yet"
            raise InputError(f"there is no saved conversation {name}; saved: {known}") from None
        except (OSError, msgspec.MsgspecError, RecursionError) as exc:
            raise InputError(f"{path} cannot be read: {reason_of(exc)}") from exc

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{quoted(name)} cannot name a conversation: use up to 64 letters, digits, _ . or -, not . or - first"
            )
        return self._folder / f"{name}.json"
