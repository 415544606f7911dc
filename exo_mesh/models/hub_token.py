"""This node's token for gated and private models of the hub, set by an admin over the API.

It is kept in the node's home, sent to the hub by the fetcher only, and never shown, logged or sent to a peer. HF_TOKEN
in the node's environment takes precedence; a token stored by `hf auth login` is used last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from exo_mesh.errors import InputError

FILE_NAME = "hub_token"
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TEXT = re.compile(r"[\x21-\x7e]{8,512}")
_log = logging.getLogger(__name__)


class HubToken:
    """Stores the token. use: called with the token at the start and after each change, "" for none. path: its file."""

    def __init__(self, path: Path, use: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self._use = use
        self._variable = next((name for name in VARIABLES if environ.get(name)), "")
        self._text = self._read()
        use(self._text)

    @property
    def origin(self) -> str:
        """The source of the token; "" if neither the environment nor an admin set one."""
        return f"environment {self._variable}" if self._variable else FILE_NAME if self._text else ""

    async def change(self, text: str) -> None:
        """Stores and uses another token; "" removes it. Raises InputError for an invalid token, and OSError."""
        text = text.strip()
        if text and not _TEXT.fullmatch(text):
            raise InputError("hf_token: a token of the hub has 8 to 512 characters without spaces", param="hf_token")
        await asyncio.to_thread(self._write, text)
        self._text = text
        self._use(text)
        _log.info("the hub token was %s", "changed" if text else "removed")

    def _read(self) -> str:
        try:
            text = self._path.read_text("utf-8-sig").strip()
        except (OSError, ValueError):
            return ""
        return text if _TEXT.fullmatch(text) else ""

    def _write(self, text: str) -> None:
        if not text:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text + "\n")
        draft.replace(self._path)
