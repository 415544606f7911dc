"""The token of this node for gated and private models of the hub, as an admin gave it over the API.

It is kept in the node's home, sent to the hub by the fetcher only, and never shown, logged or told to a peer. HF_TOKEN
in the environment of the node is stronger; a token that `hf auth login` has stored is weaker.
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
    """use: told the token at the start and after each change, "" for none. path: of the file that keeps it."""

    def __init__(self, path: Path, use: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self._use = use
        self._variable = next((name for name in VARIABLES if environ.get(name)), "")
        self._text = self._read()
        use(self._text)

    @property
    def origin(self) -> str:
        """Where the token came from; "" if neither the environment nor an admin gave one."""
        return f"environment {self._variable}" if self._variable else FILE_NAME if self._text else ""

    async def change(self, text: str) -> None:
        """Keep and use another token; "" forgets it. Raises InputError for a text that can be none, and OSError."""
        text = text.strip()
        if text and not _TEXT.fullmatch(text):
            raise InputError("hf_token: a token of the hub has 8 to 512 characters without spaces", param="hf_token")
        await asyncio.to_thread(self._write, text)
        self._text = text
        self._use(text)
        _log.info("the token for the hub was %s", "changed" if text else "removed")

    def _read(self) -> str:
        try:
            text = self._path.read_text("ascii").strip()
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
