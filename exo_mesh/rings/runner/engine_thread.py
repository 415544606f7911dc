"""The one thread that calls the engine; the event loop runs in the same thread or beside it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_S = 0.0001
"""Longest time that one thread runs Python code while the other one waits for the interpreter. Python's default of 5 ms
is half a step."""

Job = Callable[[], None]


class EngineThread:
    """Runs the event loop of a process, and is the only thread that computes.

    It begins as the loop's own thread: a frame then costs two thread switches less, which is much beside the step of a
    small model. After `part` the loop runs in another thread and this one does the jobs of `submit`, in order: frames
    are read, sent and answered while the engine computes. After `rejoin` the loop runs in this thread again. The engine
    never changes its thread, because some libraries tie what they hold to the thread.
    """

    def __init__(self) -> None:
        self.apart = False
        """The loop runs in another thread, or does so from its next turn on."""
        self._rejoins = False
        self._usual_switch_s = sys.getswitchinterval()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(
        self, main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> T:
        """Run `main` to its end, whichever thread the loop is in by then; returns or raises what `main` does."""
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            loop = self._loop = runner.get_loop()
            task = loop.create_task(main)
            task.add_done_callback(lambda _: loop.stop())
            while not task.done():  # `part` and `rejoin` stop the loop
                if self.apart:
                    self._run_apart(loop)
                else:
                    loop.run_forever()
            return task.result()

    def _run_apart(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do jobs, until the loop in the other thread stops."""
        sys.setswitchinterval(SWITCH_S)
        beside = threading.Thread(target=self._go_on, args=(loop,), name="event loop", daemon=True)
        beside.start()
        while (job := self._jobs.get()) is not None:
            job()
        beside.join()
        if self._rejoins:
            self.apart = self._rejoins = False
            sys.setswitchinterval(self._usual_switch_s)
            while not self._jobs.empty():  # the last job may have brought another one
                if (late := self._jobs.get()) is not None:
                    late()

    def part(self) -> None:
        """From now on the loop and the engine have a thread each. Call on the loop; again changes nothing."""
        self._rejoins = False
        if not self.apart and self._loop is not None:
            self.apart = True
            self._loop.stop()  # at the end of this turn; `run` starts it again

    def rejoin(self) -> None:
        """The loop goes on in the engine's thread, after this turn and all jobs. Call on the loop; again changes
        nothing."""
        if self.apart and self._loop is not None:
            self._rejoins = True
            self._loop.stop()

    def submit(self, job: Job) -> None:
        """Run `job` in the engine's thread, after the jobs before it; only after `part`. From the loop, or from a job.
        The job must not raise."""
        self._jobs.put(job)

    def tell_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        """Let the loop call something, after all that it was given before. From any thread. A closed loop ignores the
        call."""
        loop = self._loop or asyncio.get_running_loop()  # of a caller that has no `run`
        try:
            loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not loop.is_closed():
                raise

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread after all jobs submitted before; returns or raises what the function
        does."""
        if not self.apart:
            return function()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                result = function()
            except Exception as exc:  # noqa: BLE001 - passed on to the caller
                self.tell_loop(_settle, answer.set_exception, answer, exc)
            else:
                self.tell_loop(_settle, answer.set_result, answer, result)

        self.submit(job)
        return await answer

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            self._jobs.put(None)


def _settle(setter: Callable[[Any], None], answer: asyncio.Future[Any], value: object) -> None:
    if not answer.done():  # the caller may have given up
        setter(value)
