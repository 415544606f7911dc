"""Ends the process of a runner, and classifies how a runner ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any

import psutil

from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.errors import (
    CanaryError,
    DeadlineError,
    InputError,
    ModelError,
    RankLostError,
    StageLostError,
    TransportError,
)
from exo_mesh.rings.hosting.flight_recorder import FlightLog

STACKS_S = 0.2
"""Seconds to wait for the stacks: faulthandler needs a few milliseconds, whatever the interpreter is doing."""

EXIT_POLL_S = 0.02
"""Seconds between checks whether a process has ended, where the kernel offers no handle for that."""


class End(StrEnum):
    """The way a runner ended. It decides whether the stage may be tried again here; see `guard`."""

    STOPPED = "stopped"  # as requested
    LOST = "lost"  # another stage of its ring was lost, or another rank; this runner was healthy
    REFUSED = "refused"  # the request cannot be served: bad options, an unusable model
    CRASHED = "crashed"  # the process ended, or its engine failed; the next one may do better
    OOM = "oom"  # there was too little memory: the kernel killed it, or an allocation failed
    STALLED = "stalled"  # it worked, and then did not finish a frame, or fell silent
    WEDGED = "wedged"  # it got stuck before it ever worked: the next one would, too


REPORTED = {
    StageLostError.code: End.LOST,
    TransportError.code: End.LOST,
    RankLostError.code: End.LOST,
    CanaryError.code: End.REFUSED,  # these peers cannot be a group; the peer that placed it counts that
    InputError.code: End.REFUSED,
    ModelError.code: End.REFUSED,
}
"""The meaning of the last error that a runner reports; any other code is a failure of its engine or of exo-mesh."""


class StuckError(DeadlineError):
    """A runner makes no progress."""

    def __init__(self, message: str, end: End) -> None:
        super().__init__(message)
        self.end = end


def post_mortem(returncode: int | None, last_lines: Sequence[str], *, is_oom: bool = False) -> str:
    """Describe how a process ended that was not asked to end, with the last line of its output. is_oom: it was killed
    for memory."""
    if returncode == -signal.SIGKILL:
        how = "was killed by SIGKILL (" + ("by the system, which was out of memory)" if is_oom else "by hand)")
    elif returncode is not None and returncode < 0:
        how = f"was killed by {signal.Signals(-returncode).name}"
    else:
        how = f"ended with exit code {returncode}"
    return f"{how}; its last output: {last_lines[-1]}" if last_lines else how


async def end_process(
    process: asyncio.subprocess.Process,
    limits: RunnerLimits,
    flight: FlightLog,
    ask: Callable[[], Awaitable[None]] | None,
) -> bool:
    """End a process and all of its group, if it has not ended: by a message, if `ask` is given, then SIGTERM, then
    SIGKILL. A frozen process reacts only to SIGKILL. Returns False if not even SIGKILL ends it in time."""
    patience_s = limits.terminate_s
    if ask is not None and not _is_deaf(process):
        await ask()
        await ended(process, limits.polite_s)
        patience_s /= 2
    if not _is_deaf(process):
        await _signal(process, signal.SIGTERM, patience_s, flight)
    if process.returncode is None:
        await _signal(process, signal.SIGKILL, limits.terminate_s, flight)
    _signal_group(process.pid, signal.SIGKILL)  # ends the runner's own children, too
    flight.note("exit", code="none" if process.returncode is None else process.returncode)
    return process.returncode is not None


async def say_where_it_stands(process: asyncio.subprocess.Process, flight: FlightLog) -> None:
    """Make a stuck runner write the stacks of its threads (no values) into the log before it is ended: there is no
    other trace of the cause. A process that is stopped by a signal does not react."""
    if not _is_deaf(process):
        flight.note("stacks", "in the log of the node")
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        await ended(process, STACKS_S)


async def ended(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """Wait for the end of a process, at most patience_s."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await exit_of(process)


async def exit_of(process: asyncio.subprocess.Process) -> None:
    """Return once the process itself has ended. `process.wait` also waits for its pipes, which a child of the process
    may hold open for any time."""
    pidfd = _open_pidfd(process.pid) if process.returncode is None else -1
    if pidfd >= 0:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(pidfd, readable.cancel)  # may be called twice; cancelling counts as a result here
        try:
            await asyncio.wait((readable,))
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    pause_s = 0.001 if pidfd >= 0 else EXIT_POLL_S
    while process.returncode is None:  # noqa: ASYNC110 - the event loop reaps the process and notifies no one
        await asyncio.sleep(pause_s)


def _open_pidfd(pid: int) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # reaped already, or a kernel before 5.3
            return os.pidfd_open(pid)
    return -1


async def shielded(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even when this task is cancelled meanwhile; then raise the cancellation."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    task.result()


async def _signal(
    process: asyncio.subprocess.Process, sign: signal.Signals, patience_s: float, flight: FlightLog
) -> None:
    flight.note(sign.name)
    _signal_group(process.pid, sign)
    await ended(process, patience_s)


def _signal_group(pid: int, sign: signal.Signals) -> None:
    """Send a signal to the runner's process group: the runner leads the group, so this reaches its children, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sign)


def _is_deaf(process: asyncio.subprocess.Process) -> bool:
    """Whether only SIGKILL would have an effect: the process has ended, or is stopped by a signal."""
    return process.returncode is not None or is_stopped(process.pid)


def is_stopped(pid: int) -> bool:
    """Whether the system shows a process as stopped by a signal."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
