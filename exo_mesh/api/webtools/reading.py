"""Runs the child process that reads a fetched page."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from exo_mesh.api.core.renderer_process import renderer_environment
from exo_mesh.api.webtools.page_child import LIMIT_S, PageAnswer, PageQuestion
from exo_mesh.errors import InputError, NotReadyError, OverloadError

MAX_READERS = 2
"""Child processes at once; further pages wait for their turn."""
MAX_PAGES = 8
"""Pages that are read or wait for it, at most MAX_PAGES / MAX_READERS * WALL_LIMIT_S; further ones get a 429."""
WALL_LIMIT_S = 2 * LIMIT_S
"""More than the limit of CPU time, because the machine may be busy."""


class PageReaders:
    """Reads pages, each in a process of its own."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._num_pages = 0

    async def read(self, body: bytes, question: PageQuestion) -> PageAnswer:
        """The title and text of a page. Raises InputError if it cannot be read, NotReadyError and OverloadError."""
        if self._num_pages >= MAX_PAGES:
            raise OverloadError(f"{MAX_PAGES} pages are being read already; try again later")
        self._num_pages += 1
        try:
            async with self._slots:
                return await _ask(body, question)
        finally:
            self._num_pages -= 1


async def _ask(body: bytes, question: PageQuestion) -> PageAnswer:
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "exo_mesh.api.webtools.page_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=renderer_environment(os.environ),
            start_new_session=True,
        )
    except OSError as exc:
        raise NotReadyError(f"the process that reads pages cannot be started: {exc}") from exc
    try:
        async with asyncio.timeout(WALL_LIMIT_S):
            printed, _ = await process.communicate(msgspec.json.encode(question) + b"\n" + body)
        return msgspec.json.decode(printed, type=PageAnswer)
    except TimeoutError as exc:
        raise InputError("the page takes too long to read", param="url") from exc
    except msgspec.MsgspecError as exc:
        raise InputError("the page cannot be read: it needs too much time or memory", param="url") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
