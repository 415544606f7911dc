"""Keeps this machine from going to sleep while there is work, with the system's own program for that.

The program holds the lock as long as its child `cat` lives. `cat` lives until its pipe is closed: by this node when the
work has ended, or by the kernel when the node dies for any reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.wakeups import next_wakeup

LOOK_EVERY_S = 1.0
LINGER_S = 30.0
"""The lock is held this long after the last work: conversations pause between two requests, and systems that sleep when
idle wait for minutes."""

RETRY_S = 600.0
"""After the system refused the lock, it is asked again after this time."""

STARTED_S = 0.5
"""A program that is refused ends within this time."""

LOGIND = Path("/run/systemd/inhibit")
"""Exists while logind runs, which systemd-inhibit talks to."""

_INHIBIT = ("systemd-inhibit", "--who=exo-mesh", "--why=requests run", "--mode=block")
LINUX = ((*_INHIBIT, "--what=sleep:idle", "cat"), (*_INHIBIT, "--what=idle", "cat"))
"""logind lets every user prevent idle sleep; preventing all sleep takes a logged-in user, or root. So the second
command is tried if the first is refused."""

MACOS = (("caffeinate", "-i", "-s", "cat"),)
"""-i: no sleep when idle, -s: none at all on mains power; see caffeinate(8)."""

_log = logging.getLogger(__name__)


def commands_here(platform: str = sys.platform, logind: Path = LOGIND) -> tuple[tuple[str, ...], ...]:
    """Returns the commands that can hold the lock here, the best first; none where the machine never sleeps idle."""
    commands = MACOS if platform == "darwin" else LINUX if platform == "linux" and logind.is_dir() else ()
    return commands if commands and shutil.which(commands[0][0]) else ()


class SleepLock:
    """Holds the lock while there is work. `keep` runs until it is cancelled, and releases the lock at its end. why():
    the current work; "" if none."""

    def __init__(self, why: Callable[[], str], commands: Sequence[Sequence[str]], clock: Clock = monotonic) -> None:
        self._why = why
        self._commands = commands
        self._clock = clock
        self._holder: Process | None = None
        self._idle_since: float | None = None
        self._refused_at: float | None = None
        self._next = 0
        """Index of the command to try next; a refused command leads to the next one."""

    @property
    def is_held(self) -> bool:
        """Whether the system is currently prevented from sleeping."""
        return self._holder is not None and self._holder.returncode is None

    async def keep(self) -> None:
        """Holds the lock while there is work, and for LINGER_S after it."""
        if not self._commands:
            return
        try:
            while True:
                await self.look()
                await next_wakeup(LOOK_EVERY_S)
        finally:
            await self._release()

    async def look(self) -> None:
        """Takes or releases the lock, as the current work requires."""
        now, why = self._clock(), self._why()
        if why:
            self._idle_since = None
            if not self.is_held and (self._refused_at is None or now - self._refused_at >= RETRY_S):
                await self._take(why)
        elif self._holder is not None:
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now - self._idle_since >= LINGER_S:
                await self._release()

    async def _take(self, why: str) -> None:
        said = ""
        if self._holder is not None:  # refused after a delay: logind may have asked a user
            await self._release()
            self._next += 1
        for command in self._commands[self._next :]:
            self._holder, said = await _started(command)
            if self.is_held:
                self._refused_at = None
                _log.info("sleep is prevented (%s) with %s", why, command[0])
                return
            self._next += 1
        self._refused_at, self._next, self._holder = self._clock(), 0, None
        _log.warning("sleep cannot be prevented while requests run: %s: %s", self._commands[-1][0], said or "refused")

    async def _release(self) -> None:
        holder, self._holder = self._holder, None
        self._idle_since = None
        if holder is None or holder.stdin is None:
            return
        if holder.returncode is not None:
            holder.stdin.close()
            return
        holder.stdin.close()
        try:
            async with asyncio.timeout(2.0):
                await holder.wait()
            _log.info("sleep is allowed again")
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                holder.kill()
            await holder.wait()


async def _started(command: Sequence[str]) -> tuple[Process | None, str]:
    """Starts a command; returns the process, and its error output if it has ended at once."""
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=nothing, stderr=pipe)
    except OSError as exc:
        return None, exc.strerror or str(exc)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(STARTED_S):
            said = await process.stderr.read(4096)
            await process.wait()
    except TimeoutError:
        return process, ""
    lines = said.decode(errors="replace").strip().splitlines()
    return process, lines[-1] if lines else f"exit code {process.returncode}"
