"""Picks the stacks that a runner writes on SIGUSR1 out of what else it prints."""

from __future__ import annotations

import re

from exo_mesh.tasks import ChangeSignal

QUIET_S = 0.15
"""faulthandler writes all threads within some milliseconds; after so long without a line it is done."""

WAIT_S = 1.0
"""For the first line: the kernel may take its time to run a starved process."""

MAX_LINES = 2000

_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*:$|  File \".*\", line \d+ in \S+$|  <.*>$|  \.\.\.$")
"""What faulthandler writes (CPython, Python/traceback.c). Everything else that a runner prints may be anything."""


class StackListener:
    """Hears every line that a runner prints. One `listen` at a time; a second one waits for lines of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._heard = ChangeSignal()

    def hear(self, line: str) -> None:
        if _STACK.match(line) and len(self._lines) < MAX_LINES:
            self._lines.append(line)
            self._heard.beat()

    async def listen(self) -> list[str]:
        """The lines of the stacks that come now; [] if none do."""
        lines: list[str] = []
        self._lines = lines
        if await self._heard.wait(WAIT_S):
            while await self._heard.wait(QUIET_S):
                pass
        return lines
