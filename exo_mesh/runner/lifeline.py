"""A short-lived child process ends with the node that asked it, even if that node is killed."""

from __future__ import annotations

import os
import sys
import threading

TIED = "--tied"
"""First argument of a child whose standard input is a pipe that its parent holds open while it wants an answer."""

EXIT_ABANDONED = 3


def tie(argv: list[str]) -> list[str]:
    """The arguments without TIED; with it, this process ends at once when its standard input does."""
    if argv[:1] != [TIED]:
        return argv
    threading.Thread(target=_end_with_input, name="lifeline", daemon=True).start()
    return argv[1:]


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_ABANDONED)
