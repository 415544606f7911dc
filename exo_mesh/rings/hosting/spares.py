"""Keeps idle runners with their engine's library imported, so that a recovery need not wait for the import."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from exo_mesh.domain.runner.reports import EnginePrepared, RunnerFailed
from exo_mesh.errors import MeshError
from exo_mesh.rings.hosting.runner_child import RunnerChild, spawn
from exo_mesh.rings.hosting.supervisor import RUNNER_COMMAND
from exo_mesh.wire import runner_pipe
from exo_mesh.wire.runner_commands import Prepare

IMPORT_S = 120.0
"""Longest time to import an engine's library: torch on a slow board from an SD card takes half a minute."""

REFILL_AFTER_S = 10.0
"""Seconds to wait after a spare was taken: its stage loads first."""

FIRST_LOOK_S = 1.0
LOOK_EVERY_S = 10.0
"""Seconds between two looks at the engines that are wanted: the first while this node knows no engine."""

BROKEN_AFTER_S = 300.0
"""Seconds before a spare that has ended by itself is replaced: an engine that fails to import will fail again."""

_log = logging.getLogger(__name__)


class SparePool:
    """Keeps `size` idle processes for each engine that `engines` returns; it is asked again every LOOK_EVERY_S."""

    def __init__(
        self,
        size: int,
        engines: Callable[[], Sequence[str]],
        command: Sequence[str] = RUNNER_COMMAND,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._size = size
        self._engines = engines
        self._command = command
        self._environment = environment
        self._idle: list[tuple[str, RunnerChild]] = []
        self._due = asyncio.Event()
        self._not_before: dict[str, float] = {}

    def head_start(self) -> HeadStart:
        """A head start for one stage; the caller must close it."""
        return HeadStart(self._command, self._environment)

    def take(self, engine: str) -> RunnerChild | None:
        """Take a process that has imported this engine and waits for a stage; the caller owns it from now on."""
        for spare in self._idle:
            if spare[0] == engine and spare[1].process.returncode is None:
                self._idle.remove(spare)
                self._hold_off(engine, REFILL_AFTER_S)
                return spare[1]
        return None

    async def keep(self) -> None:
        """Keep the wanted spares until cancelled; then end them."""
        if not self._size:
            return
        try:
            while True:
                await self._fill()
                self._due.clear()
                ends = [asyncio.ensure_future(child.process.wait()) for _, child in self._idle]
                due = asyncio.ensure_future(self._due.wait())
                try:
                    await asyncio.wait((due, *ends), timeout=self._look_in_s(), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (due, *ends):
                        task.cancel()
                self._bury()
        finally:
            await asyncio.gather(*(_end(child) for _, child in self._idle))
            self._idle.clear()

    def _hold_off(self, engine: str, seconds: float) -> None:
        self._not_before[engine] = time.monotonic() + seconds
        self._due.set()

    def _look_in_s(self) -> float:
        """Seconds until a spare may be missing again: no event says that a plan has come or that a pause is over."""
        if not self._engines():
            return FIRST_LOOK_S
        pauses = (until - time.monotonic() for until in self._not_before.values())
        return min([LOOK_EVERY_S, *(pause for pause in pauses if pause > 0)])

    def _bury(self) -> None:
        for spare in [spare for spare in self._idle if spare[1].process.returncode is not None]:
            self._idle.remove(spare)
            spare[1].close()
            _log.warning("the spare runner of %s ended with exit code %s", spare[0], spare[1].process.returncode)
            self._hold_off(spare[0], BROKEN_AFTER_S)

    async def _fill(self) -> None:
        """End the spares of engines that are not wanted any more, and start what is missing, one after the other."""
        wanted = self._engines()
        for spare in [spare for spare in self._idle if spare[0] not in wanted]:
            self._idle.remove(spare)
            await _end(spare[1])
        while engine := self._missing():
            try:
                self._idle.append((engine, await _prepared(engine, self._command, self._environment)))
            except (MeshError, OSError, TimeoutError) as exc:
                _log.warning("cannot start a spare runner of %s: %s", engine, exc)
                self._hold_off(engine, BROKEN_AFTER_S)

    def _missing(self) -> str:
        """An engine with too few spares that may get one now; "" if there is none."""
        have, now = Counter(engine for engine, _ in self._idle), time.monotonic()
        few = (engine for engine in self._engines() if have[engine] < self._size)
        return next((engine for engine in few if self._not_before.get(engine, 0.0) <= now), "")


class HeadStart:
    """The process of a stage whose files are still being fetched: it imports the engine's library meanwhile."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._engine = ""
        self._child: asyncio.Task[RunnerChild] | None = None

    def begin(self, engine: str) -> None:
        """Start the process; a second call does nothing."""
        if self._child is None:
            self._engine = engine
            self._child = asyncio.create_task(
                _prepared(engine, self._command, self._environment), name=f"head start of {engine}"
            )

    async def ready(self) -> None:
        """Wait until the engine is imported, or its import has failed."""
        if self._child is not None:
            await asyncio.wait({self._child})

    def take(self) -> RunnerChild | None:
        """Take the process that `ready` has waited for; the caller owns it. None if it was not begun, or has failed."""
        begun = self._child
        if begun is None or not begun.done():
            return None
        self._child = None
        if (failure := begun.exception()) is not None:
            _log.info(
                "importing %s ahead of its stage failed: %s", self._engine, failure
            )  # the next process reports the error to its owner
            return None
        return begun.result()

    async def close(self) -> None:
        """End the process, unless it was taken."""
        begun, self._child = self._child, None
        if begun is None:
            return
        begun.cancel()
        await asyncio.wait({begun})
        if not begun.cancelled() and begun.exception() is None:
            await _end(begun.result())


async def _prepared(engine: str, command: Sequence[str], environment: Mapping[str, str]) -> RunnerChild:
    """Start a process that imports the engine. Raises MeshError, OSError or TimeoutError."""
    child = await spawn(command, environment)
    try:
        await child.open()
        await runner_pipe.write_command(child.writer, Prepare(engine))
        async with asyncio.timeout(IMPORT_S):
            report = await runner_pipe.read_report(child.reader)
        if not isinstance(report, EnginePrepared):
            raise MeshError(report.message if isinstance(report, RunnerFailed) else "it ended at once")
    except BaseException:
        await _end(child)
        raise
    seconds, megabytes = report.import_s, report.memory_bytes / 1e6
    _log.info("started a spare runner of %s: imported in %.1f s, takes %d MB", engine, seconds, megabytes)
    return child


async def _end(child: RunnerChild) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
    await child.process.wait()
    child.close()
