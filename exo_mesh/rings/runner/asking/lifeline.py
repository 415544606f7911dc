"""Ends a short-lived child process with the node that started it, even if the node is killed."""

from __future__ import annotations

import os
import sys
import threading

TIED = "--tied"
"""First argument of a child whose standard input is a pipe that the parent holds open while it wants an answer."""

EXIT_ABANDONED = 3


def tie(argv: list[str]) -> list[str]:
    """The arguments without TIED; if TIED is given, this process ends as soon as its standard input closes."""
    if argv[:1] != [TIED]:
        return argv
    threading.Thread(target=_end_with_input, name="lifeline", daemon=True).start()
    return argv[1:]


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_ABANDONED)
