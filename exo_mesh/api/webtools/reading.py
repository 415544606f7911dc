"""Runs the child process that reads a fetched page."""

from __future__ import annotations

import msgspec

from exo_mesh.api.webtools.children import WebChildren
from exo_mesh.api.webtools.page_child import LIMIT_S, PageAnswer, PageQuestion
from exo_mesh.errors import InputError

WALL_LIMIT_S = 2 * LIMIT_S
"""More than the limit of CPU time, because the machine may be busy."""


class PageReaders:
    """Reads pages, each in a process of its own."""

    def __init__(self) -> None:
        self._children = WebChildren("exo_mesh.api.webtools.page_child", "pages are being read")

    async def read(self, body: bytes, question: PageQuestion) -> PageAnswer:
        """The title and text of a page. Raises InputError if it cannot be read, NotReadyError and OverloadError."""
        try:
            printed = await self._children.ask(msgspec.json.encode(question) + b"\n" + body, WALL_LIMIT_S)
            return msgspec.json.decode(printed, type=PageAnswer)
        except TimeoutError as exc:
            raise InputError("the page takes too long to read", param="url") from exc
        except msgspec.MsgspecError as exc:
            raise InputError("the page cannot be read: it needs too much time or memory", param="url") from exc
