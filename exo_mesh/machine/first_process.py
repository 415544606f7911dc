"""Does the duties of a container's first process: forwards signals, and waits for orphaned processes."""

from __future__ import annotations

import os
import signal

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_first_process() -> None:
    """In process 1: returns in a child, and stays behind as an init. In any other process: does nothing.

    Orphans of a container become children of process 1, and stay zombies if nobody waits for them; the node waits for
    its own children only. The init ends when the child does, with its exit code, and the kernel then kills the rest.
    Call it before threads exist.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # blocked until there is a child to forward them to
    child = os.fork()
    if child == 0:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _take_terminal() -> None:
    """Makes this a process group of its own, in the foreground: Ctrl-C reaches it once, and not through the init."""
    os.setpgid(0, 0)
    if not os.isatty(0):
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)
