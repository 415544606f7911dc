"""Child processes that handle untrusted input for a node: template renderers, and tokenizers.

The processes run `text/template_child.py`. Each owner has at most NUM_PROCESSES, started on first use. A process that
was idle for IDLE_S is ended. A process that fails, does not answer in time or stays large is killed; the next question
starts another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from exo_mesh.api.core.renderer_process import RendererProcess
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.tasks import TaskOwner, Watchdog
from exo_mesh.errors import DeadlineError, NotReadyError

NUM_PROCESSES = 2
"""Most processes of an owner. Requests for one subject, a template or a tokenizer, use one process at a time, so a
hostile one leaves the other process free."""

IDLE_S = 300.0

WAIT_LIMIT_S = 30.0
"""How long a request waits for a process while others use them."""

MEMORY_LOOK_S = 0.1
"""Interval between two checks of a busy process's memory."""

CLOSE_LIMIT_S = 5.0
"""How long `close` waits for killed processes to end."""


class ChildMemory(msgspec.Struct, frozen=True):
    """growth_bytes: by how much a process may grow; it starts with 20 MiB. kept_bytes: a process that is larger than
    this after an answer is ended, so that the next question finds free memory."""

    growth_bytes: int
    kept_bytes: int

    @property
    def most_resident_bytes(self) -> int:
        """A process with more resident memory is killed; needed on systems that cannot limit the growth."""
        return self.growth_bytes + (64 << 20)


class ChildProcesses:
    """Owns processes, starts and ends them, and lends them to one request at a time."""

    def __init__(self, subjects: str, memory: ChildMemory, clock: Clock = monotonic) -> None:
        """subjects: what they handle, for errors."""
        self._subjects = subjects
        self._memory = memory
        self._clock = clock
        self._slots = asyncio.Semaphore(NUM_PROCESSES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._idle: dict[RendererProcess, float] = {}  # idle since; the most recently used process is last
        self._last: dict[RendererProcess, str] = {}  # the subject that each one had last
        # for each process that has not ended: the task that awaits its end, once it was killed
        self._started: dict[RendererProcess, asyncio.Task[None] | None] = {}
        self._tasks = TaskOwner()
        self._memory_watch = Watchdog(MEMORY_LOOK_S)
        self._idle_watch = Watchdog(IDLE_S / 10, clock)
        self._is_closed = False

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that have not ended."""
        return {process.pid for process in self._started}

    def end_idle(self, now: float) -> float:
        """End the processes that were idle for IDLE_S. Returns the time at which the next one is due."""
        for process, since in list(self._idle.items()):
            if now - since >= IDLE_S or not process.is_usable:
                self._end(process)
        if not self._idle:
            self._idle_watch.forget(self.end_idle)
        return min(self._idle.values(), default=math.inf) + IDLE_S

    async def close(self) -> None:
        """End all processes. Waiting questions get an error."""
        self._is_closed = True
        self._idle_watch.forget(self.end_idle)
        if ends := [self._end(process) for process in list(self._started)]:
            await asyncio.wait(ends, timeout=CLOSE_LIMIT_S)
        await self._tasks.close()

    @asynccontextmanager
    async def lend(self, subject: str) -> AsyncIterator[RendererProcess]:
        """Lend a process for the questions of one request. Afterwards the process is kept if it is still usable. Raises
        NotReadyError if none starts, DeadlineError if all stay busy."""
        turn = self._turns.setdefault(subject, asyncio.Lock())
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await held.enter_async_context(turn)
                    await held.enter_async_context(self._slots)
            except TimeoutError as exc:
                raise DeadlineError(
                    f"the processes for {self._subjects} were busy for {WAIT_LIMIT_S:.0f} s; try again"
                ) from exc
            process = await self._take(subject)
            self._memory_watch.watch(process.watch_memory)
            try:
                yield process
            finally:
                self._memory_watch.forget(process.watch_memory)
                self._give_back(process)

    async def _take(self, subject: str) -> RendererProcess:
        """A process that had this subject last, else the process that was used last, else a new one."""
        while self._idle:
            same = (one for one in self._idle if self._last[one] == subject)
            process = next(same, [*self._idle][-1])
            del self._idle[process]
            if process.is_usable:
                self._last[process] = subject
                return process
            self._end(process)
        if self._is_closed:
            raise NotReadyError("this node is stopping")
        process = await RendererProcess.spawn(self._memory.growth_bytes, self._memory.most_resident_bytes)
        self._started[process], self._last[process] = None, subject
        try:
            await process.ready()
        except BaseException:
            self._end(process)
            raise
        return process

    def _give_back(self, process: RendererProcess) -> None:
        if self._is_closed or not process.is_usable or process.resident_bytes() > self._memory.kept_bytes:
            self._end(process)
            return
        self._idle[process] = self._clock()
        self._idle_watch.watch(self.end_idle)

    def _end(self, process: RendererProcess) -> asyncio.Task[None]:
        self._idle.pop(process, None)
        process.kill()
        task = self._started[process]
        if task is None:
            task = self._started[process] = self._tasks.start(
                self._await_end(process), f"end of a process for {self._subjects}"
            )
        return task

    async def _await_end(self, process: RendererProcess) -> None:
        await process.closed()
        del self._started[process], self._last[process]
