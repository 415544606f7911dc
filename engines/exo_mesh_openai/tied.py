"""Runs a program that does not outlive the process that started it: `python tied.py PARENT_PID PROGRAM [ARGUMENT...]`.

On Linux the kernel ends the program with its parent. Elsewhere this process stays between the two, and ends the program
when it sees that the parent is gone. Needs nothing but the standard library, and is started without site packages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1

POLL_S = 0.5
"""How often the parent is looked for. A program may outlive its node by at most 2 s."""

TERM_S = 5.0


def main(argv: list[str]) -> int:
    """Run the program that the arguments name. Returns only if it was watched, with its exit code."""
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        become(parent, command)
    return watch(parent, command)


def become(parent: int, command: list[str]) -> None:
    """Replace this process by the program, which the kernel kills when the parent ends."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before the kernel knew
    os.execv(command[0], command)


def watch(parent: int, command: list[str]) -> int:
    """Run the program as a child until it ends, or until the parent is gone. SIGTERM is passed on. Returns the exit
    code of the program."""
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    while os.getppid() == parent:
        try:
            return child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    child.kill()
    return child.wait(TERM_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
