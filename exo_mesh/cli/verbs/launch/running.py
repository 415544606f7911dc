"""Runs an agent in the foreground, and passes signals on to it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE_S = 10
"""How long an agent may take to end after SIGTERM; then it is killed."""


@contextmanager
def unwinding() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that what was made for a run is removed."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_agent(command: Sequence[str], environ: Mapping[str, str], lock: int) -> int:
    """Run a command until it ends; returns its exit code, or 128 plus the number of the signal that ended it.

    lock: a descriptor that the command inherits. A terminal sends SIGINT and SIGQUIT to the command itself. Raises
    OSError if it cannot be started.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            _send(child, number)

    def kill(*_: object) -> None:
        if child is not None:
            child.kill()

    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT), pass_on)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, kill)
    try:
        child = subprocess.Popen(command, env=environ, pass_fds=(lock,))
        for number in received:  # arrived before there was anybody to pass them on to
            _send(child, number)
        code = child.wait()
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    by_terminal = number in (signal.SIGINT, signal.SIGQUIT) and os.isatty(0)
    if not by_terminal:
        child.send_signal(number)
    if number == signal.SIGTERM:
        signal.alarm(GRACE_S)
