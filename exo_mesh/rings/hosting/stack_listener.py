"""Collects the stacks that a runner writes on SIGUSR1 from its output."""

from __future__ import annotations

import re

from exo_mesh.base.tasks import ChangeSignal

QUIET_S = 0.15
"""Seconds without a line after which the stacks are complete: faulthandler writes all threads within milliseconds."""

WAIT_S = 1.0
"""Seconds to wait for the first line: the kernel may take some time to run a starved process."""

MAX_LINES = 2000

_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*:$|  File \".*\", line \d+ in \S+$|  <.*>$|  \.\.\.$")
"""The lines that faulthandler writes (CPython, Python/traceback.c). Any other line of a runner is ignored."""


class StackListener:
    """Reads every line that a runner prints. One `listen` at a time; a second one waits for lines of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._heard = ChangeSignal()

    def hear(self, line: str) -> None:
        if _STACK.match(line) and len(self._lines) < MAX_LINES:
            self._lines.append(line)
            self._heard.beat()

    async def listen(self) -> list[str]:
        """The lines of the stacks that come now; [] if none come."""
        lines: list[str] = []
        self._lines = lines
        if await self._heard.wait(WAIT_S):
            while await self._heard.wait(QUIET_S):
                pass
        return lines
