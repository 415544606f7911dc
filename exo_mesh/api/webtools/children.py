"""Runs child processes for untrusted content of the web: one process for each question, few at once."""

from __future__ import annotations

import asyncio
import os
import sys

from exo_mesh.api.core.renderer_process import renderer_environment
from exo_mesh.base.printable import reason_of
from exo_mesh.errors import NotReadyError, OverloadError

MAX_AT_ONCE = 2
"""Child processes at once; further questions wait for their turn."""
MAX_WAITING = 8
"""Questions that are answered or wait for it; further ones get a 429."""


class WebChildren:
    """Asks a module that reads a question from standard input, prints the answer and ends. what: the questions, for
    errors."""

    def __init__(self, module: str, what: str) -> None:
        self._module, self._what = module, what
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_asked = 0

    async def ask(self, question: bytes, limit_s: float) -> bytes:
        """What the process printed, in at most limit_s. Raises TimeoutError, NotReadyError and OverloadError."""
        if self._num_asked >= MAX_WAITING:
            raise OverloadError(f"{MAX_WAITING} {self._what} already; try again later")
        self._num_asked += 1
        try:
            async with self._slots:
                return await self._ask(question, limit_s)
        finally:
            self._num_asked -= 1

    async def _ask(self, question: bytes, limit_s: float) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=renderer_environment(os.environ),
                start_new_session=True,
            )
        except OSError as exc:
            raise NotReadyError(f"the process for {self._what} cannot be started: {reason_of(exc)}") from exc
        try:
            async with asyncio.timeout(limit_s):
                printed, _ = await process.communicate(question)
            return printed
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
